"""Checks of hyperparameters, with the same wording for all.

Bounds are declared with a field, and `Checked` checks them:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Dropout(Checked):
        rate: float = bounded(0.1, at_least=0, below=1)

A class built in Python is held to what it declares. What gin built is held to all of
its types, by the same `fits`, in `trainers/experiment/bindings/field_types.py`: there
a message can say what gin files may give instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import numbers
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

_BOUNDS, _EXAMPLE = "bounds", "example"


def bounded(default: Any = dataclasses.MISSING, **bounds: float) -> Any:
    """A field for a finite number; for an integer if its type is `int`.

    Values of other members of the field's type, such as None, are accepted.

    Args:
      default: the field's default, if it has one.
      **bounds: as `check_value` takes them.
    """
    return dataclasses.field(default=default, metadata={_BOUNDS: bounds})


def instance(default: Any = dataclasses.MISSING, *, example: str) -> Any:
    """A field for an instance of its type, which is a class or a union of classes.

    Args:
      default: the field's default, if it has one.
      example: an example of an instance, for messages.
    """
    return dataclasses.field(default=default, metadata={_EXAMPLE: example})


class Checked:
    """Base of dataclasses that checks their fields.

    The fields checked are those that `bounded` and `instance` declare, and those whose
    type is an enum or bool. A subclass's `__post_init__` calls this class's first.

    Raises:
      ValueError: a field is something else; the message names class, field, value and
        what to give instead.
    """

    def __post_init__(self):
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):
            name = f"{type(self).__name__}.{field.name}"
            value, hint = getattr(self, field.name), hints.get(field.name)
            is_known = hint is not None
            bounds = field.metadata.get(_BOUNDS)
            if bounds is not None:
                is_number = isinstance(value, numbers.Real)
                if is_number or not is_known or not fits(value, hint):
                    whole = is_known and not fits(0.5, hint)
                    check_value(name, value, whole=whole, **bounds)
            elif is_known and not fits(value, hint):
                example = field.metadata.get(_EXAMPLE)
                if example or all(map(_is_closed, options(hint))):
                    _refuse(name, value, options(hint), example)


@functools.cache
def type_hints(owner: Any) -> Mapping[str, Any]:
    """The types of a class's fields or of a function's parameters, by name.

    Those are left out that name what is known to type checkers only, or in a function.
    """
    hints: dict[str, Any] = {}
    for holder in reversed(getattr(owner, "__mro__", (owner,))):
        names = vars(sys.modules.get(holder.__module__, types))
        for name, hint in inspect.get_annotations(holder).items():
            hints.pop(name, None)
            single = types.SimpleNamespace(__annotations__={name: hint})
            with contextlib.suppress(NameError, TypeError):
                hints |= typing.get_type_hints(single, names)
    return hints


def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; any other type by itself."""
    kinds = types.UnionType, typing.Union
    return typing.get_args(hint) if typing.get_origin(hint) in kinds else (hint,)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; elements of containers are not checked."""
    if len(options(hint)) > 1:
        return any(fits(value, option) for option in options(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is None:
        return value is None
    if kind is Any or not isinstance(kind, type) or _is_unchecked_protocol(kind):
        return True
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if is_sequence(kind):  # Gin users write (1, 2) or [1, 2].
        return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if issubclass(kind, os.PathLike):
        return isinstance(value, (str, os.PathLike))
    return isinstance(value, kind)


def is_sequence(kind: type) -> bool:
    """Whether a type takes tuples and lists alike, as far as `fits` is concerned."""
    return kind in (tuple, list, Sequence)


def _is_unchecked_protocol(kind: type) -> bool:
    """Whether a type says what an object does in a way that cannot be checked."""
    is_protocol = getattr(kind, "_is_protocol", False)
    return is_protocol and not getattr(kind, "_is_runtime_protocol", False)


def _is_closed(kind: Any) -> bool:
    """Whether all instances of a type are known in advance."""
    closed = (enum.Enum, bool, types.NoneType)
    return isinstance(kind, type) and issubclass(kind, closed)


def _refuse(
    name: str, value: Any, kinds: tuple[type, ...], example: str | None
) -> None:
    optional = types.NoneType in kinds
    kind, *more = (kind for kind in kinds if kind is not types.NoneType)
    if issubclass(kind, enum.Enum):
        wanted = f"one of {', '.join(map(str, kind))}"
    elif kind is bool:
        wanted = "True or False"
    else:
        names = " or ".join(each.__name__ for each in (kind, *more))
        wanted = f"of class {names}, such as {example}"
    wanted += " or None" if optional else ""
    if callable(value) and hasattr(value, "__name__"):
        # In gin, @Adam is the class and @Adam() an instance.
        wanted += f": write @{value.__name__}() for an instance"
    raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def check_number(config: Any, field: str, **bounds: float) -> None:
    """Checks `config.field` against bounds that other fields give.

    Args:
      config: a dataclass.
      field: the name of a field.
      **bounds: as `check_value` takes them.

    Raises:
      ValueError: it is out of bounds; the message names class, field, value and bounds.
    """
    check_value(f"{type(config).__name__}.{field}", getattr(config, field), **bounds)


def check_value(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    whole: bool = False,
) -> None:
    """Checks that a value is a finite number within the bounds given.

    Raises:
      ValueError: it is not; the message says its name and the bounds.
    """
    good = fits(value, int if whole else float) and (whole or math.isfinite(value))
    good = good and (at_least is None or value >= at_least)
    good = good and (above is None or value > above)
    good = good and (below is None or value < below)
    good = good and (at_most is None or value <= at_most)
    if not good:
        bounds = {"at least": at_least, "above": above}
        bounds |= {"below": below, "at most": at_most}
        wanted = [
            f"{word} {bound}" for word, bound in bounds.items() if bound is not None
        ]
        text, kind = " and ".join(wanted), "whole number" if whole else "number"
        raise ValueError(f"{name} is {value!r}; it must be a {kind} {text}".rstrip())
