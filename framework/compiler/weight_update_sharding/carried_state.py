"""Values that control flow ties together: they take one form or none.

A loop's input and output, a program's argument and the result that replaces it, the
branches of a conditional and what they give (weight-update sharding 3.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    constant_of,
    end_of,
    shape_of,
    walk,
)

Use = tuple[ir.Operation, int]
"""An operation and the number of its operand."""

_SAME_TRUTH = ("stablehlo.not", "stablehlo.convert", "stablehlo.reshape")


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """Values and uses of one form.

    Args:
      values: block arguments and results.
      uses: where values enter it.
      argument: number of the program's argument that it is, None if of a loop or a
        conditional.
    """

    values: tuple[ir.Value, ...]
    uses: tuple[Use, ...]
    argument: int | None = None

    def entering(self) -> list[ir.Value]:
        """What enters it."""
        return [op.operands[number] for op, number in self.uses]


def carried_of(
    completed: CompletedModule, carried: Sequence[tuple[int, int]]
) -> list[Carried]:
    """All links of tensors that are no scalars.

    Args:
      completed: the module.
      carried: pairs of the numbers of an argument and of the result that is the same
        argument in the next call.
    """
    block = completed.main.regions[0].blocks[0]
    end = end_of(block)
    found = [
        Carried((block.arguments[argument],), ((end, result),), argument)
        for argument, result in carried
    ]
    for op in walk(completed.main):
        if op.name == WHILE:
            found += _of_loop(op)
        elif op.name in BRANCHES:
            found += _of_branches(op)
    return [link for link in found if shape_of(link.values[0])]


def _of_loop(op) -> Iterator[Carried]:
    """Of what changes: what a loop only reads it uses as any op does."""
    condition, body = (region.blocks[0] for region in op.regions)
    for i, result in enumerate(op.results):
        if end_of(body).operands[i] != body.arguments[i]:
            values = (condition.arguments[i], body.arguments[i], result)
            yield Carried(values, ((op, i), (end_of(body), i)))


def _of_branches(op) -> Iterator[Carried]:
    ends = [end_of(region.blocks[0]) for region in op.regions]
    for i, result in enumerate(op.results):
        yield Carried((result,), tuple((end, i) for end in ends))


def frequency(op, region: int) -> float:
    """How often a branch of a conditional is entered: 1 / k if every k steps, else 1.

    As in the paper, by its predicate's use of a counter: something's remainder by k is
    compared with a number.
    """
    equal = op.name == "stablehlo.if" and _compared(op.operands[0])
    if not equal:
        return 1.0
    maker, rare = equal
    every = _divisor(maker)
    return 1.0 / every if every and region == rare else 1.0


def _compared(value: ir.Value) -> tuple[ir.Operation, int] | None:
    """The comparison that a predicate is; which branch is for what is equal."""
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
    """The constant by which scalars behind an op are divided for their remainder."""
    pending, most = list(op.operands), 64
    while pending and most:
        value, most = pending.pop(0), most - 1
        maker = value.owner
        if isinstance(maker, ir.Block) or shape_of(value):
            continue
        if maker.name == "stablehlo.remainder":
            return abs(constant_of(maker.operands[1]) or 0) or None
        pending += list(maker.operands)
    return None


def trips(op) -> int:
    """How often a loop runs, by constants that its condition compares with; or 1."""
    condition = op.regions[0].blocks[0]
    bounds = []
    for inner in condition.operations:
        if inner.operation.name == "stablehlo.compare":
            found = [_bound(op, condition, value) for value in inner.operation.operands]
            bounds += [bound for bound in found if bound]
    return int(min(bounds, default=1))


def _bound(op, condition, value: ir.Value) -> float | None:
    if isinstance(value.owner, ir.Block) and value.owner == condition:
        number = ir.BlockArgument(value).arg_number
        body = op.regions[1].blocks[0]
        kept = end_of(body).operands[number] == body.arguments[number]
        value = op.operands[number] if kept else value
    if not isinstance(value.owner, ir.Block) and value.owner.name == WHILE:
        return trips(value.owner)  # A backward loop counts down a forward one.
    return constant_of(value)


def joined(links: Sequence[Carried]) -> list[list[Carried]]:
    """Links that pass one tensor on to each other, together."""
    found: list[list[Carried]] = []
    for link in links:
        near = [group for group in found if any(_passes(link, one) for one in group)]
        found = [group for group in found if group not in near]
        found.append([link, *(one for group in near for one in group)])
    return found


def _passes(one: Carried, other: Carried) -> bool:
    return any(v in other.values for v in one.entering()) or any(
        v in one.values for v in other.entering()
    )
