"""Writes windows along split dims as windows of blocks; see `halos`."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.halos.halos import FLOATS, Blocks, Halos
from meshwright.framework.compiler.repair.halos.windows import REDUCE_WINDOW
from meshwright.framework.compiler.repair.write import annotated
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    dtype_of,
    element_type,
    rows_of,
    shape_of,
    tensor_type,
    zeros,
)
from meshwright.framework.sharding.sharding import Sharding

Size = Callable[[Blocks], int]
"""How many rows of a tensor a block has."""

_ROWS, _WINDOWS, _READ = map(operator.attrgetter, ("rows", "windows", "read"))
_BY_DIM = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")


def lay_out_in_blocks(op, layout: Halos) -> None:
    """Replaces a pooling, or its gradient, by the same in blocks."""
    with ir.InsertionPoint(op), op.location:
        sharding = layout.shardings[-1]
        write = _Writer(layout.blocks, sharding)
        if op.name == REDUCE_WINDOW:
            result = _reduced(op, write)
        else:
            result = _scattered(op, write)
        op.results[0].replace_all_uses_with(annotated(result, sharding))
    op.erase()


def _reduced(op, write: _Writer) -> ir.Value:
    image, init = op.operands
    shape, operands = shape_of(op.results[0]), [write.extended(image, init), init]
    result = write.windows(op, operands, shape, _WINDOWS)
    return write.merged(result, _WINDOWS, shape, init)


def _scattered(op, write: _Writer) -> ir.Value:
    """The gradient of a max pool.

    Padding is less than any element of the image, so that no window takes it; windows
    beyond the last send nothing back.
    """
    image, source, init = op.operands
    shape = shape_of(image)
    infinite, finite = _lowest(image)
    image = stablehlo.maximum(image, _broadcast(finite, image.type))
    zero = zeros(init.type)
    operands = [
        write.extended(image, infinite),
        write.blocked(source, _WINDOWS, zero),
        zero,
    ]
    parts = write.windows(op, operands, shape, _READ)
    result = write.merged(write.added_up(parts, zero), _ROWS, shape, zero)
    return stablehlo.add(result, _broadcast(init, result.type))


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Writes an operation's tensors in blocks, at the insertion point.

    Args:
      blocks: the blocks of dims.
      sharding: the sharding of tensors that are not in blocks.
    """

    blocks: Sequence[Blocks]
    sharding: Sharding

    def blocked(self, value: ir.Value, size: Size, filler: ir.Value) -> ir.Value:
        """A tensor in blocks of the given size, filled up or cut to fit."""
        full_shape = self._of_all_blocks(shape_of(value), size)
        shape = self._blocked_shape(full_shape, size)
        value = annotated(_resized(value, full_shape, filler), self.sharding)
        value = stablehlo.reshape(tensor_type(value.type, shape), value)
        return self._annotated(value)

    def merged(
        self, value: ir.Value, size: Size, shape: Sequence[int], filler: ir.Value
    ) -> ir.Value:
        """The reverse: the tensor of `shape` that a tensor in blocks is."""
        full_shape = self._of_all_blocks(shape, size)
        value = stablehlo.reshape(tensor_type(value.type, full_shape), value)
        return _resized(annotated(value, self.sharding), shape, filler)

    def extended(self, image: ir.Value, filler: ir.Value) -> ir.Value:
        """The rows of an image that each block's windows read."""
        value = self.blocked(image, _ROWS, filler)
        for dim, blocks in self._places():
            parts = []
            for further, start, stop in blocks.pieces():
                part = rows_of(value, dim + 1, start, stop)
                if abs(further) < blocks.count:
                    part = _padded(part, {dim: (-further, further)}, filler)
                else:  # There is no block so far away.
                    part = _broadcast(filler, part.type)
                parts.append(part)
            value = stablehlo.concatenate(parts, dim + 1)
        return self._annotated(value)

    def added_up(self, value: ir.Value, zero: ir.Value) -> ir.Value:
        """The sum for each row of an image over all blocks that read it."""
        for dim, blocks in self._places():
            parts = []
            for further, start, stop in blocks.pieces():
                if abs(further) >= blocks.count:
                    continue
                before = further * blocks.rows - blocks.start
                part = rows_of(value, dim + 1, before + start, before + stop)
                back = {dim: (further, -further), dim + 1: (start, blocks.rows - stop)}
                parts.append(_padded(part, back, zero))
            value = functools.reduce(stablehlo.add, parts)
        return self._annotated(value)

    def windows(self, op, operands: Sequence[ir.Value], shape, size: Size) -> ir.Value:
        """The operation's result, for operands in blocks and without its padding.

        Args:
          op: the operation.
          operands: its new operands.
          shape: the shape of its result.
          size: the size of a block of the result.
        """
        new = op.clone()
        for number, operand in enumerate(operands):
            new.operands[number] = operand
        for name in _BY_DIM:
            if name in op.attributes:
                listed = list(op.attributes[name])
                for dim, _ in self._places():
                    listed.insert(dim, 1)
                new.attributes[name] = ir.DenseI64ArrayAttr.get(listed)
        if "padding" in op.attributes:
            padding = np.array(op.attributes["padding"]).reshape(-1, 2)
            for dim, _ in self._places():
                padding[dim] = 0
                padding = np.insert(padding, dim, 0, axis=0)
            new.attributes["padding"] = ir.DenseElementsAttr.get(padding)
        result = new.results[0]
        result.set_type(tensor_type(result.type, self._blocked_shape(shape, size)))
        return self._annotated(result)

    def _places(self) -> Iterator[tuple[int, Blocks]]:
        """(the dim that counts blocks, the blocks); rows are in the dim after it."""
        for number, blocks in enumerate(self.blocks):
            yield blocks.dim + number, blocks

    def _of_all_blocks(self, shape: Sequence[int], size: Size) -> list[int]:
        """A tensor's shape if it has the rows of all blocks, and no others."""
        rows = {blocks.dim: blocks.count * size(blocks) for blocks in self.blocks}
        return [rows.get(dim, old) for dim, old in enumerate(shape)]

    def _blocked_shape(self, shape: Sequence[int], size: Size) -> list[int]:
        blocked = list(shape)
        for dim, blocks in self._places():
            blocked[dim : dim + 1] = [blocks.count, size(blocks)]
        return blocked

    def _annotated(self, value: ir.Value) -> ir.Value:
        """A tensor in blocks, annotated so that each device has its own blocks."""
        dims = list(self.sharding.dims)
        for dim, _ in self._places():
            dims.insert(dim + 1, ())
        return annotated(value, dataclasses.replace(self.sharding, dims=tuple(dims)))


def _lowest(image: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Minus infinity, and the least number above it."""
    element = element_type(image)
    scalar = ir.RankedTensorType.get([], element)
    least = float(jnp.finfo(FLOATS[dtype_of(image)]).min)
    infinite, finite = (
        stablehlo.constant(
            ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(element, number))
        )
        for number in (-math.inf, least)
    )
    return infinite, finite


def _broadcast(scalar: ir.Value, type_: ir.Type) -> ir.Value:
    return stablehlo.broadcast_in_dim(type_, scalar, ir.DenseI64ArrayAttr.get([]))


def _resized(value: ir.Value, shape: Sequence[int], filler: ir.Value) -> ir.Value:
    """A tensor filled up or cut at the end of its dims."""
    sizes = zip(shape, shape_of(value), strict=True)
    return _padded(
        value, {i: (0, new - old) for i, (new, old) in enumerate(sizes)}, filler
    )


def _padded(
    value: ir.Value, by_dim: Mapping[int, tuple[int, int]], filler: ir.Value
) -> ir.Value:
    """A tensor padded, or cut, before and after its dims."""
    if not any(map(any, by_dim.values())):
        return value
    rank = len(shape_of(value))
    low, high = ([by_dim.get(d, (0, 0))[i] for d in range(rank)] for i in (0, 1))
    arrays = map(ir.DenseI64ArrayAttr.get, (low, high, [0] * rank))
    return stablehlo.pad(value, filler, *arrays)
