"""Puts conversions where fewer bits are moved (weight-update sharding 4.2).

A loop over layers slices a layer of a float32 stack and converts it. Slicing the
converted stack is the same, and a stack that is gathered for the loop is then gathered
in its precision: what the paper calls precision propagation. So it is with transposes
and reshapes of what is converted.
"""

from __future__ import annotations

import dataclasses
import math

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    after,
    element_type,
    end_of,
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
    """What is done with a stack.

    Args:
      ops: that slice it.
      converts: that convert the slices, all to one element type.
    """

    ops: list[ir.Operation]
    converts: list[ir.Operation]


def propagate_precision(module: ir.Module) -> None:
    """Moves them in front of loops, inner loops first, and of what moves elements."""
    for op in list(walk(module.operation)):
        _narrow_first(op)
    for op in list(walk(module.operation)):
        _widen_last(op)
    loops = [op for op in walk(module.operation) if op.name == WHILE]
    # By stack and type: a backward loop reads what a forward one does.
    done: dict[_Key, ir.Value] = {}
    for op in reversed(loops):
        for number in range(len(op.operands)):
            _hoist(op, number, done)
    for op in list(walk(module.operation)):
        if is_annotation(op) and _is_argument(op.results[0]):
            _convert_whole(op.results[0])
    _merge(module)


def _narrow_first(op) -> None:
    """Makes `convert(move(x))` `move(convert(x))`, if that moves fewer bits."""
    while op.name == _CONVERT and 0 < _bits(op.results[0]) < _bits(op.operands[0]):
        maker = op.operands[0].owner
        if isinstance(maker, ir.Block) or maker.name not in _MOVES:
            return
        op = _swapped(maker, op)


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
    """Does two ops of one tensor in the other order; the one that is now first."""
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
    """Of a floating-point number; 0 of others."""
    element = element_type(value)
    return element.width if isinstance(element, ir.FloatType) else 0


def _merge(module: ir.Module) -> None:
    """Makes one of all conversions of an argument, the program's or a loop's."""
    found: dict[_Key, ir.Value] = {}
    for op in list(walk(module.operation)):
        if op.name != _CONVERT or not _is_argument(op.operands[0]):
            continue
        key = (op.operands[0], op.results[0].type)
        if key not in found:
            with after(key[0]), op.location:
                found[key] = stablehlo.convert(key[1], key[0])
        op.results[0].replace_all_uses_with(found[key])
        op.erase()


def _is_argument(value: ir.Value) -> bool:
    while not isinstance(value.owner, ir.Block):
        if not is_annotation(value.owner):
            return False
        value = value.owner.operands[0]
    return True


def _hoist(op, number: int, done: dict[_Key, ir.Value]) -> None:
    condition, body = (region.blocks[0] for region in op.regions)
    carried, stack = body.arguments[number], op.operands[number]
    end = end_of(body)
    kept = end.operands[number] == carried
    if not shape_of(carried) or not kept or list(condition.arguments[number].uses):
        return
    found = _reads(carried, end)
    if found is None or not found.converts:
        return
    element = element_type(found.converts[0].results[0])
    type_ = ir.RankedTensorType.get(list(shape_of(stack)), element)
    key = (stack, element)
    if key not in done:
        with after(stack), op.location:
            done[key] = stablehlo.convert(type_, stack)
    op.results[number].replace_all_uses_with(stack)
    op.operands[number] = done[key]
    for value in (carried, condition.arguments[number], op.results[number]):
        value.set_type(type_)
    _slice_converted(found, element)


def _convert_whole(stack: ir.Value) -> None:
    """Converts what is converted slice by slice, if all of it is."""
    found = _reads(stack, None)
    if found is None or not found.converts:
        return
    sizes = [math.prod(shape_of(each.operands[0])) for each in found.converts]
    if sum(sizes) < math.prod(shape_of(stack)):
        return
    element = element_type(found.converts[0].results[0])
    uses = list(stack.uses)
    with after(stack), found.converts[0].location:
        type_ = ir.RankedTensorType.get(list(shape_of(stack)), element)
        whole = stablehlo.convert(type_, stack)
    for use in uses:
        use.owner.operation.operands[use.operand_number] = whole
    _slice_converted(found, element)


def _slice_converted(found: _Reads, element: ir.Type) -> None:
    for value in (op.results[0] for op in found.ops):
        value.set_type(ir.RankedTensorType.get(list(shape_of(value)), element))
    for each in found.converts:
        each.results[0].replace_all_uses_with(each.operands[0])
        each.erase()


def _reads(carried: ir.Value, end) -> _Reads | None:
    """The slices of a value, if all of them are converted to fewer bits.

    It may be a loop's argument too, which `end` passes on.
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
    kinds = {str(element_type(each.results[0])) for each in converts}
    before = element_type(carried)
    narrow = isinstance(before, ir.F32Type) and kinds <= {"bf16", "f16"}
    return _Reads(ops, converts) if narrow and len(kinds) == 1 else None
