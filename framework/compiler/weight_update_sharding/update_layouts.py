"""How the tensors of a weight update are divided (weight-update sharding 4.1).

A format splits one dim, or several dims combined into one, of every tensor of a cluster
that has them. What a device then holds and moves is counted in whole tiles of its
memory's layout.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.hlo.hlo_text import itemsize
from meshwright.framework.compiler.stablehlo.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    dtype_of,
    shape_of,
)
from meshwright.framework.compiler.weight_update_sharding.clusters import Cluster, Dims
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a device lays out the last two dims of an array.

    Args:
      rows: of a tile, for elements of 4 bytes.
      columns: of a tile.
    """

    rows: int = 1
    columns: int = 1

    def can_combine(self, shape: Sequence[int], first: int, count: int) -> bool:
        """Whether dims of an array are combined without moving its elements."""
        after = len(shape) - first - count
        if count == 1 or after > 1:
            return True
        if after == 1:
            return shape[first + count - 1] % self.rows == 0
        return self.columns == 1

    def bytes(self, shape: Sequence[int], dtype: str) -> int:
        """What an array takes, in whole tiles; either of two dims may be the columns.

        Of few rows a tile has fewer: compilers lay out small dims compactly.
        """
        *major, one, other = (1, 1, *shape)
        size = itemsize(dtype)
        tiled = min(self._tiled(one, other, size), self._tiled(other, one, size))
        return math.prod(major) * tiled * size

    def _tiled(self, rows: int, columns: int, size: int) -> int:
        packed = self.rows * (4 // size if self.rows > 1 and size < 4 else 1)
        high = min(packed, 1 << (rows - 1).bit_length())
        return -(-rows // high) * high * -(-columns // self.columns) * self.columns


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateLayout:
    """How a cluster's tensors are divided.

    Args:
      dims: groups of corresponding dims, in a row, that are combined and split.
      axes: the mesh axes that split them, besides those that do already.
      cluster_dims: all the dims' groups.
      completed: the module, for how its tensors lie otherwise.
      tiles: of the devices' memory.
    """

    dims: tuple
    axes: tuple[str, ...]
    cluster_dims: Dims
    completed: CompletedModule
    tiles: Tiles

    @property
    def count(self) -> int:
        """How many dims are combined; 1 for none."""
        return len(self.dims)

    @property
    def shards(self) -> int:
        return self.completed.mesh.axes_size(self.axes)

    def first(self, value: ir.Value) -> int | None:
        """The first dim of a tensor that is split; None if it has no such."""
        for dim in range(len(shape_of(value))):
            if self.cluster_dims.places.find((value, dim)) == self.dims[0]:
                return dim
        return None

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a tensor with the dims combined."""
        shape, first = shape_of(value), self.first(value)
        if first is None or self.count == 1:
            return shape
        last = first + self.count
        return (*shape[:first], math.prod(shape[first:last]), *shape[last:])

    def sharding(self, value: ir.Value, *, split: bool = True) -> Sharding:
        """Where a tensor lies, its dims combined: split by the axes too, or not."""
        own, first = self.completed.sharding(value), self.first(value)
        dims = [*own.dims[:first], *own.dims[first + self.count - 1 :]]
        if split:
            dims[first] = (*dims[first], *self.axes)
        return Sharding(own.mesh, tuple(dims))

    def is_even(self, value: ir.Value) -> bool:
        """Whether a tensor is divided without padding."""
        shape = self.shape(value)
        return self.sharding(value).padded_shape(shape) == shape

    def can_scatter(self, value: ir.Value) -> bool:
        """Whether devices have a reduce-scatter that gives a tensor's shards.

        TPU compilers have no reduce-scatter along a tensor's last dim.
        """
        last = 0 < self.first(value) == len(self.shape(value)) - 1
        return self.tiles.columns == 1 or not last

    def spared_bytes(self, value: ir.Value, tiles: Tiles | None = None) -> int:
        """What a device has less of a tensor than without the format, in whole tiles.

        Negative where padding takes more than is spared. `tiles` are the devices', if
        no others are given.
        """
        tiles = tiles or self.tiles
        if self.first(value) is None:
            return 0
        own = self.completed.sharding(value).shard_shape(shape_of(value))
        shard = self.sharding(value).shard_shape(self.shape(value))
        dtype = dtype_of(value)
        return tiles.bytes(own, dtype) - tiles.bytes(shard, dtype)


def formats_of(
    cluster: Cluster,
    dims: Dims,
    completed: CompletedModule,
    axes: tuple[str, ...],
    tiles: Tiles,
) -> Iterator[UpdateLayout]:
    """All ways to divide a cluster's tensors by some axes, the plainest first."""
    groups = _Groups(cluster, dims, completed)
    for value in cluster.values:
        shape = shape_of(value)
        for count in range(1, len(shape) + 1):
            for first in range(len(shape) - count + 1):
                moves = not tiles.can_combine(shape, first, count)
                chain = None if moves else groups.chain(value, first, count)
                if chain is not None:
                    yield UpdateLayout(chain, axes, dims, completed, tiles)


class _Groups:
    """The groups of corresponding dims of a cluster."""

    def __init__(self, cluster: Cluster, dims: Dims, completed: CompletedModule):
        self.dims = dims
        self.rows = {
            value: [dims.places.find((value, d)) for d in range(len(shape_of(value)))]
            for value in cluster.values
        }
        self.whole = {dims.places.find(place) for place in dims.whole}
        self.stiff = {dims.places.find(place) for place in dims.keeps_shape}
        for value, row in self.rows.items():
            # One axis cannot split two dims of a tensor.
            repeated = collections.Counter(row)
            self.whole.update(group for group in row if repeated[group] > 1)
            self.stiff.update(
                group for dim, group in enumerate(row) if completed.dim_axes(value, dim)
            )
        self.seen: set[tuple] = set()

    def chain(self, value: ir.Value, first: int, count: int) -> tuple | None:
        """Groups that may be split as one, each only once."""
        chain = tuple(self.rows[value][first : first + count])
        if chain in self.seen or self.whole & {*chain}:
            return None
        self.seen.add(chain)
        if math.prod(shape_of(value)[first : first + count]) < 2:
            return None
        if count > 1 and (self.stiff & {*chain} or not self._together(chain)):
            return None
        return chain

    def _together(self, chain: tuple) -> bool:
        """Whether every tensor has all of a chain in a row, or nothing of it."""
        for row in self.rows.values():
            own = [group for group in row if group in chain]
            if own and (tuple(own) != chain or not _in_a_row(row, chain)):
                return False
        return True


def _in_a_row(row: list, chain: tuple) -> bool:
    start = row.index(chain[0])
    return tuple(row[start : start + len(chain)]) == chain
