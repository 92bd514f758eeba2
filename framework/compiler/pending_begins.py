"""Where pending sums are made: sums over split dims, with a leading dim for each axis.

A product's or a reduction's summed dim becomes two, what the axis splits and the rest,
of which only the rest is summed. That is all for either partitioner. Other sums, and
those over dims that an axis splits in turn with others, are made in a region that is
manual along the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.conv_rewrite import shape_of
from meshwright.framework.compiler.partial_sums import Summed, local_sum
from meshwright.framework.compiler.pending_ends import annotated
from meshwright.framework.compiler.stable_hlo import (
    OUT_OF_MANUAL,
    border_config,
    dot_dims,
    placeholder_call,
    tensor_type,
)
from meshwright.framework.compiler.weight_update_sharding.completed import (
    CompletedModule,
)
from meshwright.framework.compiler.weight_update_sharding.redundancy import (
    reduced_dims,
)
from meshwright.framework.sharding.sharding import Sharding

Axes = tuple[str, ...]


def sum_in_parts(completed: CompletedModule, found: Summed) -> ir.Value:
    """A sum with a leading dim for each axis, at the current insertion point."""
    name = found.op.name
    split = _split(completed, found)
    if split and name in ("stablehlo.dot", "stablehlo.dot_general"):
        return _dot(completed, found, split)
    if split and name == "stablehlo.reduce":
        return _reduce(completed, found, split[0])
    mesh, value = completed.mesh, found.op.results[0]
    lead = [mesh.axis_size(axis) for axis in found.axes]
    shape = shape_of(value)
    local = local_sum(completed, found)
    local = stablehlo.reshape(
        tensor_type(value.type, (*[1] * len(lead), *shape)), local
    )
    dims = [*[(axis,) for axis in found.axes], *[()] * len(shape)]
    return placeholder_call(
        OUT_OF_MANUAL,
        local,
        tensor_type(value.type, (*lead, *shape)),
        border_config(mesh, found.axes, dims),
    )


def _split(completed: CompletedModule, found: Summed) -> list[Mapping[int, Axes]]:
    """For each operand which of its dims the axes split; [] if not before others."""
    split = []
    for number, dims in enumerate(found.dims):
        if dims is None:
            continue
        own = completed.sharding(found.op.operands[number]).dims
        for axes, all_axes in zip(dims, own, strict=True):
            if axes and set(axes) & set(all_axes) and all_axes[: len(axes)] != axes:
                return []
        split.append({dim: axes for dim, axes in enumerate(dims) if axes})
    return split


class _Divided:
    """An operand whose summed dims are divided by the axes that split them."""

    def __init__(self, completed: CompletedModule, value: ir.Value, split, axes: Axes):
        mesh, shape, dims = completed.mesh, [], []
        own = completed.sharding(value).dims
        self.place: dict[int, int] = {}
        leading: dict[str, int] = {}
        for dim, size in enumerate(shape_of(value)):
            by = split.get(dim, ())
            for axis in by:
                leading[axis] = len(shape)
                shape.append(mesh.axis_size(axis))
                dims.append((axis,))
            self.place[dim] = len(shape)
            shape.append(size // mesh.axes_size(by))
            dims.append(tuple(axis for axis in own[dim] if axis not in axes))
        self.leading = [leading[axis] for axis in axes]
        divided = stablehlo.reshape(tensor_type(value.type, shape), value)
        self.value = annotated(divided, Sharding(mesh, tuple(dims)))

    def places(self, dims: Sequence[int]) -> list[int]:
        return [self.place[dim] for dim in dims]


def _dot(completed: CompletedModule, found: Summed, split) -> ir.Value:
    op = found.op
    sides = [
        _Divided(completed, value, dims, found.axes)
        for value, dims in zip(op.operands, split, strict=True)
    ]
    batch, contracting = dot_dims(op, len(shape_of(op.operands[0])))
    batch = [[*s.leading, *s.places(d)] for s, d in zip(sides, batch, strict=True)]
    contracting = [s.places(d) for s, d in zip(sides, contracting, strict=True)]
    result = op.results[0]
    lead = [completed.mesh.axis_size(axis) for axis in found.axes]
    product = stablehlo.dot_general(
        tensor_type(result.type, (*lead, *shape_of(result))),
        *(side.value for side in sides),
        stablehlo.DotDimensionNumbers.get(*batch, *contracting),
    )
    if "precision_config" in op.attributes:
        precision = op.attributes["precision_config"]
        product.owner.attributes["precision_config"] = precision
    return product


def _reduce(completed: CompletedModule, found: Summed, split) -> ir.Value:
    op = found.op
    divided = _Divided(completed, op.operands[0], split, found.axes)
    reduced = divided.places(reduced_dims(op))
    kept = [d for d in range(len(shape_of(divided.value))) if d not in reduced]
    result = op.results[0]
    sizes = [shape_of(divided.value)[d] for d in kept]
    copy = op.clone(ir.InsertionPoint.current)
    copy.operands[0] = divided.value
    copy.attributes["dimensions"] = ir.DenseI64ArrayAttr.get(reduced)
    copy.results[0].set_type(tensor_type(result.type, sizes))
    leading = [kept.index(d) for d in divided.leading]
    order = [*leading, *(i for i in range(len(kept)) if i not in leading)]
    if order == sorted(order):
        return copy.results[0]
    return stablehlo.transpose(copy.results[0], ir.DenseI64ArrayAttr.get(order))
