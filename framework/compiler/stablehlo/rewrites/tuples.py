"""Gives custom calls several results instead of tuples, which Shardy does not know."""

from __future__ import annotations

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import walk

_CUSTOM_CALL = "stablehlo.custom_call"
_ELEMENT = "stablehlo.get_tuple_element"


def flatten_tuples(module: ir.Operation) -> None:
    """Gives custom calls a result for each element of the tuple that they return.

    TF2XLA makes such calls for QR and eigenvalue decompositions.
    """
    # Listed first: elements are erased below, and erased ops have no name to read.
    calls = [op for op in walk(module) if op.name == _CUSTOM_CALL]
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
        attributes.pop("result_layouts", None)  # Tuple layouts; the default is equal.
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
