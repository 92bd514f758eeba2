"""How a scatter of few rows into a split table may lie so that no table moves.

Where indices and updates are split too, XLA's partitioner lets each device scatter its
updates, and adds up shards of the table over devices (jaxlib 0.10.2). Where they are
whole along what goes over the indices, each device writes the rows that it has of all
updates: these are gathered, and nothing else moves.
"""

from __future__ import annotations

import dataclasses
import math

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.hlo_text import itemsize
from meshwright.framework.compiler.stable_hlo import dtype_of, shape_of, sharding_call
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

Dims = tuple[tuple[str, ...], ...]
_NUMBERS = "scatter_dimension_numbers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scatter:
    """A scatter into one operand.

    Args:
      operand, indices, updates: shapes.
      index_bytes, element_bytes: of an index's coordinate, of an element.
      scattered: the operand's dims that indices are of.
      window: for each dim of the updates the operand's that it goes over; None for
        those that go over the indices.
    """

    operand: tuple[int, ...]
    indices: tuple[int, ...]
    updates: tuple[int, ...]
    index_bytes: int
    element_bytes: int
    scattered: tuple[int, ...]
    window: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatterLayout:
    """The axes that are to split a scatter's tensors; the result lies as the operand.

    Args:
      operand, indices, updates: for each dim.
      bytes: of what each device gathers for it.
    """

    operand: Dims
    indices: Dims
    updates: Dims
    bytes: int


def scatter_of(op) -> Scatter | None:
    """What a `stablehlo.scatter` says; None of several operands or in batches."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes[_NUMBERS])
    if len(op.operands) != 3 or list(numbers.input_batching_dims):
        return None
    operand, indices, updates = op.operands
    written = set(numbers.inserted_window_dims)
    left = [dim for dim in range(len(shape_of(operand))) if dim not in written]
    window: list[int | None] = [None] * len(shape_of(updates))
    for dim, into in zip(sorted(numbers.update_window_dims), left, strict=True):
        window[dim] = into
    return Scatter(
        operand=shape_of(operand),
        indices=shape_of(indices),
        updates=shape_of(updates),
        index_bytes=itemsize(dtype_of(indices)),
        element_bytes=itemsize(dtype_of(operand)),
        scattered=tuple(numbers.scattered_dims_to_operand_dims),
        window=tuple(window),
    )


def scatter_layout(
    scatter: Scatter, indices: Sharding, updates: Sharding, result: Sharding
) -> ScatterLayout | None:
    """A layout in which no part of the table moves; None if there is none to give.

    There is none where no axis splits the dims that indices are of, where indices and
    updates lie so already, or where updates are more than what XLA would add up.
    """
    if not any(result.dims[dim] for dim in scatter.scattered):
        return None
    rows: Dims = tuple(
        result.dims[into] if into is not None and size == scatter.operand[into] else ()
        for size, into in zip(scatter.updates, scatter.window, strict=True)
    )
    over = [updates.dims[dim] for dim, to in enumerate(scatter.window) if to is None]
    if not any((*over, *indices.dims)):
        return None
    part = Sharding(result.mesh, rows).shard_shape(scatter.updates)
    size = math.prod(part) * scatter.element_bytes
    size += math.prod(scatter.indices) * scatter.index_bytes
    table = math.prod(result.shard_shape(scatter.operand)) * scatter.element_bytes
    if size > 2 * table:  # A ring adds up in two rounds.
        return None
    return ScatterLayout(
        operand=result.dims,
        indices=((),) * len(scatter.indices),
        updates=rows,
        bytes=size,
    )


def lay_out_scatter(op, mesh: DeviceMesh, layout: ScatterLayout) -> None:
    """Annotates a scatter's operands and its result, as TF programs do."""
    operands = (layout.operand, layout.indices, layout.updates)
    with ir.InsertionPoint(op), op.location:
        for number, dims in enumerate(operands):
            op.operands[number] = _annotated(op.operands[number], mesh, dims)
    result = op.results[0]
    with ir.InsertionPoint.after(op), op.location:
        annotated = _annotated(result, mesh, layout.operand)
    result.replace_all_uses_except(annotated, annotated.owner.operation)


def _annotated(value: ir.Value, mesh: DeviceMesh, dims: Dims) -> ir.Value:
    return sharding_call("Sharding", value, value.type, Sharding(mesh, dims).to_hlo())
