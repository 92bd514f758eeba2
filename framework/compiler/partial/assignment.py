"""The tensors that are unreduced in a program, determined before it is changed.

Forward: tensors that typed annotations call unreduced, and all that is linear in them,
are unreduced wherever they are read (`flow`). Backward: tensors that these need in
parts, such as the sum that is annotated, are made so (`search`), and stay as they are
for other ops that read them. A loop carries a tensor in parts for either reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jax.extend.mlir import ir

from meshwright.framework.compiler.partial.carried import Carried
from meshwright.framework.compiler.partial.flow import (
    Axes,
    Flow,
    PartialUse,
    RefusedError,
)
from meshwright.framework.compiler.partial.search import Derivation, Search
from meshwright.framework.compiler.stablehlo.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame


class PartialAssignment:
    """Which tensors are unreduced, and where.

    A lenient annotation (see `Flow`) is reduced if its tensor is no sum, or if an op
    that is not linear reads it.

    Args:
      completed: the module, which is only read.
      blame: names ops in messages.

    Attributes:
      flow: what is unreduced wherever it is read.
      carried: the axes along which loops and conditionals hold other tensors in parts.
      ways: how values are made in parts, by value and axes.

    Raises:
      LoweringError: a partial sum meets an op that is not linear in it, or leaves the
        program; or no sum is unreduced where an annotation says so.
    """

    def __init__(self, completed: CompletedModule, blame: Blame):
        self._completed = completed
        decided: dict[ir.Value, Axes] = {}
        while True:
            self.flow = Flow(completed, blame, decided)
            self.carried: dict[Carried, Axes] = {}
            self.ways: dict[tuple[ir.Value, Axes], Derivation] = {}
            self._searches: dict[Axes, Search] = {}
            try:
                self.flow.run()
                lenient_sums = dict(self._lenient_sums())
                if not lenient_sums:
                    self._grant_all()
                    return
                decided.update(lenient_sums)
            except RefusedError as e:
                if not e.lenient:
                    raise self._first(e).error from None
                decided.update(dict.fromkeys(e.lenient, ()))

    def axes_of(self, tie: Carried) -> Axes:
        """The axes along which a loop or a conditional holds a tensor in parts."""
        return self.flow.unreduced.get(tie.result) or self.carried.get(tie, ())

    def _search(self, axes: Axes) -> Search:
        if axes not in self._searches:
            self._searches[axes] = Search(
                self._completed,
                axes,
                unreduced=self.flow.unreduced,
                carried=self.carried,
            )
        return self._searches[axes]

    def _lenient_sums(self) -> Iterator[tuple[ir.Value, Axes]]:
        """Lenient annotations whose tensors are known to be sums by now."""
        for result, annotated in self.flow.undecided.items():
            value = result.owner.operands[0]
            for count in range(len(annotated), 0, -1):
                tried = itertools.combinations(annotated, count)
                axes = next((a for a in tried if self._search(a).way(value)), None)
                if axes is not None:
                    yield result, axes
                    break

    def _first(self, error: RefusedError) -> RefusedError:
        """The first of two mistakes in a program."""
        for want in self.flow.wants.values():
            if self._search(want.axes).way(want.value) is None:
                return self._lacks(want)
        return error

    def _lacks(self, want: PartialUse) -> RefusedError:
        return self.flow.lacks(want, self._tied_otherwise(want))

    def _tied_otherwise(self, want: PartialUse) -> tuple[Carried, Axes] | None:
        """What a value could be made of, were that not in parts along other axes."""
        free = Search(
            self._completed, want.axes, unreduced=self.flow.unreduced, carried={}
        )
        left, seen = [want.value], set()
        while left:
            value = left.pop()
            way = free.way(value)
            if way is None or value in seen:
                continue
            axes = self.carried.get(way.tie, want.axes)
            if axes != want.axes:
                return way.tie, axes
            seen.add(value)
            left += way.needs
        return None

    def _grant_all(self) -> None:
        for want in self.flow.wants.values():
            self._grant(want)

    def _grant(self, want: PartialUse) -> None:
        """Notes how a value and what it needs are made in parts."""
        axes = want.axes
        search = self._search(axes)
        if search.way(want.value) is None:
            raise self._lacks(want)
        left = [want.value]
        while left:
            value = left.pop()
            if value in self.flow.unreduced or (value, axes) in self.ways:
                continue
            way = self.ways[value, axes] = search.way(value)
            if way.tie is not None and way.tie not in self.carried:
                self.carried[way.tie] = axes
                self._searches = {axes: search}  # Others may have counted on it.
            left += way.needs
