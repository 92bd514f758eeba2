"""Rolls by a known shift, said so that XLA's partitioner moves border rows only.

TF2XLA makes of `tf.roll` a window of the tensor put behind itself, whose start it
computes. Along a split dim XLA then moves the tensor about whole. Two slices in the
other order are a rotation to it: devices send their neighbours the rows that cross a
border, no others (jaxlib 0.10.2). Where nothing is split they cost no more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stable_hlo import integers, rows_of, shape_of, walk

_NUMBERS: dict[str, Callable] = {
    "stablehlo.abs": np.abs,
    "stablehlo.add": np.add,
    "stablehlo.and": np.bitwise_and,
    "stablehlo.convert": np.int64,
    "stablehlo.divide": lambda a, b: (a - np.fmod(a, b)) // b,  # Towards zero.
    "stablehlo.maximum": np.maximum,
    "stablehlo.minimum": np.minimum,
    "stablehlo.multiply": np.multiply,
    "stablehlo.negate": np.negative,
    "stablehlo.remainder": np.fmod,  # Of the dividend's sign.
    "stablehlo.select": np.where,
    "stablehlo.subtract": np.subtract,
}
_BROADCAST = "broadcast_dimensions"
_COMPARED = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "GT": np.greater}
_COMPARED |= {"LE": np.less_equal, "GE": np.greater_equal}


def rotate(module: ir.Module) -> None:
    """Replaces rolls whose shifts are known by two slices each.

    Rolls by a number that only the running program has are left as they are.
    """
    done: dict[tuple[ir.Value, int], tuple[ir.Value, int]] = {}
    for op in list(walk(module.operation)):
        if op.name == "stablehlo.dynamic_slice" and (dim := _rolled(op)) is not None:
            start = _known(op.operands[1 + dim])
            if start is not None:
                _replace(op, dim, int(start), done)


def _rolled(op) -> int | None:
    """The dim along which a window is a roll; None if it is none."""
    doubled = op.operands[0].owner
    if isinstance(doubled, ir.Block) or doubled.name != "stablehlo.concatenate":
        return None
    parts = list(doubled.operands)
    same = len(parts) == 2 and parts[0] == parts[1]
    if not same or shape_of(parts[0]) != shape_of(op.results[0]):
        return None
    return _dimension(doubled)


def _replace(op, dim: int, start: int, done: dict) -> None:
    """The rows from `start` on, and the ones before them behind these.

    `done` has for what was rolled along a dim the tensor and the start: of two rolls in
    a row, which XLA would see through to slices that are no rotation, one is made.
    """
    result, tensor = op.results[0], op.operands[0].owner.operands[0]
    size = shape_of(tensor)[dim]
    tensor, before = done.get((tensor, dim), (tensor, 0))
    start = (min(max(start, 0), size) + before) % max(size, 1)
    rolled = tensor
    if start:
        with ir.InsertionPoint(op), op.location:
            parts = [rows_of(tensor, dim, *at) for at in ((start, size), (0, start))]
            rolled = stablehlo.concatenate(parts, dim)
        done[rolled, dim] = tensor, start
    result.replace_all_uses_with(rolled)
    op.erase()


def _known(value: ir.Value) -> np.ndarray | None:
    """The integers that a tensor has; None if only the running program knows."""
    op = value.owner
    if isinstance(op, ir.Block):
        return None
    if op.name == "stablehlo.constant":
        numbers = op.attributes["value"]
        if not isinstance(numbers, ir.DenseIntElementsAttr):
            return None
        return np.array([*numbers], np.int64).reshape(shape_of(value))
    operands = [_known(operand) for operand in op.operands]
    if not operands or any(one is None for one in operands):
        return None
    if op.name in _NUMBERS:
        return _NUMBERS[op.name](*operands)
    if op.name == "stablehlo.compare":
        return _COMPARED[_direction(op)](*operands)
    if op.name == "stablehlo.broadcast_in_dim":
        shape = [1] * len(shape_of(value))
        for dim, size in zip(integers(op, _BROADCAST), operands[0].shape, strict=True):
            shape[dim] = size
        return np.broadcast_to(operands[0].reshape(shape), shape_of(value))
    if op.name == "stablehlo.reshape":
        return operands[0].reshape(shape_of(value))
    if op.name == "stablehlo.concatenate":
        return np.concatenate(
            operands, ir.IntegerAttr(op.attributes["dimension"]).value
        )
    if op.name == "stablehlo.slice":
        names = ("start_indices", "limit_indices", "strides")
        return operands[0][tuple(map(slice, *(integers(op, n) for n in names)))]
    return None


def _dimension(op) -> int:
    return ir.IntegerAttr(op.attributes["dimension"]).value


def _direction(op) -> str:
    attribute = op.attributes["comparison_direction"]
    return stablehlo.ComparisonDirectionAttr(attribute).value
