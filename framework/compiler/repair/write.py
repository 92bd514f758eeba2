"""Writes the layout that was chosen for an operation into a program's module.

The module is still for either partitioner: annotations are as TF programs carry them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.repair.op_layout import EvenLayout
from meshwright.framework.compiler.repair.table.patterns import (
    SCATTER,
)
from meshwright.framework.compiler.stablehlo.constraints import (
    sdy_attribute,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    after,
    cut_end,
    element_type,
    is_annotation,
    location_of,
    pad_end,
    requested_sharding,
    shape_of,
    tensor_type,
    with_sharding,
    zeros,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


def lay_out_evenly(op, layout: EvenLayout) -> None:
    """Annotates an operation's operands and results, and pads them as required."""
    count = len(op.operands)
    with ir.InsertionPoint(op), op.location:
        operands = [
            annotated(_padded(op, number, shape), sharding)
            for number, (shape, sharding) in enumerate(
                zip(layout.shapes[:count], layout.shardings[:count], strict=True)
            )
        ]
        new = op.clone()
        for number, value in enumerate(operands):
            new.operands[number] = value
        for old, result, shape, sharding in zip(
            op.results,
            new.results,
            layout.shapes[count:],
            layout.shardings[count:],
            strict=True,
        ):
            result.set_type(tensor_type(result.type, shape))
            given = annotated(result, sharding)
            old.replace_all_uses_with(cut_end(given, shape_of(old)))
    op.erase()


class Pin:
    """Keeps the layouts that operations had when examined, for Shardy.

    A layout is kept by a constraint, which is an operation of its own and hinders XLA:
    of a Transformer's step, 12% of the estimated time. The attribute `sdy.sharding` of
    an operation costs nothing and does nothing: before it propagates, jaxlib 0.10.2
    drops it on all operations but custom calls.

    Args:
      mesh: the program's mesh.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.attributes: dict[Sharding, ir.Attribute] = {}
        # Shared by all readers: XLA would reshard for each a value pinned for each.
        self.pinned: dict[tuple[ir.Value, Sharding], ir.Value] = {}

    def __call__(self, op, shardings: Sequence[Sharding | None]) -> None:
        """Pins operands and results; tensors over another mesh are left alone."""
        count = len(op.operands)
        for number, sharding in enumerate(shardings[:count]):
            op.operands[number] = self._pinned(op.operands[number], sharding)
        for result, sharding in zip(op.results, shardings[count:], strict=True):
            pinned = self._pinned(result, sharding)
            if pinned != result:
                result.replace_all_uses_except(pinned, pinned.owner.operation)

    def _pinned(self, value: ir.Value, sharding: Sharding | None) -> ir.Value:
        if sharding is None or not sharding.rank or self._is_requested(value, sharding):
            return value
        if (value, sharding) not in self.pinned:
            attribute = self._attribute(sharding)
            with after(value), location_of(value):
                pinned = sdy.ShardingConstraintOp(value, attribute).result
            self.pinned[value, sharding] = self.pinned[pinned, sharding] = pinned
        return self.pinned[value, sharding]

    def _attribute(self, sharding: Sharding) -> ir.Attribute:
        if sharding not in self.attributes:
            outside = dataclasses.replace(sharding, manual=())
            self.attributes[sharding] = sdy_attribute(outside, self.mesh)
        return self.attributes[sharding]

    def _is_requested(self, value: ir.Value, sharding: Sharding) -> bool:
        """Whether the program annotates a value with this sharding."""
        maker = value.owner
        if isinstance(maker, ir.Block) or not is_annotation(maker):
            return False
        try:
            annotation = requested_sharding(maker, self.mesh)
        except ValueError:  # It is over other devices, and refused later by name.
            return False
        return annotation == dataclasses.replace(sharding, manual=())


def annotated(value: ir.Value, sharding: Sharding) -> ir.Value:
    """A value with an annotation, at the current insertion point."""
    if not sharding.rank:
        return value
    # As in regions' annotations.
    return with_sharding(value, dataclasses.replace(sharding, manual=()))


def _padded(op, number: int, shape: tuple[int, ...]) -> ir.Value:
    value = op.operands[number]
    if shape_of(value) == shape:
        return value
    return pad_end(value, shape, _filler(op, number))


def _filler(op, number: int) -> ir.Value:
    """Zero; for a scatter's indices, an index out of bounds, which writes nothing."""
    element = element_type(op.operands[number])
    scalar = ir.RankedTensorType.get([], element)
    if op.name != SCATTER or number != len(op.results):
        return zeros(scalar)
    last = 2 ** (element.width - (not element.is_unsigned)) - 1
    attribute = ir.IntegerAttr.get(element, last)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, attribute))
