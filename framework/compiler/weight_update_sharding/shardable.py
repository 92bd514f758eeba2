"""Ops that can be computed on shards: how dims of operands and results correspond.

The pass follows a dim from op to op, to split it alike everywhere. XLA's partitioner
does the rest: it masks padding before reductions and adds up their partial results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.sharding_types.op_dims import (
    is_elementwise,
    op_dims,
)
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    integers,
    is_annotation,
    shape_of,
    short_name,
)

Place = tuple[ir.Value, int]
"""A dim of a value."""

_WINDOWS = ("slice", "dynamic_slice", "pad", "concatenate", "dynamic_update_slice")
_OTHERS = ("broadcast_in_dim", "constant", "iota", "reduce", "reshape", "transpose")


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


def dim_map(op, rules: OpRules) -> DimMap | None:
    """The dims of an op that can be computed on shards; None for other ops."""
    name = short_name(op)
    if is_annotation(op):
        return DimMap(same=_alike(op.operands[0], op.results[0]))
    if name == "optimization_barrier":
        pairs = zip(op.operands, op.results, strict=True)
        return DimMap(same=[same for pair in pairs for same in _alike(*pair)])
    if not (name in (*_WINDOWS, *_OTHERS) or is_elementwise(op, rules)):
        return None
    if name == "constant":
        is_splat = ir.DenseElementsAttr(op.attributes["value"]).is_splat
        return DimMap() if is_splat else None
    if name == "iota":
        dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
        return DimMap(whole=[(op.results[0], dim)], keeps_shape=True)
    if len(op.results) != 1:
        return None
    dims = _labelled(op, name, rules)
    # Of reshapes those are known that only add or drop dims of size 1.
    return None if name == "reshape" and dims.whole else dims


def _labelled(op, name: str, rules: OpRules) -> DimMap:
    """By the labels of dims in the table of types."""
    rule = op_dims(op, rules)
    first: dict[int, Place] = {}
    same, whole = [], []
    tensors = [*zip(op.operands, rule.operands, strict=True)]
    tensors += zip(op.results, rule.results, strict=True)
    for value, labels in tensors:
        # What a broadcast repeats may be split.
        repeats = name == "broadcast_in_dim" and value == op.results[0]
        for dim, label in enumerate(labels):
            place = (value, dim)
            if label is not None:
                same.append((first.setdefault(label, place), place))
            elif not repeats and shape_of(value)[dim] > 1:
                whole.append(place)
    return DimMap(same=same, whole=whole, keeps_shape=_keeps_shape(op, name))


def _keeps_shape(op, name: str) -> bool:
    if name == "transpose":
        order = integers(op, "permutation")
        return list(order) != sorted(order)
    if name == "broadcast_in_dim":  # Numbers of dims would follow; a scalar has none.
        return bool(shape_of(op.operands[0]))
    if name == "reduce":  # If all dims are reduced, any may be combined.
        return bool(shape_of(op.results[0]))
    return name in _WINDOWS


def _alike(a: ir.Value, b: ir.Value) -> list[tuple[Place, Place]]:
    return [((a, dim), (b, dim)) for dim in range(len(shape_of(a)))]
