"""Tensors that loops carry and conditionals return: in parts everywhere, or nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import BRANCHES, WHILE, end_of


@dataclasses.dataclass(frozen=True)
class Carried:
    """A tensor that a loop carries, or a conditional returns.

    Args:
      result: the result of the loop or the conditional.
    """

    result: ir.Value

    @property
    def op(self) -> ir.Operation:
        return self.result.owner.operation

    @property
    def number(self) -> int:
        return ir.OpResult(self.result).result_number

    @property
    def is_loop(self) -> bool:
        return self.op.name == WHILE

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """The values that are the tensor."""
        return (*self.arguments(), self.result)

    @property
    def uses(self) -> list[tuple[ir.Operation, int]]:
        """The operands that become the tensor: of which op, and its number."""
        first = [(self.op, self.number)] if self.is_loop else []
        return first + [(end, self.number) for end in self.ends()]

    def ends(self) -> list[ir.Operation]:
        """The ops that return the tensor from a loop's body, or from each branch."""
        regions = self.op.regions
        ends = regions[1:2] if self.is_loop else regions
        return [end_of(region.blocks[0]) for region in ends]

    def entering(self) -> list[ir.Value]:
        """The values that become the tensor."""
        return [op.operands[number] for op, number in self.uses]

    def arguments(self) -> list[ir.BlockArgument]:
        """The arguments by which a loop's condition and its body read the tensor."""
        regions = self.op.regions if self.is_loop else ()
        return [region.blocks[0].arguments[self.number] for region in regions]

    def changes(self) -> bool:
        """Whether it is not a tensor that a loop only reads."""
        return not self.is_loop or self.entering()[1] != self.arguments()[1]

    def decides(self) -> bool:
        """Whether the loop's condition reads the tensor."""
        return any(list(argument.uses) for argument in self.arguments()[:1])


def carried_of_op(op) -> Iterator[Carried]:
    """All such tensors of a loop or a conditional."""
    return map(Carried, op.results)


def carried_of(value: ir.Value) -> Carried | None:
    """The carried tensor that a value is a result or an argument of, if it is one."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        return Carried(value) if owner.name in (WHILE, *BRANCHES) else None
    holder = owner.owner.operation
    if holder.name != WHILE or owner != holder.regions[1].blocks[0]:
        return None
    return Carried(holder.results[ir.BlockArgument(value).arg_number])
