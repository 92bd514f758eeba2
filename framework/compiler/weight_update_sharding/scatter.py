"""Reduces gradients right onto their shards (weight-update sharding 5.1).

Left to itself XLA all-reduces a gradient and slices the result; the CPU's compiler
leaves it so, a TPU's makes a reduce-scatter of it only where it recognizes one. Here
the op that sums over the batch is put into a region that is manual along the data axes:
each device sums up its own part, and a reduce-scatter follows, one axis after the
other, as rings are. Over axes that do not split the update the shards are then
all-reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.conv_rewrite import convolution_of, shape_of
from meshwright.framework.compiler.stable_hlo import (
    INTO_MANUAL,
    OUT_OF_MANUAL,
    border_config,
    element_type,
    placeholder_call,
    tensor_type,
)
from meshwright.framework.compiler.weight_update_sharding.completed import (
    CompletedModule,
)
from meshwright.framework.compiler.weight_update_sharding.formats import Format
from meshwright.framework.compiler.weight_update_sharding.links import constant_of
from meshwright.framework.compiler.weight_update_sharding.redundancy import (
    reduced_dims,
)
from meshwright.framework.sharding.placeholders import mesh_text

DimAxes = list[tuple[str, ...]]
"""For each dim of a tensor the manual axes that split it."""

_AFTER = ("stablehlo.reshape", "stablehlo.transpose")


@dataclasses.dataclass(frozen=True, eq=False)
class Summed:
    """A gradient, from the op that sums over the batch on.

    Args:
      op: that op.
      dims: of its operands; None for those that are made of constants.
      after: ops of one operand that follow it, in order.
      axes: the mesh axes that it sums over.
    """

    op: ir.Operation
    dims: Sequence[DimAxes | None]
    after: Sequence[ir.Operation]
    axes: tuple[str, ...]


def find_sum(completed: CompletedModule, reduced, value: ir.Value) -> Summed | None:
    """How a value was summed over the batch; None if not by an op that is known here.

    Args:
      completed: the module.
      reduced: by value the axes that its maker sums over.
      value: a gradient.
    """
    after: list[ir.Operation] = []
    while not isinstance(value.owner, ir.Block):
        op = value.owner.operation
        if value in reduced:
            found = frozenset(reduced[value])
            axes = tuple(a for a in completed.mesh.axis_names if a in found)
            rule = _RULES.get(op.name)
            dims = rule and rule(op, _Operands(completed, op, found))
            return Summed(op, dims, after, axes) if dims else None
        if not _keeps_sums(op) or len(list(op.operands[0].uses)) > 1:
            return None
        after.insert(0, op)
        value = op.operands[0]
    return None


def _keeps_sums(op) -> bool:
    """Whether a sum of an op's results is the op's result of the sum."""
    if op.name != "stablehlo.convert":
        return op.name in _AFTER
    before, after = (element_type(value) for value in (op.operands[0], op.results[0]))
    floats = isinstance(before, ir.FloatType) and isinstance(after, ir.FloatType)
    return floats and before.width <= after.width


def reduce_scattered(
    completed: CompletedModule, found: Summed, value: ir.Value, format_: Format
) -> ir.Value | None:
    """The shards of a gradient, at the current insertion point; None if not possible.

    Args:
      completed: the module.
      found: how it was summed up.
      value: the gradient.
      format_: how it is divided.
    """
    mesh, first = completed.mesh, format_.first(value)
    taken = completed.sharding(value).dims[first]
    if taken or not set(format_.axes) <= set(found.axes):
        return None
    shape = format_.shape(value)
    most = format_.sharding(value).padded_shape(shape)[first]
    padded = (*shape[:first], most, *shape[first + 1 :])
    local = _local(completed, found)
    if format_.count > 1:
        local = stablehlo.reshape(tensor_type(value.type, shape), local)
    if padded != shape and not _grow(local, padded):
        local = pad_end(local, padded)
    for axis in format_.axes:
        smaller = list(shape_of(local))
        smaller[first] //= mesh.axis_size(axis)
        config = {"mesh": mesh_text(mesh), "axes": [axis], "dim": first}
        type_ = tensor_type(value.type, smaller)
        local = placeholder_call("reduce_scatter", local, type_, config)
    if left := [axis for axis in found.axes if axis not in format_.axes]:
        config = {"mesh": mesh_text(mesh), "axes": left, "reduction": "add"}
        local = placeholder_call("all_reduce", local, local.type, config)
    split = [format_.axes if dim == first else () for dim in range(len(shape))]
    border = border_config(mesh, found.axes, split)
    whole = placeholder_call(
        OUT_OF_MANUAL, local, tensor_type(value.type, padded), border
    )
    return cut_end(whole, shape)


def _local(completed: CompletedModule, found: Summed) -> ir.Value:
    """What each device has of the sum, in the manual region."""
    mesh, op = completed.mesh, found.op
    copy = op.clone(ir.InsertionPoint.current)
    with ir.InsertionPoint(copy):
        for number, dims in enumerate(found.dims):
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
                    border_config(mesh, found.axes, dims),
                )
    local = copy.results[0]
    for each in found.after:
        copy = each.clone(ir.InsertionPoint.current)
        copy.operands[0] = local
        local = copy.results[0]
    return local


def _grow(local: ir.Value, shape: Sequence[int]) -> bool:
    """Makes a scatter's sum with zeros at its ends, which are not copied then."""
    made = [local.owner.operation]
    while made[-1].name == "stablehlo.convert":
        made.append(made[-1].operands[0].owner.operation)
    if made[-1].name != "stablehlo.scatter":
        return False
    with ir.InsertionPoint(made[-1]):
        made[-1].operands[0] = _zeros(tensor_type(made[-1].results[0].type, shape))
    for op in made:
        op.results[0].set_type(tensor_type(op.results[0].type, shape))
    return True


def cut_end(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """The begin of a tensor's dims, at the current insertion point."""
    if shape_of(value) == tuple(shape):
        return value
    return stablehlo.slice(value, [0] * len(shape), list(shape), [1] * len(shape))


def pad_end(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """A tensor with zeros at the ends of its dims, at the current insertion point."""
    more = [big - small for big, small in zip(shape, shape_of(value), strict=True)]
    if not any(more):
        return value
    none = [0] * len(more)
    return stablehlo.pad(value, _zeros(tensor_type(value.type, ())), none, more, none)


def _zeros(type_: ir.Type) -> ir.Value:
    element = ir.RankedTensorType(type_).element_type
    whole = isinstance(element, ir.IntegerType)
    number = ir.IntegerAttr.get(element, 0) if whole else ir.FloatAttr.get(element, 0.0)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, number))


class _Operands:
    """The axes of a region that split an op's operands."""

    def __init__(self, completed: CompletedModule, op, axes: frozenset[str]):
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
        for number, own in enumerate(dims):
            sizes = shape_of(self.op.operands[number])
            for size, axes in zip(sizes, own or [()] * len(sizes), strict=True):
                if size % self.completed.mesh.axes_size(axes):
                    return None
        return dims


def _of_dot(op, operands: _Operands):
    if op.name == "stablehlo.dot":
        left, right = [len(shape_of(op.operands[0])) - 1], [0]
    else:
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        left = list(numbers.lhs_contracting_dimensions)
        right = list(numbers.rhs_contracting_dimensions)
    one, other = operands.dims(0), operands.dims(1)
    summed = []
    for i, j in zip(left, right, strict=True):
        if one[i] and other[j] and one[i] != other[j]:
            return None
        one[i] = other[j] = one[i] or other[j]
        summed += one[i]
    kept = [a for d, axes in enumerate(one) if d not in left for a in axes]
    kept += [a for d, axes in enumerate(other) if d not in right for a in axes]
    if kept or set(summed) != operands.manual:
        return None
    return operands.even([one, other])


def _of_convolution(op, operands: _Operands):
    mesh = operands.completed.mesh
    others = [a for a in mesh.axis_names if a not in operands.manual]
    what = convolution_of(op)
    if mesh.axes_size(others) > 1 or what.feature_groups > 1 or what.batch_groups > 1:
        return None  # Along other axes it may have to be laid out in its own way.
    one, other = operands.dims(0), operands.dims(1)
    i, j = what.lhs_feature, what.rhs_in
    axes = one[i] or other[j]
    expected = [
        [axes if dim == place else () for dim in range(len(dims))]
        for dims, place in ((one, i), (other, j))
    ]
    one[i] = other[j] = axes
    if [one, other] != expected or set(axes) != operands.manual:
        return None
    return operands.even([one, other])


def _of_reduce(op, operands: _Operands):
    if len(op.results) != 1 or not _adds(op):
        return None
    dims = operands.dims(0)
    summed = [axis for dim in reduced_dims(op) for axis in dims[dim]]
    kept = [axis for axes in dims for axis in axes if axis not in summed]
    if kept or set(summed) != operands.manual or constant_of(op.operands[1]) != 0:
        return None
    return operands.even([dims, None])


def _of_scatter(op, operands: _Operands):
    numbers = stablehlo.ScatterDimensionNumbers(
        op.attributes["scatter_dimension_numbers"]
    )
    if len(op.operands) != 3 or not _adds(op) or not _is_zero(op.operands[0]):
        return None
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


def _adds(op) -> bool:
    names = [inner.operation.name for inner in op.regions[0].blocks[0].operations]
    return names == ["stablehlo.add", "stablehlo.return"]


def _is_zero(value: ir.Value) -> bool:
    while not isinstance(value.owner, ir.Block):
        if value.owner.name == "stablehlo.broadcast_in_dim":
            value = value.owner.operands[0]
        else:
            return constant_of(value) == 0 if not shape_of(value) else False
    return False


_RULES = {
    "stablehlo.dot_general": _of_dot,
    "stablehlo.dot": _of_dot,
    "stablehlo.convolution": _of_convolution,
    "stablehlo.reduce": _of_reduce,
    "stablehlo.scatter": _of_scatter,
}
