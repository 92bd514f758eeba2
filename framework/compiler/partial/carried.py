"""Tensors that loops carry and conditionals give: in parts everywhere, or nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import BRANCHES, WHILE, end_of


@dataclasses.dataclass(frozen=True)
class Carried:
    """One tensor that a loop carries, or a conditional gives.

    Args:
      result: of the loop or the conditional.
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

    def ends(self) -> list[ir.Operation]:
        """The ops that pass it on at the end of a loop's body, or of each branch."""
        regions = self.op.regions
        ends = regions[1:2] if self.is_loop else regions
        return [end_of(region.blocks[0]) for region in ends]

    def entering(self) -> list[ir.Value]:
        """What it is made of."""
        first = [self.op.operands[self.number]] if self.is_loop else []
        return first + [end.operands[self.number] for end in self.ends()]

    def arguments(self) -> list[ir.BlockArgument]:
        """What a loop's condition and its body read it by."""
        regions = self.op.regions if self.is_loop else ()
        return [region.blocks[0].arguments[self.number] for region in regions]

    def decides(self) -> bool:
        """Whether the loop's condition reads it."""
        return any(list(argument.uses) for argument in self.arguments()[:1])


def carried_of_op(op) -> Iterator[Carried]:
    """All of a loop or a conditional."""
    return map(Carried, op.results)


def carried_of(value: ir.Value) -> Carried | None:
    """What a value is read by, None if it is no such tensor."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        return Carried(value) if owner.name in (WHILE, *BRANCHES) else None
    holder = owner.owner.operation
    if holder.name != WHILE or owner != holder.regions[1].blocks[0]:
        return None
    return Carried(holder.results[ir.BlockArgument(value).arg_number])
