"""Which values can be had in parts: sums over some axes, and what is linear in such."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.partial.carried import Carried, carried_of
from meshwright.framework.compiler.partial.linear import choices, is_zero
from meshwright.framework.compiler.partial.partial_sums import Summed, sum_of
from meshwright.framework.compiler.stablehlo.completed import CompletedModule

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Derivation:
    """One way to make a value in parts.

    Args:
      needs: values that are then to be in parts too.
      numbers: those of the op's operands that they are, if it is linear in them.
      summed: the sum that it is.
      tie: what a loop or a conditional ties it to.
    """

    needs: Sequence[ir.Value] = ()
    numbers: Sequence[int] = ()
    summed: Summed | None = None
    tie: Carried | None = None


class Search:
    """Looks back from values for sums over `axes`.

    A tensor that a loop carries can be had in parts if what it starts from and what
    the body makes of it can, which may depend on itself: all values are taken to be in
    parts until none of the ways to make them so is left.

    Args:
      completed: the module.
      axes: the axes.
      unreduced: by value the axes along which it is unreduced wherever it is read.
      carried: the axes along which ties are in parts already.
    """

    def __init__(
        self,
        completed: CompletedModule,
        axes: Axes,
        *,
        unreduced: Mapping[ir.Value, Axes],
        carried: Mapping[Carried, Axes],
    ):
        self.completed = completed
        self.axes = axes
        self.unreduced = unreduced
        self.carried = carried
        self._ways: dict[ir.Value, list[Derivation]] = {}

    def way(self, value: ir.Value) -> Derivation | None:
        """The way to make a value in parts, None if there is none."""
        if value not in self._ways:
            self._exclude(self._reached(value))
        ways = self._ways[value]
        return ways[0] if ways else None

    def _reached(self, value: ir.Value) -> list[ir.Value]:
        """What has not been looked at and what it needs, with all ways to make them."""
        found, left = [], [value]
        while left:
            one = left.pop()
            if one not in self._ways:
                self._ways[one] = self._possible(one)
                found.append(one)
                left += [need for way in self._ways[one] for need in way.needs]
        return found

    def _exclude(self, values: Sequence[ir.Value]) -> None:
        """Leaves the ways of which all that they need can be had in parts."""
        readers: dict[ir.Value, list[ir.Value]] = {}
        for value in values:
            for way in self._ways[value]:
                for need in way.needs:
                    readers.setdefault(need, []).append(value)
        left = [value for value in self._ways if not self._ways[value]]
        while left:
            lost = left.pop()
            for value in readers.pop(lost, ()):
                ways = self._ways[value]
                kept = [way for way in ways if lost not in way.needs]
                self._ways[value] = kept
                if ways and not kept:
                    left.append(value)

    def _possible(self, value: ir.Value) -> list[Derivation]:
        if value in self.unreduced:
            return [Derivation()] if self.unreduced[value] == self.axes else []
        if is_zero(value):
            return [Derivation()]
        tie = carried_of(value)
        if tie is not None:
            other = self.carried.get(tie, self.axes) != self.axes
            return (
                [] if other or tie.decides() else [Derivation(tie.entering(), tie=tie)]
            )
        if isinstance(value.owner, ir.Block):
            return []
        op = value.owner.operation
        summed = sum_of(self.completed, op, self.axes)
        if summed is not None:
            return [Derivation(summed=summed)]
        return [
            Derivation([op.operands[i] for i in numbers], numbers)
            for numbers in choices(op)
        ]
