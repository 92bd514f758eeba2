"""Converts stacks of weights before the loops that read them layer by layer (4.2).

A loop over layers slices a layer of a float32 stack and converts it. Slicing the
converted stack is the same, and a stack that is gathered for the loop is then gathered
in its precision: what the paper calls precision propagation.
"""

from __future__ import annotations

import dataclasses

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.conv_rewrite import shape_of
from meshwright.framework.compiler.stable_hlo import after, call_target, walk

_SLICES = ("stablehlo.dynamic_slice", "stablehlo.slice", "stablehlo.reshape")


@dataclasses.dataclass(frozen=True, eq=False)
class _Reads:
    """What a loop does with what it carries along.

    Args:
      ops: that slice it.
      converts: that convert the slices, all to one element type.
    """

    ops: list[ir.Operation]
    converts: list[ir.Operation]


def hoist_conversions(module: ir.Module) -> None:
    """Moves them in front of loops, inner loops first."""
    loops = [op for op in walk(module.operation) if op.name == "stablehlo.while"]
    done: dict[
        ir.Value, ir.Value
    ] = {}  # A backward loop reads what a forward one does.
    for op in reversed(loops):
        for number in range(len(op.operands)):
            _hoist(op, number, done)
    _merge(module)


def _merge(module: ir.Module) -> None:
    """Makes one of all conversions of an argument, the program's or a loop's."""
    found: dict[tuple[ir.Value, ir.Type], ir.Value] = {}
    for op in list(walk(module.operation)):
        if op.name != "stablehlo.convert" or not _is_argument(op.operands[0]):
            continue
        key = (op.operands[0], op.results[0].type)
        if key not in found:
            with after(key[0]), op.location:
                found[key] = stablehlo.convert(key[1], key[0])
        op.results[0].replace_all_uses_with(found[key])
        op.erase()


def _is_argument(value: ir.Value) -> bool:
    while not isinstance(value.owner, ir.Block):
        if call_target(value.owner) != "Sharding":
            return False
        value = value.owner.operands[0]
    return True


def _hoist(op, number: int, done: dict[tuple[ir.Value, str], ir.Value]) -> None:
    condition, body = (region.blocks[0] for region in op.regions)
    carried, stack = body.arguments[number], op.operands[number]
    end = body.operations[len(body.operations) - 1].operation
    kept = end.operands[number] == carried
    if not shape_of(carried) or not kept or list(condition.arguments[number].uses):
        return
    found = _reads(carried, end)
    if found is None or not found.converts:
        return
    element = _element(found.converts[0].results[0])
    type_ = ir.RankedTensorType.get(list(shape_of(stack)), element)
    key = (stack, str(element))
    if key not in done:
        with after(stack), op.location:
            done[key] = stablehlo.convert(type_, stack)
    op.results[number].replace_all_uses_with(stack)
    op.operands[number] = done[key]
    sliced = [each.results[0] for each in found.ops]
    changed = [carried, condition.arguments[number], op.results[number], *sliced]
    for value in changed:
        shape = list(shape_of(value))
        value.set_type(ir.RankedTensorType.get(shape, element))
    for each in found.converts:
        each.results[0].replace_all_uses_with(each.operands[0])
        each.erase()


def _reads(carried: ir.Value, end) -> _Reads | None:
    """The slices of a loop's argument, if all of them are converted to fewer bits."""
    ops, converts, pending = [], [], [carried]
    while pending:
        value = pending.pop()
        for use in value.uses:
            user = use.owner.operation
            if user.name == "stablehlo.convert":
                converts.append(user)
            elif call_target(user) == "Sharding" or (
                user.name in _SLICES and use.operand_number == 0
            ):
                ops.append(user)
                pending.append(user.results[0])
            elif user != end or value != carried:
                return None
    kinds = {str(_element(each.results[0])) for each in converts}
    before = _element(carried)
    narrow = isinstance(before, ir.F32Type) and kinds <= {"bf16", "f16"}
    return _Reads(ops, converts) if narrow and len(kinds) == 1 else None


def _element(value: ir.Value) -> ir.Type:
    return ir.RankedTensorType(value.type).element_type
