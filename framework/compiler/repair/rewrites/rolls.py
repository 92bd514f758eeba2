"""Rolls by a known shift, said so that XLA's partitioner moves border rows only.

TF2XLA makes of `tf.roll` a window of the tensor put behind itself, whose start it
computes. Along a split dim XLA then moves the tensor about whole. Two slices in the
other order are a rotation to it: devices send their neighbours the rows that cross a
border, no others (jaxlib 0.10.2). Where nothing is split they cost no more.
"""

from __future__ import annotations

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.known_values import KnownValues
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    replace_result,
    rows_of,
    shape_of,
    walk,
)


def rotate(module: ir.Module) -> None:
    """Replaces rolls whose shifts are known by two slices each.

    Rolls by a number that only the running program has are left as they are.
    """
    done: dict[tuple[ir.Value, int], tuple[ir.Value, int]] = {}
    for op in list(walk(module.operation)):
        if op.name == "stablehlo.dynamic_slice" and (dim := _rolled(op)) is not None:
            start = KnownValues().of(op.operands[1 + dim])
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
    return ir.IntegerAttr(doubled.attributes["dimension"]).value


def _replace(op, dim: int, start: int, done: dict) -> None:
    """The rows from `start` on, and the ones before them behind these.

    `done` has for what was rolled along a dim the tensor and the start: of two rolls in
    a row, which XLA would see through to slices that are no rotation, one is made.
    """
    tensor = op.operands[0].owner.operands[0]
    size = shape_of(tensor)[dim]
    tensor, before = done.get((tensor, dim), (tensor, 0))
    start = (min(max(start, 0), size) + before) % max(size, 1)
    rolled = tensor
    if start:
        with ir.InsertionPoint(op), op.location:
            parts = [rows_of(tensor, dim, *at) for at in ((start, size), (0, start))]
            rolled = stablehlo.concatenate(parts, dim)
        done[rolled, dim] = tensor, start
    replace_result(op, rolled)
    op.erase()
