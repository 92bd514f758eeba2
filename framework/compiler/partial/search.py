"""Which values can be made in parts: sums over axes, and what is linear in them."""

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
      needs: values that must then be in parts too.
      numbers: the operands of the op that these are, if it is linear in them.
      summed: the sum that the value is.
      tie: the tensor of a loop or a conditional that the value belongs to.
    """

    needs: Sequence[ir.Value] = ()
    numbers: Sequence[int] = ()
    summed: Summed | None = None
    tie: Carried | None = None


class Search:
    """Looks back from values for sums over `axes`.

    A tensor that a loop carries can be made in parts if its initial value and what the
    body makes of it can, which may depend on itself: all values are taken to be in
    parts until none of the ways to make them so is left.

    Args:
      completed: the module.
      axes: the axes.
      unreduced: by value, the axes along which it is unreduced wherever it is read.
      carried: the axes along which carried tensors are in parts already.
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
        """The new values among a value and its needs, with all ways to make them."""
        reached, left = [], [value]
        while left:
            needed = left.pop()
            if needed not in self._ways:
                self._ways[needed] = self._possible(needed)
                reached.append(needed)
                left += [need for way in self._ways[needed] for need in way.needs]
        return reached

    def _exclude(self, values: Sequence[ir.Value]) -> None:
        """Keeps the ways whose needs can all be made in parts."""
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
            elsewhere = self.carried.get(tie, self.axes) != self.axes
            return (
                []
                if elsewhere or tie.decides()
                else [Derivation(tie.entering(), tie=tie)]
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
