"""The device mesh: devices in a grid whose axes have names."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_PART = re.compile(r"(?P<axis>.+):\((?P<before>\d+)\)(?P<size>\d+)")


@dataclasses.dataclass(frozen=True)
class SubAxis:
    """`size` steps of a mesh axis, after `before` coarser ones: a mixed-radix digit.

    It is written `Y:(2)4` as in Shardy; `DeviceMesh.name` calls the entire axis `Y`.
    """

    axis: str
    before: int
    size: int

    @property
    def end(self) -> int:
        return self.before * self.size

    def __str__(self) -> str:
        return f"{self.axis}:({self.before}){self.size}"


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """A grid of devices with named axes (GSPMD 3.1).

    It is only a description: no device is touched before a program is compiled for it,
    so a mesh of 2048 devices can be planned for on a laptop. Wherever an axis is named,
    a sub-axis can be too: `Y:(1)2` is the coarser half of an axis of four.

    Args:
      axis_names: one name for each mesh axis.
      shape: devices along each axis.
      device_ids: ids of the devices in row-major order of the mesh, each once; the
        default, None, is 0, 1, 2, ... Any order is kept, in collectives too.

    Raises:
      TypeError: the names are no sequence of strings, or shape or ids none of ints.
      ValueError: names repeat, or names, shape and ids do not agree.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    device_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        names, shape = _names_and_shape(self.axis_names, self.shape)
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "shape", shape)
        if len(self.axis_names) != len(self.shape):
            raise ValueError(
                f"device mesh names {len(self.axis_names)} axes {self.axis_names} "
                f"but its shape {self.shape} has {len(self.shape)}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"device mesh axis names repeat: {self.axis_names}")
        for name in self.axis_names:
            if not re.fullmatch(r"\w[\w-]*", name) or name == "_":
                raise ValueError(
                    f"device mesh axis {name!r}: a name is of letters, digits, - and _"
                )
        if any(n < 1 for n in self.shape):
            raise ValueError(f"device mesh shape {self.shape} must be positive")
        if self.device_ids is not None:
            ids = np.asarray(self.device_ids)
            if ids.size and ids.dtype.kind not in "iu":
                raise TypeError(
                    f"device_ids of a device mesh is {self.device_ids!r}; pass ints"
                )
            ids = tuple(int(i) for i in ids.flat)
            if len(ids) != self.size or len(set(ids)) != len(ids):
                raise ValueError(
                    f"device mesh of shape {self.shape} needs {self.size} distinct "
                    f"device ids, got {len(ids)} ids, {len(set(ids))} distinct"
                )
            in_order = ids == tuple(range(self.size))
            object.__setattr__(self, "device_ids", None if in_order else ids)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def ids(self) -> np.ndarray:
        """Device ids as an array of the mesh's shape."""
        ids = range(self.size) if self.device_ids is None else self.device_ids
        return np.asarray(ids).reshape(self.shape)

    def part(self, axis: str) -> SubAxis:
        """The mesh axis, or sub-axis, that `axis` names.

        Raises:
          ValueError: no such axis, or a part that does not divide it.
        """
        return _part(self, axis)

    def axis_size(self, axis: str) -> int:
        """Devices along `axis`; if it is unknown, ValueError names the mesh's axes."""
        return self.part(axis).size

    def axes_size(self, axes: Sequence[str]) -> int:
        """Devices along several axes together; 1 for none."""
        return math.prod(self.axis_size(axis) for axis in axes)

    def dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        """As many of the axes, from the first, as together divide a size."""
        while size % self.axes_size(axes):
            axes = axes[:-1]
        return axes

    def name(self, part: SubAxis) -> str:
        """The name of `part`: `Y:(2)4`, or just `Y` for an entire axis."""
        return part.axis if part.size == self.axis_size(part.axis) else str(part)

    def entire(self, axes: Iterable[str]) -> set[str]:
        """The entire axes that axes, or parts of them, belong to."""
        return {self.part(axis).axis for axis in axes}

    def left_of(self, axes: Sequence[str], taken: Sequence[str]) -> tuple[str, ...]:
        """What is left of entire axes without others, or without a part of each."""
        parts = {part.axis: part for part in map(self.part, taken)}
        left = []
        for axis in axes:
            size = self.axis_size(axis)
            part = parts.get(axis, SubAxis(axis, size, 1))
            rest = (
                SubAxis(axis, 1, part.before),
                SubAxis(axis, part.end, size // part.end),
            )
            left += [self.name(digit) for digit in rest if digit.size > 1]
        return tuple(left)

    def stride(self, axis: str) -> int:
        """The distance of neighbours along `axis` in the mesh's row-major order."""
        part = self.part(axis)
        number = self.axis_names.index(part.axis)
        return math.prod(self.shape[number:]) // part.end

    def place_along(self, axis: str) -> np.ndarray:
        """The index along `axis` of each device, an array of the mesh's shape."""
        places = np.arange(self.size).reshape(self.shape)
        return places // self.stride(axis) % self.axis_size(axis)

    def __str__(self) -> str:
        pairs = zip(self.axis_names, self.shape, strict=True)
        return ", ".join(f"{name}={size}" for name, size in pairs)


def _names_and_shape(names: Any, shape: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Both as tuples; TypeError if they have other types, or come in Keras's order."""
    words, sizes = (
        tuple(of) if isinstance(of, Iterable) and not isinstance(of, str) else (None,)
        for of in (names, shape)
    )
    if any(isinstance(size, str) for size in sizes):
        raise TypeError(
            f"device mesh of axis names {names!r} and shape {shape!r}: the names come "
            'first, as in DeviceMesh(("data", "model"), (2, 4))'
        )
    if not all(isinstance(word, str) for word in words):
        example = (names,) if isinstance(names, str) else ("data", "model")
        raise TypeError(
            f"axis_names of a device mesh is {names!r}; pass a tuple of names, such as "
            f"{example}"
        )
    if not all(isinstance(size, numbers.Integral) for size in sizes):
        example = (int(shape),) if isinstance(shape, numbers.Integral) else (2, 4)
        raise TypeError(
            f"shape of a device mesh is {shape!r}; pass a tuple of ints, such as "
            f"{example}"
        )
    return words, tuple(int(size) for size in sizes)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """What ends a message on an unknown name: the most similar known name, if any.

    Upper and lower case are alike.
    """
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def read_pattern(pattern: str, what: str) -> re.Pattern[str]:
    """A regular expression of a user.

    Args:
      pattern: the expression.
      what: names it in the message.

    Raises:
      ValueError: it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        hint = "write \\ before characters that have a meaning in one"
        if pattern.startswith(("*", "?")):
            hint = f"it is no glob, pass {'.' + pattern!r}"
        raise ValueError(f"{what}: {error} in the regular expression: {hint}") from None


def places_in(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The index in flattened `ids` of each of `wanted`; both hold the same ids.

    Returns:
      int array of the shape of `wanted`.
    """
    order = np.argsort(ids, axis=None)
    return order[np.searchsorted(np.ravel(ids)[order], wanted)]


@functools.lru_cache(maxsize=4096)
def _part(mesh: DeviceMesh, axis: str) -> SubAxis:
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    if axis in sizes:
        return SubAxis(axis, 1, sizes[axis])
    match = _PART.fullmatch(axis)
    if match is None or match["axis"] not in sizes:
        raise ValueError(
            f"unknown mesh axis {axis!r}: the mesh has {mesh.axis_names}"
            f"{did_you_mean(axis, mesh.axis_names)}"
        )
    part = SubAxis(match["axis"], int(match["before"]), int(match["size"]))
    if part.end < 1 or sizes[part.axis] % part.end:
        raise ValueError(
            f"mesh axis part {axis!r}: {part.before} * {part.size} must divide the "
            f"size {sizes[part.axis]} of axis {part.axis!r}"
        )
    return part
