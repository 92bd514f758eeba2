"""Windows along split dims, computed in blocks of rows between which halos move.

A dim that n shards split becomes two: n blocks, which are split as the dim was, and the
rows of a block, which are unsharded. Rows of other blocks that a block's windows read
are put next to its own. Blocks are then like the images of a batch: no window reaches
from one into another, and XLA has nothing to get wrong. XLA sees the other blocks' rows
as a tensor shifted along the blocks, by a collective permute.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.halos.windows import (
    REDUCE_WINDOW,
    SELECT_AND_SCATTER,
    Window,
    split_windows,
    window_axes,
)
from meshwright.framework.compiler.repair.op_layout import EvenLayout, OpLayout
from meshwright.framework.compiler.stablehlo.stable_hlo import adds, dtype_of
from meshwright.framework.sharding.sharding import Sharding

FLOATS = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
"""Dtypes of images, as HLO and numpy name them, that have a minus infinity."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of a dim.

    Args:
      dim: the dim of the image and of the windows' results.
      count: the number of blocks.
      rows: the rows of the image in a block.
      windows: the windows in a block.
      start, stop: the rows that a block's windows read, relative to the block's first.
    """

    dim: int
    count: int
    rows: int
    windows: int
    start: int
    stop: int

    @property
    def read(self) -> int:
        """The number of rows that a block's windows read."""
        return self.stop - self.start

    def needed_and_held(self, size: int, shard: int) -> set[tuple[int, int]]:
        """How many rows of an image blocks' windows read, and how many devices hold.

        Args:
          size: the number of rows of the image.
          shard: the number of rows that each device holds.

        Returns:
          The different pairs of numbers, over all blocks.
        """
        counts = set()
        for block in range(self.count):
            first, last = block * self.rows + self.start, block * self.rows + self.stop
            first, last = max(0, first), min(size, last)
            held = min(last, (block + 1) * shard) - max(first, block * shard)
            counts.add((max(0, last - first), max(0, held)))
        return counts

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(blocks ahead, start, stop): rows of blocks that a block's windows read."""
        for further in range(self.start // self.rows, -(-self.stop // self.rows)):
            first = further * self.rows
            stop = min(self.stop, first + self.rows)
            yield further, max(self.start, first) - first, stop - first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halos:
    """A layout in which dims of windows stay split, and devices send halos.

    Args:
      shardings: the shardings of the operands, then of the results.
      blocks: the blocks of the window dims that are split.
    """

    shardings: tuple[Sharding, ...]
    blocks: tuple[Blocks, ...]

    def bytes(self, layout: OpLayout) -> int:
        """An estimate of the halos received by the device that needs the most.

        The gradient of a max pool sends halos twice: rows of the image to where they
        are read, and their gradients back.
        """
        image = layout.operands[0]
        blocked = {blocks.dim: blocks for blocks in self.blocks}
        shard = self.shardings[0].shard_shape(image.shape)
        others = math.prod(n for dim, n in enumerate(shard) if dim not in blocked)
        rows = [
            blocks.needed_and_held(image.shape[dim], shard[dim])
            for dim, blocks in blocked.items()
        ]
        halo = max(
            math.prod(needed for needed, _ in place) - math.prod(h for _, h in place)
            for place in itertools.product(*rows)
        )
        twice = 2 if layout.op.name == SELECT_AND_SCATTER else 1
        return twice * halo * others * image.itemsize


def in_blocks(layout: OpLayout, even: EvenLayout) -> Halos | None:
    """The layout with halos; None if the operation has none.

    Args:
      layout: the operation as completed.
      even: its layout with its window dims unsharded.
    """
    if not _is_simple(layout.op):
        return None
    part, takes = layout.mesh.part, layout.op.name == SELECT_AND_SCATTER
    dims = [axes for sharding in even.shardings for axes in sharding.dims]
    used = {part(axis).axis for axes in dims for axis in axes}
    split: dict[int, tuple[str, ...]] = {}
    blocks = []
    for window, _ in split_windows(layout):
        axes = window_axes(layout, window)
        dim_blocks = _blocks(window, layout.mesh.axes_size(axes))
        if dim_blocks is None or not used.isdisjoint(part(axis).axis for axis in axes):
            continue
        if takes and window.reads_padding_alone:  # There is nothing to take.
            continue
        split[window.dim] = axes
        used.update(part(axis).axis for axis in axes)
        blocks.append(dim_blocks)
    if not blocks:
        return None
    shardings = (
        dataclasses.replace(
            sharding,
            dims=tuple(split.get(dim, axes) for dim, axes in enumerate(sharding.dims)),
        )
        for sharding in even.shardings
    )
    return Halos(shardings=tuple(shardings), blocks=tuple(blocks))


def _is_simple(op) -> bool:
    """Whether an op reduces one tensor, or is the gradient of a max pool of floats."""
    if op.name == REDUCE_WINDOW:
        return len(op.results) == 1
    return (
        op.name == SELECT_AND_SCATTER
        and dtype_of(op.operands[0]) in FLOATS
        and _takes_the_largest(op)
        and adds(op, 1)
    )


def _takes_the_largest(op) -> bool:
    block = op.regions[0].blocks[0]
    compare = block.operations[0].operation
    if compare.name != "stablehlo.compare":
        return False
    direction = stablehlo.ComparisonDirectionAttr(
        compare.attributes["comparison_direction"]
    )
    return direction.value == "GE" and list(compare.operands) == list(block.arguments)


def _blocks(window: Window, shards: int) -> Blocks | None:
    """The blocks of a window's dim; None if they are impossible or not worth it."""
    if shards == 1 or window.base_dilation > 1 or not (window.out and window.image):
        return None
    read = min(window.image, window.last + window.size)
    windows = max(-(-window.out // shards), -(-read // (shards * window.stride)))
    start, stop = -window.low, (windows - 1) * window.stride + window.size - window.low
    if stop - start >= window.image:  # No less than the entire image.
        return None
    return Blocks(
        dim=window.dim,
        count=shards,
        rows=windows * window.stride,
        windows=windows,
        start=start,
        stop=stop,
    )
