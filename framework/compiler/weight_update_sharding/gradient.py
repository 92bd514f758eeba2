"""Gradients as sums over the batch, from the ops that compute them on.

The gradient of a tied weight is a sum of such sums: each device adds up its parts of
them, and the total is reduced once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.partial.begins import local_sum
from meshwright.framework.compiler.sharding_types.linear import (
    choices,
    converts_exactly,
)
from meshwright.framework.compiler.sharding_types.partial_sums import Summed, sum_of
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule

_CONVERT = "stablehlo.convert"
_TERMS = ("stablehlo.add", "stablehlo.subtract")
_KEPT = (*_TERMS, _CONVERT, "stablehlo.reshape", "stablehlo.transpose")


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """A sum over the batch, or what is made of such sums by ops that keep sums.

    Args:
      op: the op that makes it.
      axes: the mesh axes that are summed over.
      summed: how the op sums; None if its operands are the sums.
      operands: the operands of an op that keeps sums.
    """

    op: ir.Operation
    axes: tuple[str, ...]
    summed: Summed | None = None
    operands: Sequence[Gradient] = ()

    def local(self, completed: CompletedModule) -> ir.Value:
        """Each device's part, in the manual region; at the insertion point."""
        if self.summed is not None:
            return local_sum(completed, self.summed)
        parts = [operand.local(completed) for operand in self.operands]
        copy = self.op.clone(ir.InsertionPoint.current)
        for number, part in enumerate(parts):
            copy.operands[number] = part
        return copy.results[0]


def find_sum(completed: CompletedModule, reduced, value: ir.Value) -> Gradient | None:
    """How a value is summed over the batch; None if not by ops that are known here.

    Args:
      completed: the module.
      reduced: by value the axes that its maker sums over.
      value: a gradient.
    """
    if isinstance(value.owner, ir.Block):
        return None
    op = value.owner.operation
    if value in reduced:
        summed = sum_of(completed, op, frozenset(reduced[value]))
        return summed and Gradient(op, summed.axes, summed=summed)
    if not _keeps_sums(op):
        return None
    operands = []
    for operand in op.operands:
        # What other ops read is reduced anyway.
        alone = _reads_alone(op, operand)
        found = find_sum(completed, reduced, operand) if alone else None
        if found is None or (operands and found.axes != operands[0].axes):
            return None
        operands.append(found)
    return Gradient(op, operands[0].axes, operands=operands)


def added_sums(
    completed: CompletedModule, reduced, ops: Iterable[ir.Operation]
) -> set[ir.Operation]:
    """The ops that are to compute on parts, so that a sum of sums is reduced once.

    They add up sums over the same axes, or lead from these sums to such an addition.
    Sums that are converted on the way are reduced in their own dtype.
    """
    found: set[ir.Operation] = set()
    for op in ops:
        if op.name in _TERMS and (total := find_sum(completed, reduced, op.results[0])):
            made_by = set(_ops_of(total))
            if all(each.name != _CONVERT for each in made_by):
                found |= made_by
    return found


def _ops_of(total: Gradient) -> Iterator[ir.Operation]:
    yield total.op
    for operand in total.operands:
        yield from _ops_of(operand)


def _reads_alone(op, value: ir.Value) -> bool:
    """Whether a value has no other reader, and is made in the same block."""
    inside = (
        not isinstance(value.owner, ir.Block)
        and value.owner.operation.block == op.block
    )
    return inside and len(list(value.uses)) == 1


def _keeps_sums(op) -> bool:
    """Whether an op of sums gives the sum of the op's results."""
    if op.name not in _KEPT or not choices(op):
        return False
    return op.name != _CONVERT or converts_exactly(op)
