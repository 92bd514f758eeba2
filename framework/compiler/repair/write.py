"""Writes the layout that was chosen for an operation into a program's module.

The module is still for either partitioner: annotations are as TF programs carry them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.repair.inspection import number_of
from meshwright.framework.compiler.repair.op_layout import EvenLayout
from meshwright.framework.compiler.repair.table.patterns import (
    RESHAPE,
    SCATTER,
    TRANSPOSE,
    reshaped,
)
from meshwright.framework.compiler.stablehlo.constraints import (
    SHARDING_ATTRIBUTE,
    sdy_attribute,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    after,
    element_type,
    is_annotation,
    location_of,
    requested_sharding,
    shape_of,
    sharding_call,
    tensor_type,
    zeros,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

_NOT_PLAIN = (*BRANCHES, WHILE, "stablehlo.custom_call")


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
            old.replace_all_uses_with(_cut(given, shape_of(old)))
    op.erase()


class Pin:
    """Keeps the layouts that operations had when examined, for Shardy.

    Where it can, a layout is an attribute of the operation that makes the tensor. A
    constraint is an operation in between, and cost a Transformer's loops over stacked
    layers 12% of their estimated time.

    Args:
      mesh: the program's mesh.
      moved: numbers of operations that are laid out differently. The attribute would
        stay with the operation, which then makes another tensor.
    """

    def __init__(self, mesh: DeviceMesh, moved: Collection[int]):
        self.mesh, self.moved = mesh, moved
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
            pinned = self._pin(value, self._attribute(sharding))
            self.pinned[value, sharding] = self.pinned[pinned, sharding] = pinned
        return self.pinned[value, sharding]

    def _pin(self, value: ir.Value, attribute: ir.Attribute) -> ir.Value:
        if self._takes_attribute(value.owner):
            of_results = sdy.TensorShardingPerValueAttr.get([attribute])
            value.owner.attributes[SHARDING_ATTRIBUTE] = of_results
            return value
        with after(value), location_of(value):
            return sdy.ShardingConstraintOp(value, attribute).result

    def _attribute(self, sharding: Sharding) -> ir.Attribute:
        if sharding not in self.attributes:
            outside = dataclasses.replace(sharding, manual=())
            self.attributes[sharding] = sdy_attribute(outside, self.mesh)
        return self.attributes[sharding]

    def _takes_attribute(self, maker) -> bool:
        """Whether a maker is a plain operation with a single result, not pinned yet."""
        if isinstance(maker, ir.Block) or len(maker.results) != 1:
            return False
        if not maker.name.startswith("stablehlo.") or maker.name in _NOT_PLAIN:
            return False
        if _is_in_chain(maker):
            return False
        return (
            SHARDING_ATTRIBUTE not in maker.attributes
            and number_of(maker) not in self.moved
        )

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


def _is_in_chain(op) -> bool:
    """Whether XLA may merge an op with another; a constraint keeps them apart.

    Two transposes may be none. XLA then gives the attribute of the last to what made
    the operand of the first, and refuses it where that has several results.
    """
    if op.name not in (RESHAPE, TRANSPOSE):
        return False
    if op.name in [use.owner.operation.name for use in op.results[0].uses]:
        return True
    if op.name == RESHAPE:
        return reshaped(op) != op.operands[0]
    maker = op.operands[0].owner
    return not isinstance(maker, ir.Block) and maker.name == op.name


def annotated(value: ir.Value, sharding: Sharding) -> ir.Value:
    """A value with an annotation, at the current insertion point."""
    if not sharding.rank:
        return value
    outside = dataclasses.replace(sharding, manual=())  # As in regions' annotations.
    return sharding_call("Sharding", value, value.type, outside.to_hlo())


def _padded(op, number: int, shape: tuple[int, ...]) -> ir.Value:
    value = op.operands[number]
    if shape_of(value) == shape:
        return value
    high = [new - old for new, old in zip(shape, shape_of(value), strict=True)]
    none = ir.DenseI64ArrayAttr.get([0] * len(high))
    filler = _filler(op, number)
    return stablehlo.pad(value, filler, none, ir.DenseI64ArrayAttr.get(high), none)


def _filler(op, number: int) -> ir.Value:
    """Zero; for a scatter's indices, an index out of bounds, which writes nothing."""
    element = element_type(op.operands[number])
    scalar = ir.RankedTensorType.get([], element)
    if op.name != SCATTER or number != len(op.results):
        return zeros(scalar)
    last = 2 ** (element.width - (not element.is_unsigned)) - 1
    attribute = ir.IntegerAttr.get(element, last)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, attribute))


def _cut(value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    if shape_of(value) == shape:
        return value
    starts, steps = [0] * len(shape), [1] * len(shape)
    arrays = map(ir.DenseI64ArrayAttr.get, (starts, shape, steps))
    return stablehlo.slice(value, *arrays)
