"""Custom calls that give tuples, which Shardy does not know, give several results."""

from __future__ import annotations

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import walk

_CUSTOM_CALL = "stablehlo.custom_call"
_ELEMENT = "stablehlo.get_tuple_element"


def flatten_tuples(module: ir.Module) -> None:
    """Gives custom calls a result for each element of the tuple that they give.

    TF2XLA makes such of QR, LU and eigenvalue decompositions.
    """
    # Chosen first: elements are erased below, and what was erased has no name to read.
    calls = [op for op in walk(module.operation) if op.name == _CUSTOM_CALL]
    for op in calls:
        if len(op.results) != 1:
            continue
        uses = [use.owner.operation for use in op.results[0].uses]
        if not isinstance(op.results[0].type, ir.TupleType) or any(
            use.name != _ELEMENT for use in uses
        ):
            continue
        given = ir.TupleType(op.results[0].type)
        types = [given.get_type(i) for i in range(given.num_types)]
        attributes = {name: op.attributes[name] for name in op.attributes}
        attributes.pop("result_layouts", None)  # Of a tuple; the default is the same.
        attributes.pop("operand_layouts", None)
        flat = ir.Operation.create(
            _CUSTOM_CALL,
            results=types,
            operands=list(op.operands),
            attributes=attributes,
            loc=op.location,
            ip=ir.InsertionPoint(op),
        )
        for use in uses:
            number = ir.IntegerAttr(use.attributes["index"]).value
            use.results[0].replace_all_uses_with(flat.results[number])
            use.erase()
        op.erase()
