"""Checks values of fields against their annotations, in gin's spelling.

Python does not check them: a layer count in quotes would fail elsewhere, or nowhere.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import numbers
import os
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import gin

_MOST_EXAMPLES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misfit:
    """A field whose value is not of its type.

    Args:
      owner: the class.
      field: its field.
      value: the field's value.
      hint: the field's annotation.
    """

    owner: type
    field: str
    value: Any
    hint: Any

    def __str__(self) -> str:
        text = (
            f"{self.owner.__name__}.{self.field} is {self.value!r}; it must be "
            f"{spelling(self.hint)}"
        )
        # In gin, @Adam is the class and @Adam() an instance.
        if isinstance(self.value, type) and not _is_callable(self.hint):
            text += f": write @{self.value.__name__}()"
        return text


def misfits(root: Any) -> Iterator[Misfit]:
    """The fields of wrong types in an object that gin built, and in what it holds.

    Dataclasses registered with gin are checked; a field that has its default is right.
    """
    registered = {id(entry.wrapped) for _, entry in gin.config._REGISTRY.items()}
    pending, seen = [root], set()
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, (tuple, list)):
            pending += item
        elif dataclasses.is_dataclass(item) and id(item) not in seen:
            seen.add(id(item))
            if id(type(item)) in registered:
                yield from misfits_of(item)
            values = (getattr(item, f.name, None) for f in dataclasses.fields(item))
            pending += reversed([v for v in values if not isinstance(v, type)])


def misfits_of(instance: Any) -> Iterator[Misfit]:
    """The fields of a dataclass's instance that have values of wrong types."""
    hints = type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name, field.default)
        if value is not field.default and not fits(value, hints.get(field.name, Any)):
            yield Misfit(
                owner=type(instance),
                field=field.name,
                value=value,
                hint=hints[field.name],
            )


def type_hints(owner: Any) -> dict[str, Any]:
    """Annotations of a class or function; empty if they name what is not imported."""
    try:
        return typing.get_type_hints(owner)
    except (NameError, TypeError):
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; elements of containers are not checked."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is None:
        return value is None
    # Protocols say what an object does, which cannot be checked.
    is_protocol = getattr(kind, "_is_protocol", False)
    if kind is Any or not isinstance(kind, type) or is_protocol:
        return True
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if _is_sequence(kind):  # Gin users write (1, 2) or [1, 2].
        return isinstance(value, collections.abc.Sequence) and not isinstance(
            value, (str, bytes)
        )
    if issubclass(kind, os.PathLike):
        return isinstance(value, (str, os.PathLike))
    return isinstance(value, kind)


def spelling(hint: Any) -> str:
    """The values that a gin file may give a field of a type, in words."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(spelling(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    kind = typing.get_origin(hint) or hint
    simple = {
        bool: "True or False",
        int: "a whole number, such as 2",
        float: "a number, such as 0.1",
        str: "a string in quotes, such as 'abc'",
        type(None): "None",
        None: "None",
    }
    if kind in simple:
        return simple[kind]
    if not isinstance(kind, type):
        return f"of type {hint}"
    if issubclass(kind, os.PathLike):
        return "a path in quotes, such as '/data'"
    if _is_sequence(kind):
        return "a sequence, such as (2, 4)"
    if issubclass(kind, Mapping):
        return "a dictionary, such as {'batch': 'X'}"
    if _is_callable(hint):
        return "a function, such as @name"
    if constants := _constants(kind):  # Of enums, and TensorFlow's dtypes.
        return _either(constants)
    if issubclass(kind, enum.Enum):
        return f"one of {', '.join(map(str, kind))}"
    examples = [
        f"@{gin.config._REGISTRY.minimal_selector(selector)}()"
        for selector, entry in gin.config._REGISTRY.items()
        if isinstance(entry.wrapped, type) and issubclass(entry.wrapped, kind)
    ]
    such_as = _either(sorted(examples)[:_MOST_EXAMPLES])
    return f"of class {kind.__name__}{f', such as {such_as}' if such_as else ''}"


def _either(names: list[str]) -> str:
    return " or ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def _constants(kind: type) -> list[str]:
    """Gin's constants of a type."""
    parts = 2 if issubclass(kind, enum.Enum) else 1
    return [
        "%" + ".".join(selector.split(".")[-parts:])
        for selector, value in gin.config._CONSTANTS.items()
        if isinstance(value, kind)
    ]


def _is_sequence(kind: type) -> bool:
    return kind in (tuple, list, collections.abc.Sequence)


def _is_callable(hint: Any) -> bool:
    return (typing.get_origin(hint) or hint) is collections.abc.Callable
