"""Which ops sum over mesh axes, so that each device can have a part of the sum."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Protocol

from jax.extend.mlir import ir

from meshwright.framework.compiler.sharding_types.linear import choices, is_zero
from meshwright.framework.compiler.sharding_types.op_dims import op_dims
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

_SUMS = (
    "stablehlo.convolution",
    "stablehlo.dot",
    "stablehlo.dot_general",
    "stablehlo.reduce",
    "stablehlo.scatter",
)
DimAxes = list[tuple[str, ...]]
"""For each dim of a tensor the manual axes that split it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Summed:
    """A sum, from the op that computes it on.

    Args:
      op: that op.
      dims: the dims of its operands; None for operands that are made of constants.
      axes: the mesh axes that it sums over.
    """

    op: ir.Operation
    dims: Sequence[DimAxes | None]
    axes: tuple[str, ...]


class HasShardings(Protocol):
    """The shardings of the tensors of a module, and the rules of its ops."""

    mesh: DeviceMesh
    rules: OpRules

    def sharding(self, value: ir.Value) -> Sharding:
        """The sharding of a value on the mesh."""


def sum_of(
    completed: HasShardings, op: ir.Operation, axes: Collection[str]
) -> Summed | None:
    """How an op sums over these mesh axes; None unless it is known to, evenly."""
    ordered = tuple(a for a in completed.mesh.axis_names if a in axes)
    if op.name not in _SUMS or not choices(op):
        return None
    if op.name == "stablehlo.scatter" and not is_zero(op.operands[0]):
        return None
    if op.name == "stablehlo.convolution":
        dims = [completed.sharding(v).dims for v in (*op.operands, *op.results)]
        splitting = {axis for of_value in dims for split in of_value for axis in split}
        if splitting - {*axes}:
            return None  # Along other axes it may need a layout of its own.
    rule = op_dims(op, completed.rules)
    summed = set(rule.all_combined()) - {*rule.kinds}
    by_label: dict[int, tuple[str, ...]] = {}
    for value, labels in zip(op.operands, rule.operands, strict=True):
        for label, split in zip(labels, completed.sharding(value).dims, strict=True):
            among = tuple(axis for axis in split if axis in axes)
            if not among:
                continue
            if label not in summed or by_label.setdefault(label, among) != among:
                return None
    if {axis for split in by_label.values() for axis in split} != {*axes}:
        return None
    dims = [
        None if is_zero(value) else [by_label.get(label, ()) for label in labels]
        for value, labels in zip(op.operands, rule.operands, strict=True)
    ]
    if all(map(functools.partial(_is_even, completed.mesh), op.operands, dims)):
        return Summed(op, dims, ordered)
    return None


def _is_even(mesh: DeviceMesh, value: ir.Value, dims: DimAxes | None) -> bool:
    sizes = zip(shape_of(value), dims, strict=True) if dims else ()
    return all(size % mesh.axes_size(axes) == 0 for size, axes in sizes)
