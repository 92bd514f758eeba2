"""Parts of weights, read of arrays that are shaped otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.trainers.checkpoints.checkpoint_rules import Change

Bounds = Sequence[tuple[int, int]]
"""First and end of a part, for each dim."""


def read_part(
    array: Any,
    source_shape: Sequence[int],
    changes: Sequence[Change],
    shape: Sequence[int],
    bounds: Bounds,
) -> np.ndarray:
    """A part of what `changes` make of an array.

    No more of the array is read than the part needs, where each of its dims is a run of
    dims merged and the part has all of a run but its first dim.

    Args:
      array: can be indexed by slices.
      source_shape: its shape.
      changes: made of it, in order.
      shape: the shape after them.
      bounds: of the part, of that shape.
    """
    is_turned = Change.TRANSPOSE in changes
    turned_shape = list(source_shape)[::-1] if is_turned else list(source_shape)
    runs = _runs(turned_shape, shape)
    if runs is None:  # Dims are split anew: no part of it alone.
        whole = np.asarray(array[...])
        whole = (whole.T if is_turned else whole).reshape(shape)
        return whole[tuple(slice(*ends) for ends in bounds)]
    outer, inner, part_shape = [], [], []
    for dims in runs:
        if not dims:  # A dim of size 1, which is nowhere after.
            outer.append(slice(0, 1))
            continue
        first, *rest = dims
        each = math.prod(shape[dim] for dim in rest)
        start, end = bounds[first]
        outer.append(slice(start * each, end * each))
        part_shape += [end - start, *(shape[dim] for dim in rest)]
        inner += [slice(None), *(slice(*bounds[dim]) for dim in rest)]
    if is_turned:
        part = np.asarray(array[tuple(outer[::-1])]).T
    else:
        part = np.asarray(array[tuple(outer)])
    return part.reshape(part_shape)[tuple(inner)]


def _runs(merged: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """The dims of `shape` that each dim of `merged` is a run of; None if it is not."""
    runs, dim = [], 0
    for size in merged:
        run, product = [], 1
        while product < size and dim < len(shape):
            product *= shape[dim]
            run.append(dim)
            dim += 1
        if product != size:
            return None
        runs.append(run)
    # Dims of size 1 that are left would belong to none.
    return runs if dim == len(shape) else None
