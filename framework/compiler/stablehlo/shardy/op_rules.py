"""Shardy's rules of ops: which dims of operands and results are split together.

Shardy describes each op by factors. `x @ y` has three: the rows of x, the columns of y,
and the dim that is summed over.
"""

from __future__ import annotations

import dataclasses
import enum

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of, walk

_RULE = "sdy.sharding_rule"
_PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"

Factors = tuple[int | None, ...]
"""For each dim of a tensor its factor; None for a dim of several factors or none."""


class FactorKind(enum.Enum):
    """What splitting a factor means for the operation."""

    PARALLEL = enum.auto()  # Each device computes its part of the results.
    REDUCED = enum.auto()  # Each device computes a part of a sum.
    PERMUTATION = enum.auto()  # Each device needs rows of its neighbours.
    NEED_REPLICATION = enum.auto()  # Each device needs the full dim, as a sort does.


@dataclasses.dataclass(frozen=True)
class OpFactors:
    """The factors of an op's tensors.

    Args:
      operands: the factors of each operand.
      results: the factors of each result.
      kinds: the kinds of the factors, by number.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    kinds: tuple[FactorKind, ...]


def add_rules(module: ir.Operation) -> None:
    """Gives each op that Shardy has a rule for that rule as an attribute."""
    PassManager.parse(_PASS).run(module)


def rule_of(op: ir.Operation) -> OpFactors:
    """The factors of an op by its attribute; without a rule it has none."""
    if _RULE not in op.attributes:
        values = (op.operands, op.results)
        none = (tuple((None,) * len(shape_of(v)) for v in of) for of in values)
        return OpFactors(*none, ())
    rule = sdy.OpShardingRuleAttr(op.attributes[_RULE])
    kinds = [FactorKind.PARALLEL] * len(rule.factor_sizes)
    for kind, factors in (
        (FactorKind.REDUCED, rule.reduction_factors),
        (FactorKind.PERMUTATION, rule.permutation_factors),
        (FactorKind.NEED_REPLICATION, rule.need_replication_factors),
    ):
        for factor in factors:
            kinds[factor] = kind
    return OpFactors(
        tuple(map(_factors, rule.operand_mappings)),
        tuple(map(_factors, rule.result_mappings)),
        tuple(kinds),
    )


def _factors(mapping) -> Factors:
    listed = (
        list(sdy.DimMappingAttr(dim).factor_indices)
        for dim in sdy.TensorMappingAttr(mapping).dim_mappings
    )
    return tuple(indices[0] if len(indices) == 1 else None for indices in listed)


class OpRules:
    """The rules of the ops that a module has, which stays without the attributes.

    Ops without a rule, and those that are written later, have no factors.
    """

    def __init__(self, module: ir.Operation):
        self._copy = module.clone()  # Its ops end with it.
        add_rules(self._copy)
        # By their results: an op's hash is of its operands, which passes change.
        self._copies: dict[ir.Value, ir.Operation] = {}
        for op, copied in zip(walk(module), walk(self._copy), strict=True):
            self._copies.update(dict.fromkeys(op.results, copied))
        self._known: dict[ir.Value, OpFactors] = {}

    def of(self, op: ir.Operation) -> OpFactors:
        """The factors of an op."""
        if not len(op.results):
            return rule_of(op)
        value = op.results[0]
        if value not in self._known:
            self._known[value] = rule_of(self._copies.get(value, op))
        return self._known[value]
