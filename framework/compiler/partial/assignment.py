"""The tensors that are unreduced in a program, determined before it is changed.

Forward: tensors that typed annotations call unreduced, and all that is linear in them,
are unreduced wherever they are read (`PartialTypes`). Backward: tensors that these need
in parts, such as the sum that is annotated, are made so, and stay as they are for other
ops that read them. A loop carries a tensor in parts for either reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.partial.partial_types import (
    Axes,
    PartialTypes,
)
from meshwright.framework.compiler.sharding_types.linear import choices
from meshwright.framework.compiler.sharding_types.partial_sums import Summed, sum_of
from meshwright.framework.compiler.stablehlo.dataflow.carried import (
    Carried,
    carried_of,
    carried_of_op,
)
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    Blame,
    walk,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Derivation:
    """How a value is made in parts; zeros, if by none of these.

    Args:
      numbers: the operands of its op that are in parts too, if it is linear in them.
      summed: the sum that the value is.
      tie: the tensor of a loop or a conditional that the value belongs to.
    """

    numbers: Sequence[int] = ()
    summed: Summed | None = None
    tie: Carried | None = None


class PartialAssignment:
    """Which tensors are unreduced, and where.

    Args:
      completed: the module, which is only read.
      blame: names ops in messages.

    Attributes:
      types: the types of all values, and annotations' conversions.
      carried: the axes along which loops and conditionals hold other tensors in parts.
      ways: how values are made in parts, by value and axes.

    Raises:
      LoweringError: a partial sum meets an op that is not linear in it, or leaves the
        program; or no sum is unreduced where an annotation says so.
    """

    def __init__(self, completed: CompletedModule, blame: Blame):
        self._completed = completed
        reducing: set[ir.Operation] = set()
        while True:
            self.types = PartialTypes(completed, blame, reducing)
            self.carried: dict[Carried, Axes] = {}
            self.ways: dict[tuple[ir.Value, Axes], Derivation] = {}
            self.types.run()
            if not self.types.errors:
                for op in walk(completed.main):
                    self._read(op)
            if not self.types.errors:
                return
            if self.types.yielding <= reducing:
                raise next(iter(self.types.errors.values()))[0]
            reducing |= self.types.yielding

    def axes_of(self, tie: Carried) -> Axes:
        """The axes along which a loop or a conditional holds a tensor in parts."""
        return self.types.unreduced(tie.result) or self.carried.get(tie, ())

    def _read(self, op) -> None:
        """Notes how the values that an op reads in parts are made so."""
        result = op.results[0] if len(op.results) else None
        if result in self.types.conversions:
            before = self.types.conversions[result].before
            self._grant(op, op.operands[0], before.unreduced)
        elif op.name in (WHILE, *BRANCHES):
            for tie in carried_of_op(op):
                for value in tie.entering():
                    self._grant(op, value, self.types.unreduced(tie.result))
        elif result is not None and (axes := self.types.unreduced(result)):
            numbers = self._numbers(op, axes)
            self.ways[result, axes] = Derivation(numbers=numbers)
            for number in numbers:
                self._grant(op, op.operands[number], axes)

    def _grant(self, op, value: ir.Value, axes: Axes) -> None:
        """Notes how a value and what it needs are made in parts for an op."""
        left = [value] if axes else []
        while left:
            value = left.pop()
            if self.types.unreduced(value) or (value, axes) in self.ways:
                continue
            way = self.ways[value, axes] = self._way(value, axes)
            if way.tie is not None:
                before = self.carried.setdefault(way.tie, axes)
                if before != axes:
                    self._refuse(op, value, axes, way.tie)
                    return
                left += way.tie.entering()
            left += [value.owner.operands[number] for number in way.numbers]

    def _way(self, value: ir.Value, axes: Axes) -> Derivation:
        if self.types.types[value].zero:
            return Derivation()
        tie = carried_of(value)
        if tie is not None:
            return Derivation(tie=tie)
        op = value.owner.operation
        if summed := sum_of(self._completed, op, axes):
            return Derivation(summed=summed)
        return Derivation(numbers=self._numbers(op, axes))

    def _numbers(self, op, axes: Axes) -> Sequence[int]:
        """The operands of a linear op that are in parts, if its result is."""
        held = {i for i, v in enumerate(op.operands) if self.types.unreduced(v)}
        return next(
            group
            for group in choices(op)
            if held <= {*group}
            and all(self.types.can_be(op.operands[i], axes) for i in group)
        )

    def _refuse(self, op, value: ir.Value, axes: Axes, tie: Carried) -> None:
        """Refuses a tensor that is carried in parts along other axes already."""
        types = self.types
        place = types.place(tie.op)
        types.refuse(
            op,
            f"takes {types.types[value]} unreduced along {', '.join(axes)}, which "
            f"{place} has unreduced along {', '.join(self.carried[tie])} for another "
            "op: a loop or a conditional has a tensor in parts along the same axes for "
            "all that read it; annotate these alike and reshard them",
            [types.types[v] for v in (*op.operands, *op.results)],
        )
