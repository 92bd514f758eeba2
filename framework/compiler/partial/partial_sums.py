"""The partial sum of each device, before the partial sums are added up.

An op that sums over a dim which mesh axes split is put into a region that is manual
along them: there it sums up a device's own part, and the ops that follow decide when
and how the parts are added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.partial.linear import is_zero
from meshwright.framework.compiler.repair.convolutions.conv_rewrite import (
    convolution_of,
)
from meshwright.framework.compiler.stablehlo.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    INTO_MANUAL,
    adds,
    border_config,
    dot_dims,
    placeholder_call,
    reduced_dims,
    shape_of,
    tensor_type,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import mesh_text
from meshwright.framework.sharding.sharding import Sharding

DimAxes = list[tuple[str, ...]]
"""For each dim of a tensor the manual axes that split it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Summed:
    """A sum, from the op that computes it on.

    Args:
      op: that op.
      dims: the dims of its operands; None for operands that are made of constants.
      axes: the mesh axes that it sums over.
      after: ops of one operand that follow it, in order.
    """

    op: ir.Operation
    dims: Sequence[DimAxes | None]
    axes: tuple[str, ...]
    after: Sequence[ir.Operation] = ()


class HasShardings(Protocol):
    """The shardings of the tensors of a module."""

    mesh: DeviceMesh

    def sharding(self, value: ir.Value) -> Sharding:
        """The sharding of a value on the mesh."""


def sum_of(
    completed: HasShardings, op: ir.Operation, axes: Collection[str]
) -> Summed | None:
    """How an op sums over these mesh axes; None unless it is known to, evenly."""
    ordered = tuple(a for a in completed.mesh.axis_names if a in axes)
    rule = _RULES.get(op.name)
    dims = rule and rule(op, _Operands(completed, op, frozenset(axes)))
    return Summed(op, dims, ordered) if dims else None


def local_sum(completed: CompletedModule, summed: Summed) -> ir.Value:
    """Each device's partial sum, in the manual region; at the insertion point."""
    mesh, op = completed.mesh, summed.op
    copy = op.clone(ir.InsertionPoint.current)
    with ir.InsertionPoint(copy):
        for number, dims in enumerate(summed.dims):
            if dims is not None:
                operand = op.operands[number]
                sizes = [
                    size // mesh.axes_size(axes)
                    for size, axes in zip(shape_of(operand), dims, strict=True)
                ]
                copy.operands[number] = placeholder_call(
                    INTO_MANUAL,
                    operand,
                    tensor_type(operand.type, sizes),
                    border_config(mesh, summed.axes, dims),
                )
    local = copy.results[0]
    if op.name == "stablehlo.reduce" and _sums_one(copy):
        reshaped = stablehlo.reshape(local.type, copy.operands[0])
        copy.erase()
        local = reshaped
    for following in summed.after:
        copy = following.clone(ir.InsertionPoint.current)
        copy.operands[0] = local
        local = copy.results[0]
    return local


def _sums_one(op) -> bool:
    """Whether a reduction is over dims of size 1, as where parts are added up."""
    return all(shape_of(op.operands[0])[dim] == 1 for dim in reduced_dims(op))


class _Operands:
    """The axes of a region that split an op's operands."""

    def __init__(self, completed: HasShardings, op, axes: frozenset[str]):
        self.completed = completed
        self.op = op
        self.manual = axes

    def dims(self, number: int) -> DimAxes:
        value = self.op.operands[number]
        sharding = self.completed.sharding(value)
        return [
            tuple(axis for axis in axes if axis in self.manual)
            for axes in sharding.dims
        ]

    def even(self, dims: Sequence[DimAxes | None]) -> Sequence[DimAxes | None] | None:
        """`dims`, if their axes divide all of them."""
        for number, dim_axes in enumerate(dims):
            sizes = shape_of(self.op.operands[number])
            for size, axes in zip(sizes, dim_axes or [()] * len(sizes), strict=True):
                if size % self.completed.mesh.axes_size(axes):
                    return None
        return dims


def _of_dot(op, operands: _Operands):
    _, (left, right) = dot_dims(op, len(shape_of(op.operands[0])))
    lhs, rhs = operands.dims(0), operands.dims(1)
    summed = []
    for i, j in zip(left, right, strict=True):
        if lhs[i] and rhs[j] and lhs[i] != rhs[j]:
            return None
        lhs[i] = rhs[j] = lhs[i] or rhs[j]
        summed += lhs[i]
    kept = [a for d, axes in enumerate(lhs) if d not in left for a in axes]
    kept += [a for d, axes in enumerate(rhs) if d not in right for a in axes]
    if kept or set(summed) != operands.manual:
        return None
    return operands.even([lhs, rhs])


def _of_convolution(op, operands: _Operands):
    mesh = operands.completed.mesh
    others = [a for a in mesh.axis_names if a not in operands.manual]
    what = convolution_of(op)
    if mesh.axes_size(others) > 1 or what.feature_groups > 1 or what.batch_groups > 1:
        return None  # Along other axes it may need a layout of its own.
    lhs, rhs = operands.dims(0), operands.dims(1)
    i, j = what.lhs_feature, what.rhs_in
    axes = lhs[i] or rhs[j]
    expected = [
        [axes if dim == place else () for dim in range(len(dims))]
        for dims, place in ((lhs, i), (rhs, j))
    ]
    lhs[i] = rhs[j] = axes
    if [lhs, rhs] != expected or set(axes) != operands.manual:
        return None
    return operands.even([lhs, rhs])


def _of_reduce(op, operands: _Operands):
    if len(op.results) != 1 or not adds(op):
        return None
    dims = operands.dims(0)
    summed = [axis for dim in reduced_dims(op) for axis in dims[dim]]
    kept = [axis for axes in dims for axis in axes if axis not in summed]
    if kept or set(summed) != operands.manual or not is_zero(op.operands[1]):
        return None
    return operands.even([dims, None])


def _of_scatter(op, operands: _Operands):
    numbers = stablehlo.ScatterDimensionNumbers(
        op.attributes["scatter_dimension_numbers"]
    )
    if len(op.operands) != 3 or not adds(op) or not is_zero(op.operands[0]):
        return None
    if list(numbers.input_batching_dims):
        return None  # Axes that split these split the result, too.
    indices, updates = operands.dims(1), operands.dims(2)
    window = list(numbers.update_window_dims)
    rows = [axes for dim, axes in enumerate(updates) if dim not in window]
    vector = numbers.index_vector_dim
    places = [axes for dim, axes in enumerate(indices) if dim != vector]
    inside = [axis for dim in window for axis in updates[dim]]
    summed = {axis for axes in rows for axis in axes}
    if inside or rows != places or summed != operands.manual:
        return None
    return operands.even([None, indices, updates])


def scattered_along(
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


_RULES = {
    "stablehlo.dot_general": _of_dot,
    "stablehlo.dot": _of_dot,
    "stablehlo.convolution": _of_convolution,
    "stablehlo.reduce": _of_reduce,
    "stablehlo.scatter": _of_scatter,
}
