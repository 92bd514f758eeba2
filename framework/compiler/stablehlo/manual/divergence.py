"""Loops and branches of manual regions that not all devices run alike (GSPMD 3.4).

In a manual region a predicate may differ by device. Then a collective in the branch
that some devices take must not span devices that take another branch.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    INTO_MANUAL,
    OUT_OF_MANUAL,
    WHILE,
    Placeholder,
    end_of,
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
    divergence.run(module.regions[0].blocks[0])
    return divergence.divergent


class _Divergence:
    """Follows values that differ by device from where they are made."""

    def __init__(self):
        self.divergent: dict[str, Axes] = {}
        self._axes: dict[ir.Value, Axes] = {}

    def run(self, block: ir.Block) -> list[Axes]:
        """Goes through a block; returns the axes of what it returns."""
        for view in block.operations:
            op = view.operation
            for result, axes in zip(op.results, self._of_results(op), strict=True):
                self._axes[result] = axes
        return [self._of(value) for value in end_of(block).operands]

    def _of(self, *values: ir.Value) -> Axes:
        return Axes().union(*(self._axes.get(value, Axes()) for value in values))

    def _of_results(self, op) -> list[Axes]:
        inputs = self._of(*op.operands)
        placeholder = placeholder_of(op)
        if placeholder is not None:
            return [_of_placeholder(placeholder, inputs)]
        if op.name == WHILE:
            return self._of_loop(op)
        if op.name in BRANCHES:
            return self._of_branches(op)
        if op.name == "func.func":
            self.run(op.regions[0].blocks[0])
        return [inputs] * len(op.results)

    def _of_loop(self, op) -> list[Axes]:
        condition, body = (region.blocks[0] for region in op.regions)
        state = [self._of(value) for value in op.operands]
        while True:
            for block in (condition, body):
                self._axes.update(zip(block.arguments, state, strict=True))
            (predicate,) = self.run(condition)
            after = [
                before | returned | predicate
                for before, returned in zip(state, self.run(body), strict=True)
            ]
            if after == state:
                self._note(op, predicate)
                return state
            state = after

    def _of_branches(self, op) -> list[Axes]:
        predicate = self._of(op.operands[0])
        self._note(op, predicate)
        returned = [self.run(region.blocks[0]) for region in op.regions]
        return [predicate.union(*axes) for axes in zip(*returned, strict=True)]

    def _note(self, op, predicate: Axes) -> None:
        if predicate:
            name = op_name(op)
            self.divergent[name] = self.divergent.get(name, Axes()) | predicate


def _of_placeholder(placeholder: Placeholder, inputs: Axes) -> Axes:
    axes = Axes(placeholder.axes)
    if placeholder.kind == INTO_MANUAL:
        return axes & {axis for dim in placeholder.config["dims"] for axis in dim}
    if placeholder.kind == OUT_OF_MANUAL:
        return Axes()
    if placeholder.kind in ("all_reduce", "all_gather"):
        return inputs - axes
    return inputs | axes
