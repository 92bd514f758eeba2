"""Checks of hyperparameters, with the same wording for all.

Bounds are declared with a field, and `Checked` checks them:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Dropout(Checked):
        rate: float = bounded(0.1, at_least=0, below=1)
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import sys
import types
import typing
from collections.abc import Mapping
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
        for field in dataclasses.fields(self):
            kinds = _kinds(type(self))[field.name]
            name, value = (
                f"{type(self).__name__}.{field.name}",
                getattr(self, field.name),
            )
            bounds = field.metadata.get(_BOUNDS)
            if bounds is not None:
                others = tuple(kind for kind in kinds if kind not in (int, float))
                if not isinstance(value, others):
                    whole = int in kinds and float not in kinds
                    check_value(name, value, whole=whole, **bounds)
            elif not isinstance(value, kinds or object):
                example = field.metadata.get(_EXAMPLE)
                if example or all(map(_is_closed, kinds)):
                    _refuse(name, value, kinds, example)


@functools.cache
def _kinds(cls: type) -> Mapping[str, tuple[type, ...]]:
    """The classes that each field may be of; none where its type is no class."""
    kinds = {}
    for field in dataclasses.fields(cls):
        owner = next(c for c in cls.__mro__ if field.name in _annotated(c))
        holder = types.SimpleNamespace(__annotations__={field.name: field.type})
        names = vars(sys.modules.get(owner.__module__, types))
        try:
            kind = typing.get_type_hints(holder, names)[field.name]
        except NameError:  # It names a class in a function, or one for types only.
            kind = None
        union = (
            isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        )
        parts = typing.get_args(kind) if union else (kind,)
        plain = all(isinstance(part, type) and part is not Any for part in parts)
        kinds[field.name] = parts if plain else ()
    return kinds


def _annotated(cls: type) -> Mapping[str, Any]:
    return vars(cls).get("__annotations__", {})


def _is_closed(kind: type) -> bool:
    """Whether all instances of a class are known in advance."""
    return issubclass(kind, (enum.Enum, bool, types.NoneType))


def _refuse(
    name: str, value: Any, kinds: tuple[type, ...], example: str | None
) -> None:
    optional = types.NoneType in kinds
    kind, *more = (kind for kind in kinds if kind is not types.NoneType)
    if issubclass(kind, enum.Enum):
        wanted = f"one of {', '.join(map(str, kind))}"
        if example:
            wanted += f" or another, such as {example}"
    elif kind is bool:
        wanted = "True or False"
    else:
        names = " or ".join(each.__name__ for each in (kind, *more))
        wanted = f"of class {names}, such as {example}"
    wanted += " or None" if optional else ""
    wanted += " (with % before it in a gin file)" if issubclass(kind, enum.Enum) else ""
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
    kind = numbers.Integral if whole else numbers.Real
    good = isinstance(value, kind) and (whole or math.isfinite(value))
    good = good and (at_least is None or value >= at_least)
    good = good and (above is None or value > above)
    good = good and (below is None or value < below)
    good = good and (at_most is None or value <= at_most)
    if not good:
        bounds = {"of at least": at_least, "above": above}
        bounds |= {"below": below, "at most": at_most}
        wanted = [
            f"{word} {bound}" for word, bound in bounds.items() if bound is not None
        ]
        text, kind = " and ".join(wanted), "whole number" if whole else "number"
        raise ValueError(f"{name} is {value!r}; it must be a {kind} {text}".rstrip())
