"""Ops that can be computed on shards: how dims of operands and results correspond.

The pass follows a dim from op to op, to split it alike everywhere. XLA's partitioner
does the rest: it masks padding before reductions and adds up their partial results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    is_annotation,
    reduced_dims,
    shape_of,
)

Place = tuple[ir.Value, int]
"""A dim of a value."""

_NAMES = """
    abs add and atan2 cbrt ceil clamp compare convert cosine divide exponential
    exponential_minus_one floor is_finite log log_plus_one logistic maximum minimum
    multiply negate not optimization_barrier or power remainder round_nearest_afz
    round_nearest_even rsqrt select shift_left shift_right_arithmetic
    shift_right_logical sign sine sqrt subtract tan tanh xor
"""
_ELEMENTWISE = {f"stablehlo.{name}" for name in _NAMES.split()}


@dataclasses.dataclass(frozen=True, eq=False)
class DimMap:
    """How dims of an op's operands and results correspond.

    Args:
      same: pairs of places that are split alike or not at all.
      whole: places that cannot be split.
      keeps_shape: whether the op's attributes name sizes or numbers of dims, which
        combining dims would change: then its dims are not combined.
    """

    same: Sequence[tuple[Place, Place]] = ()
    whole: Sequence[Place] = ()
    keeps_shape: bool = False


def dim_map(op) -> DimMap | None:
    """The dims of an op that can be computed on shards; None for other ops."""
    if op.name in _ELEMENTWISE:
        return _elementwise(op)
    if is_annotation(op):
        return DimMap(same=_all(op.operands[0], op.results[0]))
    rule = _RULES.get(op.name)
    return rule(op) if rule else None


def _all(a: ir.Value, b: ir.Value) -> list[tuple[Place, Place]]:
    return [((a, dim), (b, dim)) for dim in range(len(shape_of(a)))]


def _elementwise(op) -> DimMap:
    if op.name == "stablehlo.optimization_barrier":
        pairs = zip(op.operands, op.results, strict=True)
        return DimMap(same=[same for pair in pairs for same in _all(*pair)])
    result = op.results[0]
    ranked = [value for value in op.operands if shape_of(value)]
    return DimMap(same=[same for value in ranked for same in _all(value, result)])


def _reshape(op) -> DimMap | None:
    """A reshape that only adds or drops dims of size 1."""
    operand, result = op.operands[0], op.results[0]
    wide = [
        [(value, dim) for dim, size in enumerate(shape_of(value)) if size > 1]
        for value in (operand, result)
    ]
    sizes = [[shape_of(value)[dim] for value, dim in places] for places in wide]
    if sizes[0] != sizes[1]:
        return None
    return DimMap(same=list(zip(*wide, strict=True)))


def _transpose(op) -> DimMap:
    operand, result = op.operands[0], op.results[0]
    order = ir.DenseI64ArrayAttr(op.attributes["permutation"])
    same = [((operand, dim), (result, i)) for i, dim in enumerate(order)]
    moved = list(order) != sorted(order)
    return DimMap(same=same, keeps_shape=moved)


def _broadcast(op) -> DimMap:
    operand, result = op.operands[0], op.results[0]
    dims = ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])
    sizes, wide = shape_of(operand), shape_of(result)
    same = [
        ((operand, i), (result, dim))
        for i, dim in enumerate(dims)
        if sizes[i] == wide[dim] and sizes[i] > 1
    ]
    # Numbers of dims would have to follow; a scalar has none.
    return DimMap(same=same, keeps_shape=bool(list(dims)))


def _reduce(op) -> DimMap | None:
    if len(op.results) != 1:
        return None
    operand, result = op.operands[0], op.results[0]
    reduced = reduced_dims(op)
    kept = [dim for dim in range(len(shape_of(operand))) if dim not in reduced]
    same = [((operand, dim), (result, i)) for i, dim in enumerate(kept)]
    # If all dims are reduced, any may be combined; else numbers of dims would change.
    return DimMap(same=same, keeps_shape=bool(kept))


def _window(op) -> DimMap:
    """Slices, updates of slices, padding, concatenation: dims of equal size."""
    result = op.results[0]
    operands = [value for value in op.operands if shape_of(value)]
    same, unsplit = [], []
    for dim, size in enumerate(shape_of(result)):
        if all(shape_of(value)[dim] == size for value in operands):
            same += [((value, dim), (result, dim)) for value in operands]
        else:
            unsplit += [(value, dim) for value in (*operands, result)]
    return DimMap(same=same, whole=unsplit, keeps_shape=True)


def _update_slice(op) -> DimMap:
    """Stack and result correspond in all dims, the update in those of equal size."""
    stack, part, result = op.operands[0], op.operands[1], op.results[0]
    window = zip(shape_of(stack), shape_of(part), strict=True)
    sliced = [dim for dim, (size, new) in enumerate(window) if size != new]
    same = _all(stack, result)
    same += [((part, d), (result, d)) for (_, d), _ in same if d not in sliced]
    unsplit = [(value, dim) for value in (stack, part, result) for dim in sliced]
    return DimMap(same=same, whole=unsplit, keeps_shape=True)


def _constant(op) -> DimMap | None:
    value = ir.DenseElementsAttr(op.attributes["value"])
    return DimMap() if value.is_splat else None


def _iota(op) -> DimMap:
    dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
    return DimMap(whole=[(op.results[0], dim)], keeps_shape=True)


_RULES = {
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reduce": _reduce,
    "stablehlo.slice": _window,
    "stablehlo.dynamic_slice": _window,
    "stablehlo.pad": _window,
    "stablehlo.concatenate": _window,
    "stablehlo.dynamic_update_slice": _update_slice,
    "stablehlo.constant": _constant,
    "stablehlo.iota": _iota,
}
