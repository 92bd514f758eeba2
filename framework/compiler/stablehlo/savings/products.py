"""Sums of products over the batch, as single products that sum over it too.

The gradient of a weight that multiplies each row of a batch comes from TF as a product
for each row, and then their sum: so `tf.matmul` of tensors of different ranks has it,
and with it Keras's layers to and from attention heads. The products of all rows are in
memory at once, each as large as the weight, and XLA's CPU backend takes four times as
long for them (jaxlib 0.10.2).
"""

from __future__ import annotations

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    adds,
    dot_dims,
    is_constant_zero,
    keep_precision,
    reduced_dims,
    shape_of,
    walk,
)


def sum_in_products(module: ir.Operation) -> None:
    """Has a product that is summed over all its batching dims contract them.

    Args:
      module: changed in place.
    """
    for op in list(walk(module)):
        if not _is_summed_product(op):
            continue
        product = op.operands[0].owner
        batching, contracting = dot_dims(product, len(shape_of(product.operands[0])))
        dims = [
            [*rows, *summed] for rows, summed in zip(batching, contracting, strict=True)
        ]
        with ir.InsertionPoint(op), op.location:
            single = stablehlo.dot_general(
                op.results[0].type,
                *product.operands,
                stablehlo.DotDimensionNumbers.get([], [], *dims),
            )
            keep_precision(product, single)
        op.results[0].replace_all_uses_with(single)
        op.erase()
        product.erase()


def _is_summed_product(op) -> bool:
    """Whether an op is a sum of a product, over its batching dims, that no other reads.

    A product has them first.
    """
    if op.name != "stablehlo.reduce" or len(op.operands) != 2 or not adds(op):
        return False
    product, start = (value.owner for value in op.operands)
    if isinstance(product, ir.Block) or product.name != "stablehlo.dot_general":
        return False
    if isinstance(start, ir.Block) or not is_constant_zero(start):
        return False
    (rows, _), _ = dot_dims(product, len(shape_of(product.operands[0])))
    is_all = sorted(reduced_dims(op)) == [*range(len(rows))]
    return is_all and len(rows) > 0 and len(list(op.operands[0].uses)) == 1
