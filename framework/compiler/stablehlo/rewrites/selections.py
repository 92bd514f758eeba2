"""Values that are compared with their own maximum or minimum, computed only once.

The gradient of `tf.reduce_max` goes where the operand equals the maximum; masks of the
largest k values compare likewise. XLA's fusion computes an operand again in each kernel
that reads it, and rounds it differently there if it contracts another product and sum
into one instruction: then no element equals the maximum, and the gradient is 0 or
infinite. On one device too, and under TF's own `jit_compile` (jaxlib 0.10.2; see
https://github.com/openxla/xla/pull/44738 and issues/41579 there). An optimization
barrier does not help: XLA drops it before it fuses. The result of a branch is computed
once, and a barrier around the predicate keeps the branch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    INTO_MANUAL,
    OUT_OF_MANUAL,
    WHILE,
    after,
    element_type,
    end_of,
    is_annotation,
    placeholder_of,
    walk,
    zeros,
)

_MAXIMUM, _MINIMUM = "stablehlo.maximum", "stablehlo.minimum"
_SELECTIONS = {
    _MAXIMUM: slice(None),
    _MINIMUM: slice(None),
    "stablehlo.clamp": slice(None),
    "stablehlo.select": slice(1, None),
}
_MOVES = {
    "stablehlo.broadcast_in_dim": slice(1),
    "stablehlo.concatenate": slice(None),
    "stablehlo.convert": slice(1),
    "stablehlo.dynamic_slice": slice(1),
    "stablehlo.dynamic_update_slice": slice(2),
    "stablehlo.gather": slice(1),
    "stablehlo.negate": slice(1),
    "stablehlo.optimization_barrier": slice(None),
    "stablehlo.pad": slice(2),
    "stablehlo.reshape": slice(1),
    "stablehlo.reverse": slice(1),
    "stablehlo.set_dimension_size": slice(1),
    "stablehlo.slice": slice(1),
    "stablehlo.transpose": slice(1),
}
_MOVING_PLACEHOLDERS = (
    INTO_MANUAL,
    OUT_OF_MANUAL,
    "all_gather",
    "all_to_all",
    "collective_permute",
)
_SCATTER = "stablehlo.scatter"
_REDUCTIONS = ("stablehlo.reduce", "stablehlo.reduce_window", _SCATTER)
_EXTREMES = ("maximum", "minimum")
_CALL = "stablehlo.custom_call"
_RETURN = "stablehlo.return"
# Their results are in memory for all that read them, or are known to the compiler.
_COMPUTED_ONCE = {
    "stablehlo.constant",
    "stablehlo.convolution",
    _CALL,
    "stablehlo.dot",
    "stablehlo.dot_general",
}


def compute_once(module: ir.Operation) -> None:
    """Keeps XLA from computing again what a program compares with its own selections.

    Args:
      module: changed in place.
    """
    kept: dict[ir.Value, None] = {}
    merged: dict[ir.Value, ir.Value] = {}
    for op in _compares(module):
        for value, same in _selected_from(*op):
            while value in merged:
                value = merged[value]
            if value != same and same not in merged:
                merged[same] = value
                same.replace_all_uses_with(value)
            kept[value] = None
    for value in kept:
        if value not in merged:
            _keep(value)


def _compares(module: ir.Operation) -> list[tuple[ir.Value, ir.Value]]:
    """The two sides of each comparison of floats."""
    return [
        tuple(op.operands)
        for op in walk(module)
        if op.name == "stablehlo.compare" and _is_float(op.operands[0])
    ]


def _is_float(value: ir.Value) -> bool:
    return isinstance(element_type(value), ir.FloatType)


def _selected_from(
    left: ir.Value, right: ir.Value
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The computed values that both sides of a comparison hold, one side selected.

    They come in pairs of the same value; or of a value, and another that XLA merges
    with it later, as it is computed alike from the same.
    """
    if left == right:
        return
    left_origins, right_origins = _origins(left), _origins(right)
    for value, selected in left_origins.items():
        for other, other_selected in right_origins.items():
            if (selected or other_selected) and _are_alike(value, other):
                yield (other, value) if _comes_first(other, value) else (value, other)


def _are_alike(value: ir.Value, other: ir.Value) -> bool:
    """Whether two values of a block are computed by the same ops from the same."""
    if value == other:
        return True
    if value.owner.operation.block != other.owner.operation.block:
        return False
    seen, waiting = set(), [(value, other)]
    while waiting:
        pair = waiting.pop()
        if pair[0] == pair[1] or pair in seen:
            continue
        seen.add(pair)
        makers = [v.owner for v in pair]
        if any(isinstance(m, ir.Block) or m.regions or m.name == _CALL for m in makers):
            return False
        first, second = makers
        if (
            first.name != second.name
            or pair[0].type != pair[1].type
            or len(first.operands) != len(second.operands)
            or _attributes(first) != _attributes(second)
        ):
            return False
        waiting += zip(first.operands, second.operands, strict=True)
    return True


def _attributes(op) -> dict[str, ir.Attribute]:
    return dict(op.attributes.items())


def _comes_first(value: ir.Value, other: ir.Value) -> bool:
    return value != other and value.owner.operation.is_before_in_block(
        other.owner.operation
    )


def _origins(value: ir.Value) -> dict[ir.Value, bool]:
    """The computed values that `value` has its elements of.

    Returns:
      By value whether a maximum, a minimum or another selection leads from it.
    """
    origins: dict[ir.Value, bool] = {}
    seen, waiting = set(), [(value, False)]
    while waiting:
        reached = waiting.pop()
        if reached in seen:
            continue
        seen.add(reached)
        value, selected = reached
        if not _is_float(value):
            continue
        maker = value.owner
        if isinstance(maker, ir.Block):
            waiting += [(v, selected) for v in _passed_to(maker, value)]
            continue
        operands, selects = _elements_of(value, maker)
        if operands is None:
            if maker.name not in _COMPUTED_ONCE:
                origins[value] = origins.get(value, False) or selected
        else:
            waiting += [(operand, selected or selects) for operand in operands]
    return origins


def _elements_of(value: ir.Value, maker) -> tuple[list[ir.Value] | None, bool]:
    """The operands whose elements a value has, and whether it selects among them.

    The operands are None if its elements are computed.
    """
    operands = list(maker.operands)
    placeholder = placeholder_of(maker)
    if maker.name in _MOVES:
        return operands[_MOVES[maker.name]], False
    if maker.name in _SELECTIONS:
        return operands[_SELECTIONS[maker.name]], True
    if maker.name in (WHILE, *BRANCHES):
        return _returned_as(maker, ir.OpResult(value).result_number), False
    if maker.name == "stablehlo.sort":
        return [operands[ir.OpResult(value).result_number]], True
    if maker.name in _REDUCTIONS and _chooses(maker):
        count = len(maker.results)  # Then come starting values, or indices and updates.
        rest = count + 1 if maker.name == _SCATTER else len(operands)
        return [*operands[:count], *operands[rest:]], True
    if placeholder is not None and placeholder.kind in _MOVING_PLACEHOLDERS:
        return operands, False
    if placeholder is not None and placeholder.config.get("reduction") in _EXTREMES:
        return operands, True
    if is_annotation(maker):
        return operands, False
    return None, False


def _passed_to(block: ir.Block, argument: ir.Value) -> list[ir.Value]:
    """What a loop passes to an argument of its body or its condition."""
    holder, number = block.owner, ir.BlockArgument(argument).arg_number
    if holder.name != WHILE:
        return []
    return [holder.operands[number], *_returned_as(holder, number)]


def _returned_as(op, number: int) -> list[ir.Value]:
    """What the body of a loop, or each branch, returns as the op's result `number`."""
    regions = list(op.regions)[1:] if op.name == WHILE else op.regions
    returned = [end_of(region.blocks[0]).operands[number] for region in regions]
    return [*returned, op.operands[number]] if op.name == WHILE else returned


def _chooses(op) -> bool:
    """Whether a reduction or a scatter chooses among elements, and computes nothing.

    With several results it is the search for an index, as of `tf.argmax`.
    """
    names = [inner.operation.name for inner in op.regions[0].blocks[0].operations]
    return len(op.results) > 1 or set(names) <= {_MAXIMUM, _MINIMUM, _RETURN}


def _keep(value: ir.Value) -> None:
    """Has a value computed once, for all that read it."""
    uses = [(use.owner, use.operand_number) for use in value.uses]
    with after(value), value.owner.location:
        always = stablehlo.constant(ir.DenseElementsAttr.get(np.array(True)))
        (predicate,) = stablehlo.OptimizationBarrierOp([always]).results
        branch = stablehlo.IfOp([value.type], predicate)
        for region, kept in zip(branch.regions, (True, False), strict=True):
            with ir.InsertionPoint(region.blocks.append()):
                stablehlo.return_([value if kept else zeros(value.type)])
    for user, number in uses:
        user.operands[number] = branch.results[0]
