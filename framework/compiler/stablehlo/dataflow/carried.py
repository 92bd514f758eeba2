"""Tensors that loops carry and conditionals return, and what follows through these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import BRANCHES, WHILE, end_of

Use = tuple[ir.Operation, int]
"""An operation and the number of its operand."""


@dataclasses.dataclass(frozen=True)
class Carried:
    """A tensor that a loop carries, a conditional returns, or a program keeps as state.

    Args:
      values: the values that are the tensor: the arguments of a loop's condition and
        its body, then the result of the loop or conditional; or a program's argument.
      uses: the operands that become the tensor: what a loop begins with, then what its
        body or each branch returns; or a program's result.
      argument: the number of the program's argument that it is; None for others.
    """

    values: tuple[ir.Value, ...]
    uses: tuple[Use, ...] = dataclasses.field(compare=False)
    argument: int | None = None

    @classmethod
    def by(cls, result: ir.Value) -> Carried:
        """The tensor of which a loop's or a conditional's result is one value."""
        op, number = result.owner.operation, ir.OpResult(result).result_number
        blocks = [region.blocks[0] for region in op.regions]
        if op.name != WHILE:
            return cls((result,), tuple((end_of(block), number) for block in blocks))
        arguments = (block.arguments[number] for block in blocks)
        return cls((*arguments, result), ((op, number), (end_of(blocks[1]), number)))

    @property
    def result(self) -> ir.Value:
        """The result of its loop or conditional."""
        return self.values[-1]

    @property
    def op(self) -> ir.Operation:
        """Its loop or conditional."""
        return self.result.owner.operation

    @property
    def is_loop(self) -> bool:
        return len(self.values) > 1

    @property
    def predicate(self) -> ir.Value:
        """What decides whether its loop goes on, or which branch is taken."""
        op = end_of(self.op.regions[0].blocks[0]) if self.is_loop else self.op
        return op.operands[0]

    @property
    def ends(self) -> Sequence[Use]:
        """The operands that a loop's body or a conditional's branches return."""
        return self.uses[1:] if self.is_loop else self.uses

    def entering(self) -> list[ir.Value]:
        """The values that become the tensor."""
        return [op.operands[number] for op, number in self.uses]

    def changes(self) -> bool:
        """Whether it is not a tensor that a loop only reads."""
        return not self.is_loop or self.entering()[1] != self.values[1]

    def decides(self) -> bool:
        """Whether a loop's condition reads the tensor."""
        return self.is_loop and any(True for _ in self.values[0].uses)


def carried_of_op(op) -> Iterator[Carried]:
    """All such tensors of a loop or a conditional."""
    return map(Carried.by, op.results)


def carried_of(value: ir.Value) -> Carried | None:
    """The carried tensor that a value is a result or an argument of, if it is one."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        return Carried.by(value) if owner.name in (WHILE, *BRANCHES) else None
    holder = owner.owner.operation
    if holder.name != WHILE or owner != holder.regions[1].blocks[0]:
        return None
    return Carried.by(holder.results[ir.BlockArgument(value).arg_number])


class ForwardAnalysis:
    """What follows forward of each value of a module, in loops to a fixed point.

    A subclass tells of plain ops, `plain(op)`; what a loop carries, by what it began
    with and what its body made of that, None before the first visit,
    `carried(tie, first, made)`; what its result is, by what it carries and its body
    makes, `after_loop(tie, carried, made)`; and what a conditional's is, by what its
    branches give, `after_branches(tie, given)`. Of several visits the last one counts.

    Attributes:
      facts: by value, in the order of the module; a program's arguments' are given.
    """

    def __init__(self):
        self.facts: dict[ir.Value, Any] = {}

    def visit(self, block) -> None:
        """Goes over a block whose arguments have facts."""
        for op in block.operations:
            self.visit_op(op.operation)

    def visit_op(self, op) -> None:
        if op.name == WHILE:
            self._loop(op)
        elif op.name in BRANCHES:
            self._branches(op)
        elif len(op.results):
            self.plain(op)

    def check_predicate(self, op, value: ir.Value) -> None:
        """Looks at what decides how a loop or a conditional goes on."""

    def _loop(self, op) -> None:
        condition, body = (region.blocks[0] for region in op.regions)
        ties, before = list(carried_of_op(op)), None
        first = [self.facts[value] for value in op.operands]
        after = [self.carried(*pair, None) for pair in zip(ties, first, strict=True)]
        while after != before:
            before = after
            for block in (condition, body):
                self.facts.update(zip(block.arguments, before, strict=True))
                self.visit(block)
            made = [self.facts[value] for value in end_of(body).operands]
            after = list(map(self.carried, ties, before, made))
        self.check_predicate(op, end_of(condition).operands[0])
        for tie, *pair in zip(ties, after, made, strict=True):
            self.facts[tie.result] = self.after_loop(tie, *pair)

    def _branches(self, op) -> None:
        for region in op.regions:
            self.visit(region.blocks[0])
        self.check_predicate(op, op.operands[0])
        for tie in carried_of_op(op):
            given = [self.facts[value] for value in tie.entering()]
            self.facts[tie.result] = self.after_branches(tie, given)
