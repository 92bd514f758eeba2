"""Reshapes that each device can do on its own shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.framework.compiler.sharding_types.tensor_type import (
    IllTypedError,
    TensorType,
)

Dims = list[tuple[str, ...]]
Names = list[str | None]


def reshaped(type_: TensorType, shape: Sequence[int]) -> tuple[Dims, Names]:
    """The axes and names of the dims of a tensor that gets another shape.

    Raises:
      IllTypedError: a device's shard of the one is none of the other.
    """
    dims: Dims = [()] * len(shape)
    names: Names = [None] * len(shape)
    narrow = [dim for dim, size in enumerate(type_.shape) if size < 2]
    if any(type_.dims[dim] for dim in narrow):
        raise _unlike(type_, narrow)
    for ours, theirs in _groups(type_.shape, shape):
        if len(ours) == len(theirs) == 1:
            dims[theirs[0]] = type_.dims[ours[0]]
            names[theirs[0]] = type_.names[ours[0]]
        elif any(type_.dims[dim] for dim in ours):
            axes = _regrouped(type_, ours, [shape[dim] for dim in theirs])
            for dim, own in zip(theirs, axes, strict=True):
                dims[dim] = own
    return dims, names


def _groups(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Numbers of dims that make up each other, of sizes over 1, as few as can be."""
    if 0 in old:
        return
    left = [dim for dim, size in enumerate(old) if size != 1]
    right = [dim for dim, size in enumerate(new) if size != 1]
    while left:
        ours, theirs = [left.pop(0)], [right.pop(0)]
        one, other = old[ours[0]], new[theirs[0]]
        while one != other:
            if one < other:
                ours.append(left.pop(0))
                one *= old[ours[-1]]
            else:
                theirs.append(right.pop(0))
                other *= new[theirs[-1]]
        yield ours, theirs


def _regrouped(type_: TensorType, ours: Sequence[int], sizes: Sequence[int]) -> Dims:
    """The axes of dims of `sizes` that are made of dims `ours`."""
    factors = list(_factors(type_, ours))
    dims = []
    for size in sizes:
        axes: list[str] = []
        whole = False
        while size > 1:
            count, axis = factors.pop(0)
            if axis is None and count > size and count % size == 0:
                factors.insert(0, (count // size, None))
                count = size
            if size % count or (axis is not None and whole):
                raise _unlike(type_, ours)
            size //= count
            whole = whole or axis is None
            axes += [] if axis is None else [axis]
        dims.append(tuple(axes))
    return dims


def _factors(
    type_: TensorType, ours: Sequence[int]
) -> Iterator[tuple[int, str | None]]:
    """What the dims' sizes are made of, major first: axes, and what each has whole."""
    whole = 1
    for dim in ours:
        size = type_.shape[dim]
        for axis in type_.dims[dim]:
            count = type_.mesh.axis_size(axis)
            if size % count:
                raise _unlike(type_, ours)
            size //= count
            if whole > 1:
                yield whole, None
                whole = 1
            yield count, axis
        whole *= size
    if whole > 1:
        yield whole, None


def _unlike(type_: TensorType, ours: Sequence[int]) -> IllTypedError:
    split = [dim for dim in ours if type_.dims[dim]]
    dims = [() if dim in split[-1:] else axes for dim, axes in enumerate(type_.dims)]
    return IllTypedError(
        f"dim {split[-1]} is not split where the result could be: shards of the one "
        "shape are none of the other",
        f"mesh_split it to {type_.said_text(dims)} before",
    )
