"""Ops on pending sums: which may be computed part by part, and how.

A tensor that is unreduced along k mesh axes is carried with k leading dims, each split
by one of them, and is its sum over these: every device holds its own part, under both
partitioners and in loops too. What it compiles to costs the same as Shardy's own
`unreduced`, which was tried: that is a promise about the op before it that nothing
checks, wrong by a factor where this is a conversion or an addition, and it ends the
process where dims are uneven or in manual regions. GSPMD has no sound word for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.conv_rewrite import shape_of
from meshwright.framework.compiler.partial_sums import adds, is_zero
from meshwright.framework.compiler.stable_hlo import (
    dot_dims,
    element_type,
    integers,
    tensor_type,
)
from meshwright.framework.compiler.weight_update_sharding.redundancy import (
    reduced_dims,
)

Lead = tuple[int, ...]
"""Sizes of the leading dims."""

_FIRST, _BOTH, _EITHER = [(0,)], [(0, 1)], [(0,), (1,)]
_CHOICES = {
    "negate": _FIRST,
    "real": _FIRST,
    "transpose": _FIRST,
    "reshape": _FIRST,
    "broadcast_in_dim": _FIRST,
    "slice": _FIRST,
    "reverse": _FIRST,
    "dynamic_slice": _FIRST,
    "divide": _FIRST,
    "add": _BOTH,
    "subtract": _BOTH,
    "dynamic_update_slice": _BOTH,
    "multiply": _EITHER,
    "dot": _EITHER,
    "dot_general": _EITHER,
    "select": [(1, 2)],
}


def choices(op: ir.Operation) -> Sequence[tuple[int, ...]]:
    """Sets of an op's operands in which, taken together, it is linear.

    Those of a set are pending or zeros. The rest is whole, and may be anything.
    """
    name = _name(op)
    if name == "convert":
        kinds = (element_type(op.operands[0]), element_type(op.results[0]))
        return _FIRST if all(isinstance(one, ir.FloatType) for one in kinds) else []
    if name == "reduce":
        return _FIRST if len(op.results) == 1 and adds(op) and _from_zero(op) else []
    if name == "pad":
        return _FIRST if _from_zero(op) else []
    if name == "concatenate":
        return [tuple(range(len(op.operands)))]
    if name == "divide" and isinstance(element_type(op.results[0]), ir.IntegerType):
        return []  # It rounds.
    return _CHOICES.get(name, [])


def _name(op) -> str:
    return op.name.removeprefix("stablehlo.")


def _from_zero(op) -> bool:
    return is_zero(op.operands[1])


def part_by_part(
    op: ir.Operation, lead: Lead, parts: Mapping[int, ir.Value]
) -> ir.Value:
    """The result of an op with leading dims, at the current insertion point.

    Args:
      op: linear in what is pending.
      lead: sizes of the leading dims.
      parts: its pending operands by number, with leading dims.
    """
    return _BUILDERS.get(_name(op), _elementwise)(op, lead, parts)


def widened(value: ir.Value, lead: Lead) -> ir.Value:
    """A tensor repeated along leading dims, at the current insertion point."""
    shape = shape_of(value)
    dims = [len(lead) + dim for dim in range(len(shape))]
    type_ = tensor_type(value.type, (*lead, *shape))
    return stablehlo.broadcast_in_dim(type_, value, ir.DenseI64ArrayAttr.get(dims))


def _clone(op, lead: Lead, operands: Mapping[int, ir.Value]) -> ir.Operation:
    """A copy of an op at the insertion point, with leading dims in its result."""
    copy = op.clone(ir.InsertionPoint.current)
    for number, value in operands.items():
        copy.operands[number] = value
    result = op.results[0]
    copy.results[0].set_type(tensor_type(result.type, (*lead, *shape_of(result))))
    return copy


def _set(op, **numbers: Sequence[int]) -> ir.Value:
    for name, values in numbers.items():
        op.attributes[name] = ir.DenseI64ArrayAttr.get(list(values))
    return op.results[0]


def _elementwise(op, lead: Lead, parts) -> ir.Value:
    operands = dict(parts)
    for number, value in enumerate(op.operands):
        one_for_all = _name(op) == "select" and not shape_of(value)
        if number not in parts and not one_for_all:
            operands[number] = widened(value, lead)
    return _clone(op, lead, operands).results[0]


def _transpose(op, lead: Lead, parts) -> ir.Value:
    order = [*range(len(lead)), *(len(lead) + d for d in integers(op, "permutation"))]
    return _set(_clone(op, lead, parts), permutation=order)


def _reshape(op, lead: Lead, parts) -> ir.Value:
    return _clone(op, lead, parts).results[0]


def _broadcast(op, lead: Lead, parts) -> ir.Value:
    dims = [len(lead) + d for d in integers(op, "broadcast_dimensions")]
    copy = _clone(op, lead, parts)
    return _set(copy, broadcast_dimensions=[*range(len(lead)), *dims])


def _slice(op, lead: Lead, parts) -> ir.Value:
    none, ones = [0] * len(lead), [1] * len(lead)
    return _set(
        _clone(op, lead, parts),
        start_indices=[*none, *integers(op, "start_indices")],
        limit_indices=[*lead, *integers(op, "limit_indices")],
        strides=[*ones, *integers(op, "strides")],
    )


def _pad(op, lead: Lead, parts) -> ir.Value:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    more = {name: [*[0] * len(lead), *integers(op, name)] for name in names}
    return _set(_clone(op, lead, parts), **more)


def _reverse(op, lead: Lead, parts) -> ir.Value:
    dims = [len(lead) + dim for dim in integers(op, "dimensions")]
    return _set(_clone(op, lead, parts), dimensions=dims)


def _reduce(op, lead: Lead, parts) -> ir.Value:
    dims = [len(lead) + dim for dim in reduced_dims(op)]
    return _set(_clone(op, lead, parts), dimensions=dims)


def _concatenate(op, lead: Lead, parts) -> ir.Value:
    copy = _clone(op, lead, parts)
    dim = ir.IntegerAttr(op.attributes["dimension"]).value + len(lead)
    integer = ir.IntegerType.get_signless(64)
    copy.attributes["dimension"] = ir.IntegerAttr.get(integer, dim)
    return copy.results[0]


def _starts(op, first: int, lead: Lead) -> list[ir.Value]:
    own = list(op.operands)[first:]
    zero = ir.IntegerAttr.get(element_type(own[0]), 0)
    zero = stablehlo.constant(ir.DenseElementsAttr.get_splat(own[0].type, zero))
    return [zero] * len(lead) + own


def _dynamic_slice(op, lead: Lead, parts) -> ir.Value:
    sizes = [*lead, *integers(op, "slice_sizes")]
    return stablehlo.DynamicSliceOp(parts[0], _starts(op, 1, lead), sizes).result


def _update_slice(op, lead: Lead, parts) -> ir.Value:
    starts = _starts(op, 2, lead)
    return stablehlo.DynamicUpdateSliceOp(parts[0], parts[1], starts).result


def _dot(op, lead: Lead, parts) -> ir.Value:
    """The leading dims are free dims of the pending operand, and come first again."""
    (side,) = parts
    more = len(lead)
    # What a loop carries has its leading dims already.
    ranks = [len(shape_of(operand)) for operand in op.operands]
    ranks[side] = len(shape_of(parts[side])) - more
    batch, contracting = dot_dims(op, ranks[0])
    for own in (batch, contracting):
        own[side] = [dim + more for dim in own[side]]
    operands = [parts.get(i, operand) for i, operand in enumerate(op.operands)]
    free = ranks[0] - len(batch[0]) - len(contracting[0])
    place = len(batch[0]) + (free if side == 1 else 0)
    shape = list(shape_of(op.results[0]))
    shape[place:place] = lead
    product = stablehlo.dot_general(
        tensor_type(op.results[0].type, shape),
        *operands,
        stablehlo.DotDimensionNumbers.get(*batch, *contracting),
    )
    if "precision_config" in op.attributes:
        precision = op.attributes["precision_config"]
        product.owner.operation.attributes["precision_config"] = precision
    if not place:
        return product
    rest = [dim for dim in range(len(shape)) if not place <= dim < place + more]
    order = [*range(place, place + more), *rest]
    return stablehlo.transpose(product, ir.DenseI64ArrayAttr.get(order))


_BUILDERS = {
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "reverse": _reverse,
    "reduce": _reduce,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "dot": _dot,
    "dot_general": _dot,
}
