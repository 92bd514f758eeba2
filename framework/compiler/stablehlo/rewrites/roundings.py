"""Roundings that depend on no argument, computed before a program is partitioned.

`tf.image.resize` rounds fractions of positions, once for the rows that it reads and
again for their weights. On one device XLA computes both while it compiles. For a split
dim each device computes its own part, in several kernels. Where one kernel multiplies
and adds in a single instruction and another does not, a fraction next to an integer is
rounded to either side, and rows get the weights of others. Constants are the same on
all devices.
"""

from __future__ import annotations

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.dataflow.known_values import (
    FLOATS,
    INTEGERS,
    KnownValues,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    element_type,
    replace_result,
    walk,
)

_ROUNDINGS = ("stablehlo.ceil", "stablehlo.floor", "stablehlo.round_nearest_even")


def fold_roundings(module: ir.Operation) -> None:
    """Replaces roundings of floats that depend on no argument by constants.

    The floats are float32 or float64, of as few elements as `KnownValues` computes.
    """
    values, folded = KnownValues(), []
    for op in list(walk(module)):
        if not _rounds(op) or (value := values.of(op.results[0])) is None:
            continue
        with ir.InsertionPoint(op), op.location:
            value = np.ascontiguousarray(value).reshape(value.shape)
            constant = stablehlo.constant(ir.DenseElementsAttr.get(value))
        replace_result(op, constant)
        folded.append(op)
    for op in folded:  # Only now: `values` needs them in the module until the end.
        op.erase()


def _rounds(op) -> bool:
    if op.name != "stablehlo.convert":
        return op.name in _ROUNDINGS
    before, after = (str(element_type(v)) for v in (op.operands[0], op.results[0]))
    return before in FLOATS and after in INTEGERS
