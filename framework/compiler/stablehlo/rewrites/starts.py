"""Starts of slices that the program computes, kept in range before XLA partitions them.

By definition a start out of range is clamped to the range. Along a split dim XLA's
partitioner ignores that: it writes an update nowhere, and reads other elements for each
shard. So does XLA where it merges two slices, or updates: it adds their starts up and
clamps the sum. The second may be the partitioner's (jaxlib 0.10.2).
"""

from __future__ import annotations

import dataclasses

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.dataflow.known_values import KnownValues
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    call_target,
    shape_of,
    zeros,
)
from meshwright.framework.sharding.sharding import Sharding

DYNAMIC_SLICE = "stablehlo.dynamic_slice"
DYNAMIC_UPDATE_SLICE = "stablehlo.dynamic_update_slice"
_CLAMP = "stablehlo.clamp"
_MARKS = "Sharding", "SPMDFullToShardShape"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clamped:
    """A slice whose starts are clamped; its tensors keep their shardings.

    Args:
      shardings: the shardings of its operands and its result, None where unknown.
    """

    shardings: tuple[Sharding | None, ...]


def unclamped_dims(op) -> list[int]:
    """The dims along which a slice, or its update, may start out of range.

    Dims that are taken entirely are left out: each shard clamps these correctly.
    """
    values, lasts = KnownValues(), _lasts(op)
    starts = list(op.operands)[-len(lasts) :] if lasts else []
    return [
        dim
        for dim, (start, last) in enumerate(zip(starts, lasts, strict=True))
        if last and not _is_in_range(start, last, values)
    ]


def merging_dims(op) -> list[int]:
    """The dims along which XLA may merge a slice, or update, with another.

    Dims of which it takes a single element are left out, unless it slices a slice:
    nothing is left to slice. Loops read and write a step's elements so.
    """
    part = shape_of(op.results[0] if op.name == DYNAMIC_SLICE else op.operands[1])
    again = op.name == DYNAMIC_SLICE and _is_of_a_slice(op.operands[0])
    return [dim for dim, size in enumerate(part) if again or size > 1]


def clamp_starts(op) -> None:
    """Clamps the starts of a slice or an update that may be out of range."""
    lasts = _lasts(op)
    for dim in unclamped_dims(op):
        number = len(op.operands) - len(lasts) + dim
        start = op.operands[number]
        with ir.InsertionPoint(op), op.location:
            low, high = zeros(start.type), _scalar(lasts[dim], start.type)
            op.operands[number] = stablehlo.clamp(low, start, high)


def _is_of_a_slice(value: ir.Value) -> bool:
    """Whether a value is a slice, up to annotations, reshapes and the like."""
    maker = value.owner
    while not isinstance(maker, ir.Block) and len(maker.operands) == 1:
        maker = maker.operands[0].owner
    return not isinstance(maker, ir.Block) and maker.name == DYNAMIC_SLICE


def _lasts(op) -> list[int]:
    """The last starts that are in range."""
    part = op.results[0] if op.name == DYNAMIC_SLICE else op.operands[1]
    sizes = zip(shape_of(op.operands[0]), shape_of(part), strict=True)
    return [size - taken for size, taken in sizes]


def _is_in_range(start: ir.Value, last: int, values: KnownValues) -> bool:
    start = _unmarked(start)
    if (known := values.of(start)) is not None:
        return 0 <= int(known) <= last
    maker = start.owner
    if isinstance(maker, ir.Block) or maker.name != _CLAMP:
        return False
    low, high = (values.of(_unmarked(maker.operands[number])) for number in (0, 2))
    if low is None or high is None:
        return False
    return 0 <= int(low) <= int(high) <= last


def _unmarked(value: ir.Value) -> ir.Value:
    """A scalar without the marks that it has in GSPMD's manual regions."""
    while not isinstance(value.owner, ir.Block) and call_target(value.owner) in _MARKS:
        value = value.owner.operands[0]
    return value


def _scalar(value: int, type_: ir.Type) -> ir.Value:
    element = ir.RankedTensorType(type_).element_type
    attribute = ir.IntegerAttr.get(element, value)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, attribute))
