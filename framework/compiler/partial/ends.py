"""Conversions between types of tensors, at which partial sums begin and end.

A partial sum has a leading dim for each axis that it is unreduced along; see
`linear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    into_manual,
    out_of_manual,
    placeholder_call,
    shape_of,
    tensor_type,
    with_sharding,
    zeros,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import mesh_text
from meshwright.framework.sharding.sharding import Sharding

Axes = tuple[str, ...]


def convert_parts(value: ir.Value, before: Sharding, after: Sharding) -> ir.Value:
    """A tensor converted from one type to another, at the current insertion point.

    Args:
      value: the tensor, with a leading dim for each unreduced axis of `before`.
      before, after: the types.

    Returns:
      The tensor with a leading dim for each unreduced axis of `after`, annotated.
    """
    ends = tuple(axis for axis in before.unreduced if axis not in after.unreduced)
    begins = tuple(axis for axis in after.unreduced if axis not in before.unreduced)
    kept = tuple(axis for axis in before.unreduced if axis not in ends)
    if ends:
        scattered = _scattered_dim(value, before, after, ends)
        if scattered is not None:
            value = scatter(value, before, after, scattered, kept)
        else:
            value = add_up(value, after.mesh, before.unreduced, ends)
    if begins:
        value = _masked(value, kept, begins, after)
    leading = tuple((axis,) for axis in after.unreduced)
    return with_sharding(value, Sharding(after.mesh, (*leading, *after.dims)))


def with_leading(
    value: ir.Value, mesh: DeviceMesh, leading: Sequence[Axes]
) -> ir.Value:
    """A tensor with its leading dims annotated; other dims are left to propagation."""
    dims = range(len(leading), len(shape_of(value)))
    sharding = Sharding(mesh, (*leading, *[()] * len(dims)))
    used = [axis for axes in leading for axis in axes]
    return with_sharding(value, sharding.opened(tuple(dims), but=used))


def add_up(value: ir.Value, mesh: DeviceMesh, axes: Axes, ends: Axes) -> ir.Value:
    """The sum along some of the axes of a value in parts, at the insertion point.

    Args:
      value: the tensor, with a leading dim for each of `axes`.
      mesh: the program's mesh.
      axes: the axes along which the tensor is unreduced.
      ends: those of them along which it is added up.
    """
    dims = [axes.index(axis) for axis in ends]
    first, count = dims[0], len(dims)
    if count > 1 and dims == list(range(first, first + count)):
        # A single dim that all the axes split is added up by one all-reduce.
        shape = list(shape_of(value))
        shape[first : first + count] = [mesh.axes_size(ends)]
        value = stablehlo.reshape(tensor_type(value.type, shape), value)
        leading = [(axis,) for axis in axes]
        leading[first : first + count] = [ends]
        value = with_leading(value, mesh, leading)
        dims = [first]
    return _sum_over(value, dims)


def _sum_over(value: ir.Value, dims: Sequence[int]) -> ir.Value:
    shape = [size for dim, size in enumerate(shape_of(value)) if dim not in dims]
    scalar = tensor_type(value.type, ())
    op = stablehlo.ReduceOp(
        [tensor_type(value.type, shape)],
        [value],
        [zeros(scalar)],
        ir.DenseI64ArrayAttr.get(list(dims)),
    )
    block = op.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.add(*block.arguments)])
    return op.results[0]


def _scattered_dim(value, before: Sharding, after: Sharding, ends: Axes) -> int | None:
    """The dim along which the sum is scattered; None unless it is single and even."""
    changed = [
        dim
        for dim, (old_axes, new_axes) in enumerate(
            zip(before.dims, after.dims, strict=True)
        )
        if old_axes != new_axes
    ]
    if len(changed) != 1 or before.dims[changed[0]]:
        return None
    (dim,) = changed
    shape = shape_of(value)[len(before.unreduced) :]
    even = before.padded_shape(shape) == after.padded_shape(shape) == shape
    return dim if even and set(after.dims[dim]) == set(ends) else None


def scatter(
    value: ir.Value,
    before: Sharding,
    after: Sharding,
    dim: int,
    kept: Axes,
) -> ir.Value:
    """Adds up by a reduce-scatter along one axis after the other.

    The CPU's compiler would make an all-reduce of a sum and a slice of it. All axes
    that split the tensor are manual here: XLA gathers dims that others split before.

    Args:
      value: the tensor, with a leading dim for each unreduced axis of `before`.
      before, after: its types; shards of both are even.
      dim: the dim that the axes of the sum split after it, and none before.
      kept: the axes, or parts of axes, along which it stays unreduced.

    Returns:
      The tensor with a leading dim for each axis that is left unreduced.
    """
    mesh, axes = after.mesh, before.unreduced
    into = [*[(axis,) for axis in axes], *before.dims]
    out = [*[(axis,) for axis in kept], *after.dims]
    used = mesh.entire(axis for dim_axes in into for axis in dim_axes)
    manual = [axis for axis in mesh.axis_names if axis in used]
    local = into_manual(value, mesh, manual, into)
    # Without leading dims: along its first dim the TPU compiler scatters a tensor.
    part = shape_of(local)[len(axes) :]
    ones = dim if set(part[:dim]) == {1} else 0
    local = stablehlo.reshape(tensor_type(value.type, part[ones:]), local)
    local = _scattered_along(local, mesh, after.dims[dim], dim - ones)
    smaller = [*[1] * (len(kept) + ones), *shape_of(local)]
    local = stablehlo.reshape(tensor_type(value.type, smaller), local)
    return out_of_manual(local, mesh, manual, out)


def _scattered_along(
    local: ir.Value, mesh: DeviceMesh, axes: Sequence[str], dim: int
) -> ir.Value:
    """The sum of the devices' parts, reduce-scattered, in a manual region.

    Scatters along one axis after the other, as rings do; at the insertion point.
    """
    for axis in axes:
        shape = list(shape_of(local))
        shape[dim] //= mesh.axis_size(axis)
        config = {"mesh": mesh_text(mesh), "axes": [axis], "dim": dim}
        type_ = tensor_type(local.type, shape)
        local = placeholder_call("reduce_scatter", local, type_, config)
    return local


def _masked(value: ir.Value, kept: Axes, begins: Axes, after: Sharding) -> ir.Value:
    """A tensor whose sum over new leading dims is itself: zeros but for the first."""
    axes, mesh = after.unreduced, after.mesh
    lead = [mesh.axis_size(axis) for axis in axes]
    shape = shape_of(value)[len(kept) :]
    type_ = tensor_type(value.type, [*lead, *shape])
    kept_dims = [axes.index(axis) for axis in kept]
    dims = [*kept_dims, *range(len(axes), len(axes) + len(shape))]
    wide = stablehlo.broadcast_in_dim(type_, value, ir.DenseI64ArrayAttr.get(dims))
    first = np.zeros(lead, bool)
    first[tuple(0 if axis in begins else slice(None) for axis in axes)] = True
    bit = ir.IntegerType.get_signless(1)
    mask = stablehlo.constant(ir.DenseElementsAttr.get(first, type=bit))
    mask_type = ir.RankedTensorType.get([*lead, *shape], bit)
    leading = ir.DenseI64ArrayAttr.get(list(range(len(axes))))
    mask = stablehlo.broadcast_in_dim(mask_type, mask, leading)
    return stablehlo.select(mask, wide, zeros(type_))
