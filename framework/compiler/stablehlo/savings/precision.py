"""Puts conversions where fewer bits are moved (weight-update sharding 4.2).

A loop over layers slices a layer of a float32 stack and converts it. Slicing the
converted stack is equivalent, and a stack that is gathered for the loop is then
gathered in the lower precision: the paper calls this precision propagation. Conversions
move across transposes and reshapes for the same reason.
"""

from __future__ import annotations

import dataclasses
import math

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.dataflow.carried import (
    Carried,
    carried_of_op,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    after,
    element_type,
    is_annotation,
    shape_of,
    tensor_type,
    walk,
)

_CONVERT = "stablehlo.convert"
_MOVES = ("stablehlo.transpose", "stablehlo.reshape")
_SLICES = ("stablehlo.dynamic_slice", "stablehlo.slice", "stablehlo.reshape")
_Key = tuple[ir.Value, ir.Type]


@dataclasses.dataclass(frozen=True, eq=False)
class _Reads:
    """The uses of a stack.

    Args:
      ops: the ops that slice it.
      converts: the ops that convert the slices, all to the same element type.
    """

    ops: list[ir.Operation]
    converts: list[ir.Operation]


def propagate_precision(module: ir.Operation) -> None:
    """Moves conversions out of loops, inner loops first, and past moves of elements."""
    for op in list(walk(module)):
        _narrow_first(op)
    for op in list(walk(module)):
        _widen_last(op)
    loops = [op for op in walk(module) if op.name == WHILE]
    # By stack and type: a backward loop reads what a forward loop does.
    done: dict[_Key, ir.Value] = {}
    for op in reversed(loops):
        for tie in carried_of_op(op):
            _hoist(tie, done)
    for op in list(walk(module)):
        if is_annotation(op) and _is_argument(op.results[0]):
            _convert_whole(op.results[0])
    _merge(module)


def _narrow_first(op) -> None:
    """Makes `convert(move(x))` `move(convert(x))`, if that moves fewer bits."""
    while op.name == _CONVERT and 0 < _bits(op.results[0]) < _bits(op.operands[0]):
        maker = op.operands[0].owner
        if isinstance(maker, ir.Block) or maker.name not in _MOVES:
            return
        # Other readers would need the move too; equal ones are merged afterwards.
        types = {_converted_to(use.owner) for use in maker.results[0].uses}
        if types != {op.results[0].type}:
            return
        op = _swapped(maker, op)


def _converted_to(op) -> ir.Type | None:
    return op.results[0].type if op.name == _CONVERT else None


def _widen_last(op) -> None:
    """Makes `move(convert(x))` `convert(move(x))`, if that moves fewer bits."""
    if op.name not in _MOVES or isinstance(op.operands[0].owner, ir.Block):
        return
    maker = op.operands[0].owner
    if maker.name != _CONVERT:
        return
    if 0 < _bits(maker.operands[0]) < _bits(maker.results[0]):
        _swapped(maker, op)


def _swapped(first, second) -> ir.Operation:
    """Exchanges two consecutive ops of a tensor; returns the op that is now first."""
    value, result = first.operands[0], second.results[0]
    shape, like = shape_of(value), result
    if second.name in _MOVES:
        shape, like = shape_of(result), value
    inner = second.clone(ir.InsertionPoint(second))
    inner.operands[0] = value
    inner.results[0].set_type(tensor_type(like.type, shape))
    outer = first.clone(ir.InsertionPoint(second))
    outer.operands[0] = inner.results[0]
    outer.results[0].set_type(result.type)
    result.replace_all_uses_with(outer.results[0])
    second.erase()
    if not list(first.results[0].uses):
        first.erase()
    return inner


def _bits(value: ir.Value) -> int:
    """The bits of the floating-point numbers of a tensor; 0 for other values."""
    type_ = value.type
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return 0
    element = type_.element_type
    return element.width if isinstance(element, ir.FloatType) else 0


def _merge(module: ir.Operation) -> None:
    """Merges the conversions of an argument of the program or of a loop."""
    converted: dict[_Key, ir.Value] = {}
    for op in list(walk(module)):
        if op.name != _CONVERT or not _is_argument(op.operands[0]):
            continue
        key = (op.operands[0], op.results[0].type)
        if key not in converted:
            with after(key[0]), op.location:
                converted[key] = stablehlo.convert(key[1], key[0])
        op.results[0].replace_all_uses_with(converted[key])
        op.erase()


def _is_argument(value: ir.Value) -> bool:
    while not isinstance(value.owner, ir.Block):
        if not is_annotation(value.owner):
            return False
        value = value.owner.operands[0]
    return True


def _hoist(tie: Carried, done: dict[_Key, ir.Value]) -> None:
    (op, number), (end, _) = tie.uses
    carried, stack = tie.values[1], op.operands[number]
    if not _bits(carried) or not shape_of(carried) or tie.changes() or tie.decides():
        return
    reads = _reads(carried, end)
    if reads is None or not reads.converts:
        return
    element = element_type(reads.converts[0].results[0])
    type_ = ir.RankedTensorType.get(list(shape_of(stack)), element)
    key = (stack, element)
    if key not in done:
        with after(stack), op.location:
            done[key] = stablehlo.convert(type_, stack)
    op.results[number].replace_all_uses_with(stack)
    op.operands[number] = done[key]
    for value in tie.values:
        value.set_type(type_)
    _slice_converted(reads, element)


def _convert_whole(stack: ir.Value) -> None:
    """Converts at once a stack that is converted slice by slice, if all of it is."""
    reads = _reads(stack, None)
    if reads is None or not reads.converts:
        return
    sizes = [math.prod(shape_of(convert.operands[0])) for convert in reads.converts]
    if sum(sizes) < math.prod(shape_of(stack)):
        return
    element = element_type(reads.converts[0].results[0])
    uses = list(stack.uses)
    with after(stack), reads.converts[0].location:
        type_ = ir.RankedTensorType.get(list(shape_of(stack)), element)
        converted = stablehlo.convert(type_, stack)
    for use in uses:
        use.owner.operation.operands[use.operand_number] = converted
    _slice_converted(reads, element)


def _slice_converted(reads: _Reads, element: ir.Type) -> None:
    for value in (op.results[0] for op in reads.ops):
        value.set_type(ir.RankedTensorType.get(list(shape_of(value)), element))
    for convert in reads.converts:
        convert.results[0].replace_all_uses_with(convert.operands[0])
        convert.erase()


def _reads(carried: ir.Value, end) -> _Reads | None:
    """The slices of a value, if all of them are converted to fewer bits.

    The value may also be a loop's argument, which `end` passes on.
    """
    ops, converts, pending = [], [], [carried]
    while pending:
        value = pending.pop()
        for use in value.uses:
            user = use.owner.operation
            if user.name == _CONVERT:
                converts.append(user)
            elif is_annotation(user) or (
                user.name in _SLICES and use.operand_number == 0
            ):
                ops.append(user)
                pending.append(user.results[0])
            elif end is None or user != end or value != carried:
                return None
    kinds = {str(element_type(convert.results[0])) for convert in converts}
    narrow = _bits(carried) == 32 and kinds <= {"bf16", "f16"}
    return _Reads(ops, converts) if narrow and len(kinds) == 1 else None
