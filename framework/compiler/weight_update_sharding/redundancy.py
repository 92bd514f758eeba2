"""What all data-parallel replicas compute alike (weight-update sharding 3.1).

The paper's program is that of one replica, with all-reduces in it. Ours is that of one
giant device, where the same question reads: which values does no data axis split, and
are they made from such values, from constants and from reductions over the data axes
alone? In a manual region, where devices have different values, the paper's rules hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.mlir import ir

from meshwright.framework.compiler.sharding_types.combine import HALO
from meshwright.framework.compiler.sharding_types.op_dims import op_dims
from meshwright.framework.compiler.stablehlo.dataflow.carried import (
    Carried,
    ForwardAnalysis,
)
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    INTO_MANUAL,
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

    alike: Mapping[ir.Value, frozenset[str]]
    reduced: Mapping[ir.Value, frozenset[str]]
    updates: set[ir.Value]
    added: set[ir.Operation]
    rules: OpRules


def analyze(completed: CompletedModule, data_axes: Sequence[str]) -> Redundancy:
    """Finds what is redundant along `data_axes`, through loops to a fixed point."""
    analysis = _Analysis(completed, frozenset(data_axes))
    block = completed.main.regions[0].blocks[0]
    for argument in block.arguments:
        analysis.facts[argument] = _Fact(analysis.unsplit(argument), False)
    analysis.visit(block)
    facts, reduced = analysis.facts, analysis.reduced
    return Redundancy(
        {value: fact.alike for value, fact in facts.items()},
        reduced,
        {value for value, fact in facts.items() if fact.updates},
        added_sums(completed, reduced, walk(completed.main)),
        completed.rules,
    )


class _Fact(NamedTuple):
    """What follows of a value: see `Redundancy`."""

    alike: frozenset[str]
    updates: bool


class _Analysis(ForwardAnalysis):
    def __init__(self, completed: CompletedModule, data_axes: frozenset[str]):
        super().__init__()
        self.completed = completed
        self.data_axes = data_axes
        self.reduced: dict[ir.Value, frozenset[str]] = {}

    def unsplit(self, value: ir.Value) -> frozenset[str]:
        return self.data_axes - self.completed.axes(value)

    def alike(self, op) -> frozenset[str]:
        """The data axes along which all replicas have the same operands."""
        return self.data_axes.intersection(*(self.facts[v].alike for v in op.operands))

    def carried(self, tie: Carried, first: _Fact, made: _Fact | None) -> _Fact:
        alike = first.alike & self.unsplit(tie.result)
        if made is not None:
            # Replicas whose loops run differently share no value.
            alike &= made.alike & self.facts[tie.predicate].alike
        return first._replace(alike=alike)

    def after_loop(self, tie: Carried, carried: _Fact, made: _Fact) -> _Fact:
        return carried._replace(updates=made.updates)

    def after_branches(self, tie: Carried, given: Sequence[_Fact]) -> _Fact:
        chooses = self.facts[tie.predicate].alike
        alike = chooses.intersection(*(fact.alike for fact in given))
        updates = any(fact.updates for fact in given)
        return _Fact(alike & self.unsplit(tie.result), updates)

    def plain(self, op) -> None:
        alike = self.alike(op)
        gained = self.gained(op)
        if op.name in _NEVER_ALIKE or has_side_effect(op):
            alike = frozenset()
        for result in op.results:
            free = self.unsplit(result)
            self.reduced.pop(result, None)
            if gained & free:
                self.reduced[result] = gained & free
            updates = any(self.facts[value].updates for value in op.operands)
            self.facts[result] = _Fact(
                free & ((alike - self.own_axes(op)) | gained),
                updates or bool(gained & free),
            )

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
        differs = [v for v in op.operands if self.data_axes - self.facts[v].alike]
        if not differs:
            return frozenset()
        summed = [
            (self.facts[value].alike | self.summed(op, value)) & self.data_axes
            for value in differs
        ]
        return self.data_axes.intersection(*summed) - self.alike(op)

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
