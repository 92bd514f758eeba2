"""Removes calls, tuples and no-ops from a module, for passes that walk over it."""

from __future__ import annotations

from jax.extend.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.stablehlo.rewrites.workarounds import (
    Stage,
    work_around,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    has_side_effect,
    operand_places,
    walk,
)

_MAYBE_IDLE = ("stablehlo.reshape", "stablehlo.transpose", "stablehlo.convert")


def tidy(module: ir.Operation) -> None:
    """Inlines calls, and drops tuples and no-ops, such as the copies of TF2XLA."""
    work_around(Stage.TIDY, module)
    PassManager.parse("builtin.module(inline)").run(module)
    symbols = ir.SymbolTable(module)
    # The pass leaves the calls in conditions of loops.
    while calls := [op for op in walk(module) if op.name == "func.call"]:
        for call in calls:
            name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            inline(call, symbols[name].operation)
    PassManager.parse("builtin.module(symbol-dce)").run(module)
    for op in list(walk(module)):
        if _is_idle(op):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


def drop_unused(main) -> None:
    """Drops the ops of a function whose results no op reads."""
    for op in reversed(list(walk(main))):
        read = any(list(result.uses) for result in op.results)
        lasts = has_side_effect(op) or op.name == WHILE  # A loop may not end.
        if len(op.results) and not read and not lasts:
            op.erase()


def inline(call, called) -> None:
    """Puts a copy of the ops of a function in the place of an op that calls it."""
    block = called.regions[0].blocks[0]
    values = dict(zip(block.arguments, call.operands, strict=True))
    ops = [op.operation for op in block.operations]
    for op in ops[:-1]:
        copy = op.clone(ir.InsertionPoint(call))
        for user, number in operand_places(copy):
            value = user.operands[number]
            user.operands[number] = values.get(value, value)
        values.update(zip(op.results, copy.results, strict=True))
    for result, value in zip(call.results, ops[-1].operands, strict=True):
        result.replace_all_uses_with(values[value])
    call.erase()


def as_function(text: str) -> ir.Operation:
    """The module of a text that JAX lowered, whose `main` has no calls and idle ops."""
    module = ir.Module.parse(text).operation
    tidy(module)
    drop_unused(ir.SymbolTable(module)["main"].operation)
    return module


def inline_text(op, text: str) -> None:
    """Puts the ops of a module's `main` in the place of an op, of which they are."""
    module = ir.Module.parse(text).operation
    for inner in walk(module):
        inner.location = op.location
    inline(op, ir.SymbolTable(module)["main"].operation)


def _is_idle(op) -> bool:
    if op.name not in _MAYBE_IDLE or op.operands[0].type != op.results[0].type:
        return False
    if op.name != "stablehlo.transpose":
        return True
    order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
    return order == sorted(order)
