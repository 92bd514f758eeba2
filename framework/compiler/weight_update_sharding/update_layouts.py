"""How the tensors of a weight update are divided (weight-update sharding 4.1).

A layout splits one dim, or several dims combined into one, of every tensor of a cluster
that has them. The bytes that a device then holds and moves are counted in full tiles of
its memory's layout.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.hlo.hlo_text import itemsize
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
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
      rows: the rows of a tile, for elements of 4 bytes.
      columns: the columns of a tile.
    """

    rows: int = 1
    columns: int = 1

    def can_combine(self, shape: Sequence[int], first: int, count: int) -> bool:
        """Whether dims of an array can be combined without moving its elements."""
        after = len(shape) - first - count
        if count == 1 or after > 1:
            return True
        if after == 1:
            return shape[first + count - 1] % self.rows == 0
        return self.columns == 1

    def bytes(self, shape: Sequence[int], dtype: str) -> int:
        """Bytes of an array in full tiles; either of its last dims may be the columns.

        With few rows the tiles have fewer too: compilers lay out small dims compactly.
        """
        *major, rows, columns = (1, 1, *shape)
        size = itemsize(dtype)
        tiled = min(self._tiled(rows, columns, size), self._tiled(columns, rows, size))
        return math.prod(major) * tiled * size

    def packed_rows(self, size: int) -> int:
        """The rows of a tile, for elements of `size` bytes."""
        return self.rows * (4 // size if self.rows > 1 and size < 4 else 1)

    def _tiled(self, rows: int, columns: int, size: int) -> int:
        high = min(self.packed_rows(size), 1 << (rows - 1).bit_length())
        return -(-rows // high) * high * -(-columns // self.columns) * self.columns


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateLayout:
    """How a cluster's tensors are divided.

    Args:
      dims: groups of corresponding dims, in a row, that are combined and split.
      axes: the mesh axes that split them, besides those that do already.
      cluster_dims: the groups of all dims.
      completed: the module, for the shardings of its tensors without the layout.
      tiles: the tiles of the devices' memory.
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
        """The first dim of a tensor that is combined or split; None if it has none."""
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
        """The sharding of a tensor with dims combined; `split` adds the axes."""
        before, first = self.completed.sharding(value), self.first(value)
        dims = [*before.dims[:first], *before.dims[first + self.count - 1 :]]
        if split:
            dims[first] = (*dims[first], *self.axes)
        return Sharding(before.mesh, tuple(dims))

    def is_even(self, value: ir.Value) -> bool:
        """Whether a tensor is divided without padding."""
        shape = self.shape(value)
        return self.sharding(value).padded_shape(shape) == shape

    def can_scatter(self, value: ir.Value) -> bool:
        """Whether devices have a reduce-scatter that gives a tensor's shards.

        TPU compilers have one along the first dim with more than one entry; along
        another in full tiles; and none along the last.
        """
        shape, first = self.shape(value), self.first(value)
        if self.tiles.columns == 1 or math.prod(shape[:first]) == 1:
            return True
        rows = self.sharding(value).shard_shape(shape)[first]
        tile = self.tiles.packed_rows(itemsize(dtype_of(value)))
        return first < len(shape) - 1 and rows % tile == 0

    def moved_share(self, value: ir.Value) -> float:
        """The bytes of all shards, in full tiles, as a share of the full tensor's.

        So 2048 shards of 17 rows are gathered as 2048 of 24.
        """
        dtype, before = dtype_of(value), self.completed.sharding(value)
        shard = self.sharding(value).shard_shape(self.shape(value))
        unsplit = self.tiles.bytes(before.shard_shape(shape_of(value)), dtype)
        return self.shards * self.tiles.bytes(shard, dtype) / unsplit

    def spared_bytes(self, value: ir.Value, tiles: Tiles | None = None) -> int:
        """The bytes of a tensor that the layout spares a device, in full tiles.

        Negative where padding takes more than is spared. `tiles` are the devices' by
        default.
        """
        tiles = tiles or self.tiles
        if self.first(value) is None:
            return 0
        before = self.completed.sharding(value).shard_shape(shape_of(value))
        shard = self.sharding(value).shard_shape(self.shape(value))
        dtype = dtype_of(value)
        return tiles.bytes(before, dtype) - tiles.bytes(shard, dtype)


def layouts_of(
    cluster: Cluster,
    dims: Dims,
    completed: CompletedModule,
    axes: tuple[str, ...],
    tiles: Tiles,
) -> Iterator[UpdateLayout]:
    """All ways to divide a cluster's tensors by some axes, the simplest first."""
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
        """Groups that may be split as one; None if not, or if given before."""
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
        """Whether every tensor has all groups of a chain in a row, or none of them."""
        for row in self.rows.values():
            shared = [group for group in row if group in chain]
            if shared and (tuple(shared) != chain or not _in_a_row(row, chain)):
                return False
        return True


def _in_a_row(row: list, chain: tuple) -> bool:
    start = row.index(chain[0])
    return tuple(row[start : start + len(chain)]) == chain
