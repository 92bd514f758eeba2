"""What all data-parallel replicas compute alike (weight-update sharding 3.1).

The paper's program is that of one replica, with all-reduces in it. Ours is that of one
giant device, where the same question reads: which values does no data axis split, and
are they made from such values, from constants and from reductions over the data axes
alone? In a manual region, where devices have different values, the paper's rules hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.sharding_types.combine import HALO
from meshwright.framework.compiler.sharding_types.op_dims import op_dims
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    INTO_MANUAL,
    WHILE,
    end_of,
    has_side_effect,
    placeholder_of,
    walk,
)
from meshwright.framework.compiler.weight_update_sharding.gradient import added_sums

_NEVER_ALIKE = (
    "stablehlo.rng",
    "stablehlo.rng_bit_generator",
    "stablehlo.infeed",
    "stablehlo.outfeed",
    "stablehlo.send",
    "stablehlo.recv",
    "stablehlo.partition_id",
    "stablehlo.replica_id",
)
# Collectives of manual regions whose results differ between devices.
_DEVICE_DEPENDENT = ("axis_index", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True, eq=False)
class Redundancy:
    """What is computed alike along which data axes.

    Args:
      alike: by value the data axes along which all replicas compute it alike.
      reduced: by value the data axes over which the op that makes it sums: the value is
        the result of a gradient reduction, or of a similar one.
      updates: values that depend on a reduction.
      added: ops that add up such results; their total is reduced, not they.
      rules: the rules of the module's ops.
    """

    alike: dict[ir.Value, frozenset[str]]
    reduced: dict[ir.Value, frozenset[str]]
    updates: set[ir.Value]
    added: set[ir.Operation]
    rules: OpRules


def analyze(completed: CompletedModule, data_axes: Sequence[str]) -> Redundancy:
    """Finds what is redundant along `data_axes`, through loops to a fixed point."""
    return _Analysis(completed, frozenset(data_axes)).run()


class _Analysis:
    def __init__(self, completed: CompletedModule, data_axes: frozenset[str]):
        self.completed = completed
        self.data_axes = data_axes
        self.alike: dict[ir.Value, frozenset[str]] = {}
        self.reduced: dict[ir.Value, frozenset[str]] = {}
        self.updates: set[ir.Value] = set()

    def run(self) -> Redundancy:
        block = self.completed.main.regions[0].blocks[0]
        for argument in block.arguments:
            self.alike[argument] = self.unsplit(argument)
        self.visit(block)
        added = added_sums(self.completed, self.reduced, walk(self.completed.main))
        return Redundancy(
            self.alike, self.reduced, self.updates, added, self.completed.rules
        )

    def unsplit(self, value: ir.Value) -> frozenset[str]:
        return self.data_axes - self.completed.axes(value)

    def visit(self, block) -> None:
        for op in block.operations:
            op = op.operation
            if op.name == WHILE:
                self.loop(op)
            elif op.name in BRANCHES:
                self.branches(op)
            else:
                self.plain(op)

    def loop(self, op) -> None:
        condition, body = (region.blocks[0] for region in op.regions)
        carried = [
            self.alike[value] & self.unsplit(result)
            for value, result in zip(op.operands, op.results, strict=True)
        ]
        while True:
            for block in (condition, body):
                for i, argument in enumerate(block.arguments):
                    self.alike[argument] = carried[i]
                    self.mark(argument, op.operands[i] in self.updates)
                self.visit(block)
            # Replicas whose loops run differently share no value.
            (goes_on,) = end_of(condition).operands
            after = [
                before & self.alike[value] & self.alike[goes_on]
                for before, value in zip(carried, end_of(body).operands, strict=True)
            ]
            if after == carried:
                break
            carried = after
        for i, value in enumerate(end_of(body).operands):
            self.alike[op.results[i]] = carried[i]
            self.mark(op.results[i], value in self.updates)

    def branches(self, op) -> None:
        for region in op.regions:
            self.visit(region.blocks[0])
        yields = [end_of(region.blocks[0]).operands for region in op.regions]
        chooses = self.alike[op.operands[0]]
        for i, result in enumerate(op.results):
            values = [operands[i] for operands in yields]
            alike = [self.alike[value] for value in values]
            self.alike[result] = self.unsplit(result).intersection(chooses, *alike)
            self.mark(result, any(value in self.updates for value in values))

    def plain(self, op) -> None:
        alike = self.data_axes.intersection(*(self.alike[v] for v in op.operands))
        gained = self.gained(op)
        if op.name in _NEVER_ALIKE or has_side_effect(op):
            alike = frozenset()
        for result in op.results:
            free = self.unsplit(result)
            self.alike[result] = free & ((alike - self.own_axes(op)) | gained)
            self.reduced.pop(result, None)
            if gained & free:
                self.reduced[result] = gained & free
            updates = any(value in self.updates for value in op.operands)
            self.mark(result, updates or bool(gained & free))

    def mark(self, value: ir.Value, updates: bool) -> None:
        # A later pass over a loop may find that a value is no update after all.
        (self.updates.add if updates else self.updates.discard)(value)

    def own_axes(self, op) -> frozenset[str]:
        """The axes along which an op of a manual region makes replicas differ."""
        placeholder = placeholder_of(op)
        if placeholder is None:
            return frozenset()
        if placeholder.kind == INTO_MANUAL:
            return frozenset(axis for dim in placeholder.config["dims"] for axis in dim)
        return frozenset(
            placeholder.axes if placeholder.kind in _DEVICE_DEPENDENT else ()
        )

    def gained(self, op) -> frozenset[str]:
        """The data axes over which an op sums values that differ between replicas."""
        placeholder = placeholder_of(op)
        if placeholder is not None:
            is_sum = placeholder.kind == "all_reduce"
            return self.data_axes & frozenset(placeholder.axes if is_sum else ())
        differs = [v for v in op.operands if self.data_axes - self.alike[v]]
        if not differs:
            return frozenset()
        summed = [
            (self.alike[value] | self.summed(op, value)) & self.data_axes
            for value in differs
        ]
        everywhere = self.data_axes.intersection(*(self.alike[v] for v in op.operands))
        return self.data_axes.intersection(*summed) - everywhere

    def summed(self, op, value: ir.Value) -> frozenset[str]:
        """The axes that split dims of an operand which the op sums over."""
        axes: frozenset[str] = frozenset()
        rule = op_dims(op, self.completed.rules)
        halos = {label for label, kind in rule.kinds.items() if kind == HALO}
        summed = set(rule.all_combined()) - halos
        for operand, labels in zip(op.operands, rule.operands, strict=True):
            if operand == value:
                dims = [dim for dim, label in enumerate(labels) if label in summed]
                split = [self.completed.dim_axes(value, dim) for dim in dims]
                axes = axes.union(*split)
        return axes
