"""Values that control flow ties together: all of them take a form, or none does.

They are a loop's input and output, a program's argument and the result that replaces
it, the results of a conditional's branches (weight-update sharding 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.dataflow.carried import (
    Carried,
    carried_of_op,
)
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    constant_of,
    end_of,
    shape_of,
    walk,
)

_SAME_TRUTH = ("stablehlo.not", "stablehlo.convert", "stablehlo.reshape")


def carried_of(
    completed: CompletedModule, carried: Sequence[tuple[int, int]]
) -> list[Carried]:
    """The carried tensors of a module that are not scalars.

    Args:
      completed: the module.
      carried: pairs of numbers, of an argument and of the result that replaces it in
        the next call.
    """
    block = completed.main.regions[0].blocks[0]
    end = end_of(block)
    links = [
        Carried((block.arguments[argument],), ((end, result),), argument)
        for argument, result in carried
    ]
    for op in walk(completed.main):
        if op.name in (WHILE, *BRANCHES):
            links += filter(Carried.changes, carried_of_op(op))
    return [link for link in links if shape_of(link.values[0])]


def frequency(op, region: int) -> float:
    """How often a branch of a conditional is taken: 1 / k if every k steps, else 1.

    As in the paper, this is read from the predicate's use of a counter: a remainder by
    k is compared with a number.
    """
    equal = op.name == "stablehlo.if" and _compared(op.operands[0])
    if not equal:
        return 1.0
    maker, rare = equal
    every = _divisor(maker)
    return 1.0 / every if every and region == rare else 1.0


def _compared(value: ir.Value) -> tuple[ir.Operation, int] | None:
    """The comparison behind a predicate, and which branch is taken if it is equal."""
    turned = False
    while not isinstance(value.owner, ir.Block):
        maker = value.owner
        if maker.name == "stablehlo.compare":
            text = str(maker.attributes["comparison_direction"])
            unequal = " NE" in text
            if not unequal and " EQ" not in text:
                return None
            return maker, int(unequal != turned)
        turned ^= maker.name == "stablehlo.not"
        if maker.name not in _SAME_TRUTH:
            return None
        value = maker.operands[0]
    return None


def _divisor(op) -> float | None:
    """The divisor, a constant, of a remainder of scalars from which an op is made."""
    pending, left = list(op.operands), 64
    while pending and left:
        value, left = pending.pop(0), left - 1
        maker = value.owner
        if isinstance(maker, ir.Block) or shape_of(value):
            continue
        if maker.name == "stablehlo.remainder":
            return abs(constant_of(maker.operands[1]) or 0) or None
        pending += list(maker.operands)
    return None


def trips(op) -> int:
    """How often a loop runs, by the constants in its condition; 1 if it has none."""
    condition = op.regions[0].blocks[0]
    bounds = []
    for inner in condition.operations:
        if inner.operation.name == "stablehlo.compare":
            read = [_bound(op, condition, v) for v in inner.operation.operands]
            bounds += [bound for bound in read if bound]
    return int(min(bounds, default=1))


def _bound(op, condition, value: ir.Value) -> float | None:
    if isinstance(value.owner, ir.Block) and value.owner == condition:
        tie = Carried.by(op.results[ir.BlockArgument(value).arg_number])
        value = value if tie.changes() else tie.entering()[0]
    if not isinstance(value.owner, ir.Block) and value.owner.name == WHILE:
        return trips(value.owner)  # A backward loop counts down a forward one.
    return constant_of(value)


def joined(links: Sequence[Carried]) -> list[list[Carried]]:
    """Links in groups, in which they pass a tensor on to each other."""
    groups: list[list[Carried]] = []
    for link in links:
        near = [group for group in groups if any(_passes(link, c) for c in group)]
        groups = [group for group in groups if group not in near]
        groups.append([link, *(c for group in near for c in group)])
    return groups


def _passes(a: Carried, b: Carried) -> bool:
    return any(v in b.values for v in a.entering()) or any(
        v in a.values for v in b.entering()
    )
