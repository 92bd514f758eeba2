"""How the dims of each StableHLO op correspond, and which dims it sums over."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.repair.convolutions.conv_rewrite import (
    convolution_of,
)
from meshwright.framework.compiler.sharding_types.combine import HALO, Labels, OpDims
from meshwright.framework.compiler.sharding_types.linear import choices
from meshwright.framework.compiler.sharding_types.op_windows import (
    WINDOW_RULES,
    whole_dims,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    dot_dims,
    element_type,
    integers,
    reduced_dims,
    shape_of,
    short_name,
)

_NAMES = """
    abs add and atan2 bitcast_convert cbrt ceil clamp compare complex convert cosine
    count_leading_zeros divide erf erf_inv exponential exponential_minus_one floor imag
    is_finite lgamma log log_plus_one logistic maximum minimum multiply negate not or
    popcnt power real reduce_precision remainder round_nearest_afz round_nearest_even
    rsqrt select set_dimension_size shift_left shift_right_arithmetic
    shift_right_logical sign sine sqrt subtract tan tanh xor
"""
ELEMENTWISE = frozenset(_NAMES.split())


def op_dims(op) -> OpDims:
    """The dims of any op; an unknown op needs unsharded operands."""
    name = short_name(op)
    rule = _elementwise if name in ELEMENTWISE else _RULES.get(name, whole_dims)
    return dataclasses.replace(rule(op), linear_in=choices(op))


def _numbered(value: ir.Value) -> Labels:
    return tuple(range(len(shape_of(value))))


def _elementwise(op) -> OpDims:
    """Elementwise ops; a scalar operand is combined with all elements."""
    return OpDims(
        operands=[_numbered(value) for value in op.operands],
        results=[_numbered(op.results[0])],
        moves=_only_moves(op),
    )


def _only_moves(op) -> bool:
    """Whether an op does no more than move elements.

    Rounding does not change which is largest; a dim size set by TF2XLA changes nothing.
    """
    if short_name(op) == "convert":
        values = (op.operands[0], op.results[0])
        return all(isinstance(element_type(v), ir.FloatType) for v in values)
    return short_name(op) in ("select", "set_dimension_size")


def _transpose(op) -> OpDims:
    order = tuple(integers(op, "permutation"))
    return _moved(op, _numbered(op.operands[0]), order)


def _broadcast(op) -> OpDims:
    """Broadcasts; dims of size 1 that get longer are unsharded."""
    dims = integers(op, "broadcast_dimensions")
    sizes, wide = shape_of(op.operands[0]), shape_of(op.results[0])
    pairs = zip(sizes, dims, strict=True)
    labels = tuple(dim if size == wide[dim] else None for size, dim in pairs)
    result = tuple(dim if dim in labels else None for dim in range(len(wide)))
    return _moved(op, labels, result)


def _moved(op, labels: Labels, result: Labels) -> OpDims:
    return OpDims(operands=[labels], results=[result], moves=True)


def _dot(op) -> OpDims:
    batch, summed = dot_dims(op, len(shape_of(op.operands[0])))
    (left_batch, right_batch), (left_summed, right_summed) = batch, summed
    left, right = (_numbered(value) for value in op.operands)
    shared = dict(
        zip((*right_batch, *right_summed), (*left_batch, *left_summed), strict=True)
    )
    right = tuple(shared.get(dim, len(left) + dim) for dim in right)
    result = [
        *left_batch,
        *(dim for dim in left if dim not in (*left_batch, *left_summed)),
        *(label for label in right if label >= len(left)),
    ]
    return OpDims(operands=[left, right], results=[tuple(result)])


def _reduce(op) -> OpDims:
    """Reductions; of several operands, as an argmax, it needs those dims unsharded."""
    count = len(op.results)
    reduced = reduced_dims(op)
    inner = [short_name(i.operation) for i in op.regions[0].blocks[0].operations]
    kind = inner[0] if len(inner) == 2 else ""
    adds = kind == "add" and bool(choices(op))
    labels = _numbered(op.operands[0])
    known = kind and (adds or kind != "add")  # A sum has to start at zero.
    taken = labels if known else tuple(None if d in reduced else d for d in labels)
    return OpDims(
        operands=[taken] * count + [()] * count,
        results=[tuple(d for d in labels if d not in reduced)] * count,
        kinds={} if adds else {dim: _KINDS.get(kind, kind) for dim in reduced},
    )


_KINDS = {"maximum": "max", "minimum": "min", "multiply": "product"}


def _convolution(op) -> OpDims:
    """A window dim moves, with a halo, or is summed over in full, or is a plain dim."""
    what = convolution_of(op)
    left, right = ([None] * len(shape) for shape in (what.lhs, what.rhs))
    result: list[int | None] = [None] * len(what.out)
    if what.batch_groups == 1:
        left[what.lhs_batch] = result[what.out_batch] = 0
    if what.groups == 1:
        left[what.lhs_feature] = right[what.rhs_in] = 1
        right[what.rhs_out] = result[what.out_feature] = 2
    kinds = {}
    windows = zip(
        what.lhs_window, what.rhs_window, what.out_window, what.moves, strict=True
    )
    for label, (image, kernel, out, moves) in enumerate(windows, 3):
        left[image] = label
        if moves:
            kinds[label] = HALO
        if moves or what.lhs[image] == what.rhs[kernel]:
            right[kernel] = label
        else:
            result[out] = label
    return OpDims(
        operands=[tuple(left), tuple(right)],
        results=[tuple(result)],
        kinds=kinds,
    )


def _cumulative(op, dims: Sequence[int]) -> OpDims:
    """An op on lines along `dims`, which it needs unsharded."""
    labels = [
        tuple(None if dim in dims else dim for dim in _numbered(value))
        for value in (*op.operands, *op.results)
    ]
    count = len(op.operands)
    return OpDims(operands=labels[:count], results=labels[count:])


def _along_dimension(op) -> OpDims:
    return _cumulative(op, [ir.IntegerAttr(op.attributes["dimension"]).value])


def _fft(op) -> OpDims:
    rank, count = len(shape_of(op.operands[0])), len(list(op.attributes["fft_length"]))
    return _cumulative(op, range(rank - count, rank))


def _top_k(op) -> OpDims:
    return _cumulative(op, [len(shape_of(op.operands[0])) - 1])


_RULES = {
    "broadcast_in_dim": _broadcast,
    "convolution": _convolution,
    "dot": _dot,
    "dot_general": _dot,
    "fft": _fft,
    "reduce": _reduce,
    "sort": _along_dimension,
    "top_k": _top_k,
    "transpose": _transpose,
    **WINDOW_RULES,
}
