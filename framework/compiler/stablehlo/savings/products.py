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
    integers,
    is_constant_zero,
    keep_precision,
    reduced_dims,
    shape_of,
    tensor_type,
    walk,
)


def sum_in_products(module: ir.Operation) -> None:
    """Has a product that is summed over batching dims contract these.

    Args:
      module: changed in place.
    """
    for op in list(walk(module)):
        found = _summed_product(op)
        if found is None:
            continue
        product, order = found
        operands = list(product.operands)
        batching, contracting = dot_dims(product, len(shape_of(operands[0])))
        # A product has its batching dims first.
        summed = [order[dim] for dim in reduced_dims(op)]
        left = [[d for n, d in enumerate(s) if n not in summed] for s in batching]
        dims = [
            [*(rows[n] for n in summed), *side]
            for rows, side in zip(batching, contracting, strict=True)
        ]
        kept = [dim for dim in range(len(order)) if dim not in summed]
        moved = [kept.index(dim) for dim in order if dim in kept]
        sizes = [shape_of(product.results[0])[dim] for dim in kept]
        with ir.InsertionPoint(op), op.location:
            single = stablehlo.dot_general(
                tensor_type(op.results[0].type, sizes),
                *operands,
                stablehlo.DotDimensionNumbers.get(*left, *dims),
            )
            keep_precision(product, single)
            if moved != sorted(moved):
                single = stablehlo.transpose(single, ir.DenseI64ArrayAttr.get(moved))
        op.results[0].replace_all_uses_with(single)
        transposed = op.operands[0] != product.results[0]
        unused = [op, *([op.operands[0].owner] if transposed else []), product]
        for each in unused:
            each.erase()


def _summed_product(op) -> tuple[ir.Operation, list[int]] | None:
    """The product that an op sums over batching dims, and the order it has its dims in.

    No other op reads it. None if an op is no such sum.
    """
    if op.name != "stablehlo.reduce" or len(op.operands) != 2 or not adds(op):
        return None
    value, start = op.operands[0], op.operands[1].owner
    if isinstance(start, ir.Block) or not is_constant_zero(start):
        return None
    order = list(range(len(shape_of(value))))
    if _is_only_read_once(value, "stablehlo.transpose"):
        order = integers(value.owner, "permutation")
        value = value.owner.operands[0]
    if not _is_only_read_once(value, "stablehlo.dot_general"):
        return None
    product = value.owner
    (rows, _), _ = dot_dims(product, len(shape_of(product.operands[0])))
    summed = reduced_dims(op)
    are_batching = len(summed) > 0 and all(order[dim] < len(rows) for dim in summed)
    return (product, list(order)) if are_batching else None


def _is_only_read_once(value: ir.Value, name: str) -> bool:
    """Whether a value is made by an op of this name, for a single reader."""
    made = not isinstance(value.owner, ir.Block) and value.owner.name == name
    return made and len(list(value.uses)) == 1
