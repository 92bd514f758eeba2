"""How the dims of each StableHLO op correspond, and which dims it sums over.

Shardy's rules are the base. The corrections here are where Shardy allows more than each
device computing on its own shards: it masks the rows of a table, and exchanges halos.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from jax.extend.mlir import ir

from meshwright.framework.compiler.repair.convolutions.conv_rewrite import (
    convolution_of,
)
from meshwright.framework.compiler.sharding_types.combine import HALO, Labels, OpDims
from meshwright.framework.compiler.sharding_types.linear import choices
from meshwright.framework.compiler.stablehlo.shardy.op_rules import (
    FactorKind,
    Factors,
    OpFactors,
    OpRules,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    adds,
    element_type,
    shape_of,
    short_name,
)

# Elementwise ops of other dialects, and one whose size TF2XLA sets: Shardy has no rule.
_WITHOUT_RULE = ("erf", "erf_inv", "lgamma", "set_dimension_size")
_MOVES = (
    "broadcast_in_dim",
    "concatenate",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "reverse",
    "select",
    "set_dimension_size",
    "slice",
    "transpose",
)
_REDUCTIONS = {"maximum": "max", "minimum": "min", "multiply": "product"}


def op_dims(op: ir.Operation, rules: OpRules) -> OpDims:
    """The dims of any op; an op without a rule needs unsharded operands."""
    name, factors = short_name(op), rules.of(op)
    if name == "convolution":
        dims = _convolution(op)
    elif name in _WITHOUT_RULE:
        dims = _elementwise(op)
    else:
        dims = _CORRECTED.get(name, _by_rule)(op, factors)
    return dataclasses.replace(dims, linear_in=choices(op), moves=_only_moves(op, name))


def is_elementwise(op: ir.Operation, rules: OpRules) -> bool:
    """Whether an op on tensors computes each element of its elements alone."""
    factors = rules.of(op)
    dims = {of for of in (*factors.operands, *factors.results) if of}
    parallel = all(kind is FactorKind.PARALLEL for kind in factors.kinds)
    alike = len(dims) == 1 and None not in dims.pop()
    return short_name(op) in _WITHOUT_RULE or (parallel and alike)


def _only_moves(op, name: str) -> bool:
    """Whether an op does no more than move elements.

    Rounding does not change which is largest; a dim size set by TF2XLA changes nothing.
    """
    if name == "convert":
        values = (op.operands[0], op.results[0])
        return all(isinstance(element_type(v), ir.FloatType) for v in values)
    return name in _MOVES


def _elementwise(op) -> OpDims:
    tensors = [*op.operands, *op.results]
    labels = [tuple(range(len(shape_of(value)))) for value in tensors]
    return OpDims(operands=labels[: len(op.operands)], results=labels[-1:])


def _by_rule(
    op, factors: OpFactors, but: Iterable[FactorKind] = (FactorKind.PERMUTATION,)
) -> OpDims:
    """By Shardy's rule: factors of the kinds `but` need their dims unsharded."""
    but = {*but, FactorKind.NEED_REPLICATION}

    def labels(of: Factors) -> Labels:
        return tuple(None if i is None or factors.kinds[i] in but else i for i in of)

    operands, results = (
        [labels(of) for of in side] for side in (factors.operands, factors.results)
    )
    given, made = ({i for of in side for i in of} for side in (operands, results))
    # A reshape's dims may be parts of others: nothing is summed over them.
    reduced = {i for i in given - {None} if factors.kinds[i] is FactorKind.REDUCED}
    return OpDims(
        operands=[_among(of, made | reduced) for of in operands],
        results=[_among(of, given) for of in results],
    )


def _among(labels: Labels, kept: Collection[int | None]) -> Labels:
    return tuple(label if label in kept else None for label in labels)


def _gather(op, factors: OpFactors) -> OpDims:
    """Rows of a table: split as the indices are, and inside a row as the table is."""
    dims = _by_rule(op, factors)
    table, indices = dims.operands
    (result,) = dims.results
    return dataclasses.replace(dims, operands=[_among(table, result), indices])


def _written(op, factors: OpFactors) -> OpDims:
    """A tensor of which a part is written: dims that it has in part are unsharded.

    Several updates of a row are added up, or the last one wins: only one device would
    know that.
    """
    if len(op.results) > 1:
        return _by_rule(op, factors, but=FactorKind)
    is_scatter = short_name(op) == "scatter"
    masked = [FactorKind.REDUCED] if is_scatter and not adds(op) else []
    dims = _by_rule(op, factors, but=[FactorKind.PERMUTATION, *masked])
    stack, *others = dims.operands
    update = others.pop(is_scatter)
    places = {*stack, *(label for of in others for label in of)}
    stack, update = _among(stack, update), _among(update, places)
    others.insert(is_scatter, update)
    return OpDims(operands=[stack, *others], results=[stack])


def _reduce(op, factors: OpFactors) -> OpDims:
    """Reductions; of several operands, as an argmax, it needs those dims unsharded."""
    dims = _by_rule(op, factors)
    if choices(op):  # A sum that starts at zero.
        return dims
    inner = [short_name(i.operation) for i in op.regions[0].blocks[0].operations]
    if len(inner) == 2 and inner[0] != "add":
        kind = _REDUCTIONS.get(inner[0], inner[0])
        return dataclasses.replace(dims, kinds=dict.fromkeys(dims.all_combined(), kind))
    kept = {label for of in dims.results for label in of}
    return dataclasses.replace(
        dims, operands=[_among(of, kept) for of in dims.operands]
    )


def _windows(op, factors: OpFactors) -> OpDims:
    """Poolings and their gradients, with a halo in dims in which the window moves."""
    dims = _by_rule(op, factors, but=())
    halos = {i for i, k in enumerate(factors.kinds) if k is FactorKind.PERMUTATION}
    kept = {label for of in dims.results for label in of} - halos
    return dataclasses.replace(
        dims,
        results=[_among(of, kept) for of in dims.results],
        kinds=dict.fromkeys(halos, HALO),
    )


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


_CORRECTED = {
    "dynamic_update_slice": _written,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_window": _windows,
    "scatter": _written,
    "select_and_scatter": _windows,
}
