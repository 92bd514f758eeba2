"""Rolls by a known shift, written so that XLA's partitioner moves border rows only.

TF2XLA makes `tf.roll` a window, at a computed start, of the tensor concatenated with
itself. Along a split dim XLA then moves the entire tensor. It takes two slices in the
other order for a rotation: devices send their neighbours the rows that cross a border,
no others (jaxlib 0.10.2). Where nothing is split, the slices cost no more.
"""

from __future__ import annotations

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.dataflow.known_values import KnownValues
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    replace_result,
    rows_of,
    shape_of,
    walk,
)


def rotate(module: ir.Operation) -> None:
    """Replaces rolls whose shifts are known by two slices each.

    Rolls by a number that is known only at run time are left as they are.
    """
    done: dict[tuple[ir.Value, int], tuple[ir.Value, int]] = {}
    for op in list(walk(module)):
        if op.name == "stablehlo.dynamic_slice" and (dim := _rolled(op)) is not None:
            start = KnownValues().of(op.operands[1 + dim])
            if start is not None:
                _replace(op, dim, int(start), done)


def _rolled(op) -> int | None:
    """The dim along which a window is a roll; None if the window is no roll."""
    doubled = op.operands[0].owner
    if isinstance(doubled, ir.Block) or doubled.name != "stablehlo.concatenate":
        return None
    parts = list(doubled.operands)
    same = len(parts) == 2 and parts[0] == parts[1]
    if not same or shape_of(parts[0]) != shape_of(op.results[0]):
        return None
    return ir.IntegerAttr(doubled.attributes["dimension"]).value


def _replace(op, dim: int, start: int, done: dict) -> None:
    """Puts the rows from `start` on first, and the rows before them last.

    `done` maps a rolled tensor and its dim to the original tensor and the start: two
    successive rolls become one, as XLA would merge their slices into no rotation.
    """
    doubled = op.operands[0].owner
    tensor = doubled.operands[0]
    size = shape_of(tensor)[dim]
    tensor, before = done.get((tensor, dim), (tensor, 0))
    start = (min(max(start, 0), size) + before) % max(size, 1)
    rolled = tensor
    if start:
        with ir.InsertionPoint(op), op.location:
            parts = [
                rows_of(tensor, dim, *bounds) for bounds in ((start, size), (0, start))
            ]
            rolled = stablehlo.concatenate(parts, dim)
        done[rolled, dim] = tensor, start
    replace_result(op, rolled)
    op.erase()
    if not list(doubled.results[0].uses):  # It would count as a reader of the tensor.
        doubled.erase()
