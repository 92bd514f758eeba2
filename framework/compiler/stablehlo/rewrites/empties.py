"""Tensors without elements, made constants before XLA partitions a program.

XLA's partitioner ends the process at some products and convolutions without elements,
and its clean-up removes such operands of Shardy's manual regions (jaxlib 0.10.2).
"""

from __future__ import annotations

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    has_side_effect,
    shape_of,
    walk,
    zeros,
)

_SUMS = "stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"
_KEPT = "stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.constant"


def fold_empties(module: ir.Operation) -> None:
    """Makes results without elements, and sums over none, constants."""
    for op in reversed(list(walk(module))):
        if _is_folded(op):
            with ir.InsertionPoint(op), op.location:
                for result in op.results:
                    result.replace_all_uses_with(zeros(result.type))
            op.erase()


def _is_folded(op) -> bool:
    if not op.name.startswith("stablehlo.") or op.name in _KEPT or not op.results:
        return False
    arrays = all(isinstance(r.type, ir.RankedTensorType) for r in op.results)
    if has_side_effect(op) or not arrays:
        return False
    if op.name in _SUMS:
        return any(0 in shape_of(value) for value in op.operands)
    return all(0 in shape_of(result) for result in op.results)
