"""Loops and branches of manual regions that not all devices run alike (GSPMD 3.4).

In a manual region a predicate may differ by device. Then a collective in the branch
that some devices take must not span devices that take another branch.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.dataflow.carried import (
    Carried,
    ForwardAnalysis,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    INTO_MANUAL,
    OUT_OF_MANUAL,
    Placeholder,
    op_name,
    placeholder_of,
)

Axes = frozenset[str]
"""Manual axes along which a value differs by device."""


def divergent_ops(module: ir.Operation) -> dict[str, Axes]:
    """The loops and branches whose predicates may differ by device.

    Args:
      module: a module for either partitioner, without calls.

    Returns:
      By the name of the TF op the manual axes along which its predicate may differ.
    """
    divergence = _Divergence()
    for function in module.regions[0].blocks[0].operations:
        if function.operation.name == "func.func":
            block = function.operation.regions[0].blocks[0]
            divergence.facts.update(dict.fromkeys(block.arguments, Axes()))
            divergence.visit(block)
    return divergence.divergent


class _Divergence(ForwardAnalysis):
    """The axes of values that differ by device, from where they are made."""

    def __init__(self):
        super().__init__()
        self.divergent: dict[str, Axes] = {}

    def plain(self, op) -> None:
        axes = Axes().union(*(self.facts[value] for value in op.operands))
        placeholder = placeholder_of(op)
        if placeholder is not None:
            axes = _of_placeholder(placeholder, axes)
        self.facts.update(dict.fromkeys(op.results, axes))

    def carried(self, tie: Carried, first: Axes, made: Axes | None) -> Axes:
        return first if made is None else first | made | self.facts[tie.predicate]

    def after_loop(self, tie: Carried, carried: Axes, made: Axes) -> Axes:
        return carried

    def after_branches(self, tie: Carried, given: Sequence[Axes]) -> Axes:
        return self.facts[tie.predicate].union(*given)

    def check_predicate(self, op, value: ir.Value) -> None:
        if axes := self.facts[value]:
            name = op_name(op)
            self.divergent[name] = self.divergent.get(name, Axes()) | axes


def _of_placeholder(placeholder: Placeholder, inputs: Axes) -> Axes:
    axes = Axes(placeholder.axes)
    if placeholder.kind == INTO_MANUAL:
        return axes & {axis for dim in placeholder.config["dims"] for axis in dim}
    if placeholder.kind == OUT_OF_MANUAL:
        return Axes()
    if placeholder.kind in ("all_reduce", "all_gather"):
        return inputs - axes
    return inputs | axes
