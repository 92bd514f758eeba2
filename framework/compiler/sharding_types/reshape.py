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
    """The axes and names of the dims of a tensor after a reshape to `shape`.

    Raises:
      IllTypedError: shards of the operand are no shards of the result.
    """
    dims: Dims = [()] * len(shape)
    names: Names = [None] * len(shape)
    narrow = [dim for dim, size in enumerate(type_.shape) if size < 2]
    if any(type_.dims[dim] for dim in narrow):
        raise _unlike(type_, narrow)
    for old, new in _groups(type_.shape, shape):
        if len(old) == len(new) == 1:
            dims[new[0]] = type_.dims[old[0]]
            names[new[0]] = type_.names[old[0]]
        elif any(type_.dims[dim] for dim in old):
            axes = _regrouped(type_, old, [shape[dim] for dim in new])
            for dim, split in zip(new, axes, strict=True):
                dims[dim] = split
    return dims, names


def _groups(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of old and new dims of equal size; dims of 1 are left out."""
    if 0 in old:
        return
    left = [dim for dim, size in enumerate(old) if size != 1]
    right = [dim for dim, size in enumerate(new) if size != 1]
    while left:
        old_dims, new_dims = [left.pop(0)], [right.pop(0)]
        count, new_count = old[old_dims[0]], new[new_dims[0]]
        while count != new_count:
            if count < new_count:
                old_dims.append(left.pop(0))
                count *= old[old_dims[-1]]
            else:
                new_dims.append(right.pop(0))
                new_count *= new[new_dims[-1]]
        yield old_dims, new_dims


def _regrouped(type_: TensorType, old: Sequence[int], sizes: Sequence[int]) -> Dims:
    """The axes of new dims of `sizes` that are made from the dims `old`."""
    factors = list(_factors(type_, old))
    dims = []
    for size in sizes:
        axes: list[str] = []
        has_unsplit = False
        while size > 1:
            count, axis = factors.pop(0)
            if axis is None and count > size and count % size == 0:
                factors.insert(0, (count // size, None))
                count = size
            if size % count or (axis is not None and has_unsplit):
                raise _unlike(type_, old)
            size //= count
            has_unsplit = has_unsplit or axis is None
            axes += [] if axis is None else [axis]
        dims.append(tuple(axes))
    return dims


def _factors(type_: TensorType, old: Sequence[int]) -> Iterator[tuple[int, str | None]]:
    """The factors of the dims' sizes, major first: axes, and None for unsplit ones."""
    unsplit = 1
    for dim in old:
        size = type_.shape[dim]
        for axis in type_.dims[dim]:
            count = type_.mesh.axis_size(axis)
            if size % count:
                raise _unlike(type_, old)
            size //= count
            if unsplit > 1:
                yield unsplit, None
                unsplit = 1
            yield count, axis
        unsplit *= size
    if unsplit > 1:
        yield unsplit, None


def _unlike(type_: TensorType, old: Sequence[int]) -> IllTypedError:
    split = [dim for dim in old if type_.dims[dim]]
    dims = [() if dim in split[-1:] else axes for dim, axes in enumerate(type_.dims)]
    return IllTypedError(
        f"dim {split[-1]} is not split where the result could be: its shards are no "
        "shards of the result",
        f"mesh_split it to {type_.sharding_text(dims)} before",
    )
