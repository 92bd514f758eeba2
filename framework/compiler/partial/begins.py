"""Where partial sums are made: sums over split dims, with a leading dim for each axis.

The summed dim of a product or a reduction becomes two: a dim that the axis splits and
the rest, of which only the rest is summed; other axes that split the dim before it make
dims of their own, which are summed too. Neither partitioner needs more. Other sums are
made in a region that is manual along the axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.sharding_types.partial_sums import Summed
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    dot_dims,
    into_manual,
    keep_precision,
    out_of_manual,
    reduced_dims,
    shape_of,
    tensor_type,
    with_sharding,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

Axes = tuple[str, ...]


def sum_in_parts(completed: CompletedModule, summed: Summed) -> ir.Value:
    """A sum with a leading dim for each axis, at the current insertion point."""
    divided = _DIVIDED.get(summed.op.name)
    split = _split(completed, summed) if divided else []
    if split:
        return divided(completed, summed, split)
    return as_parts(local_sum(completed, summed), completed.mesh, summed.axes)


def local_sum(completed: CompletedModule, summed: Summed) -> ir.Value:
    """Each device's partial sum, in the manual region; at the insertion point."""
    op, border = summed.op, (completed.mesh, summed.axes)
    copy = op.clone(ir.InsertionPoint.current)
    with ir.InsertionPoint(copy):
        for number, dims in enumerate(summed.dims):
            if dims is not None:
                copy.operands[number] = into_manual(op.operands[number], *border, dims)
    local = copy.results[0]
    if op.name == "stablehlo.reduce" and _sums_one(copy):
        reshaped = stablehlo.reshape(local.type, copy.operands[0])
        copy.erase()
        local = reshaped
    return local


def _sums_one(op) -> bool:
    """Whether a reduction is over dims of size 1, as where parts are added up."""
    return all(shape_of(op.operands[0])[dim] == 1 for dim in reduced_dims(op))


def as_parts(local: ir.Value, mesh: DeviceMesh, axes: Axes) -> ir.Value:
    """What each device has in a region, with a leading dim for each manual axis."""
    shape = shape_of(local)
    dims = [*[(axis,) for axis in axes], *[()] * len(shape)]
    type_ = tensor_type(local.type, [*[1] * len(axes), *shape])
    return out_of_manual(stablehlo.reshape(type_, local), mesh, axes, dims)


def _split(completed: CompletedModule, summed: Summed) -> list[Mapping[int, Axes]]:
    """The axes that divide each operand's summed dims; [] if they cannot be divided.

    The axes are major first: those of the sum, and those that split a dim before them.
    """
    split = []
    for number, dims in enumerate(summed.dims):
        if dims is None:
            continue
        dim_axes = completed.sharding(summed.op.operands[number]).dims
        pairs = enumerate(zip(dims, dim_axes, strict=True))
        split.append({dim: _up_to(*pair) for dim, pair in pairs if pair[0]})
    return split if _alike(completed, summed, split) else []


def _up_to(axes: Axes, splitting: Axes) -> Axes:
    """The axes that split a dim, up to the last of `axes`; `axes` if none of these."""
    last = max((n for n, axis in enumerate(splitting) if axis in axes), default=None)
    return axes if last is None else splitting[: last + 1]


def _alike(completed: CompletedModule, summed: Summed, split) -> bool:
    """Whether dims that are summed together are divided alike, and evenly."""
    for value, dims in zip(summed.op.operands, split, strict=False):
        sizes = shape_of(value)
        if any(sizes[d] % completed.mesh.axes_size(axes) for d, axes in dims.items()):
            return False
    if summed.op.name == "stablehlo.reduce":
        return True
    _, (left, right) = dot_dims(summed.op, len(shape_of(summed.op.operands[0])))
    pairs = zip(left, right, strict=True)
    return all(split[0].get(i) == split[1].get(j) for i, j in pairs)


class _Divided:
    """An operand whose summed dims are divided by the axes that split them."""

    def __init__(self, completed: CompletedModule, value: ir.Value, split, axes: Axes):
        mesh, shape, dims = completed.mesh, [], []
        dim_axes = completed.sharding(value).dims
        self.place: dict[int, list[int]] = {}
        leading: dict[str, int] = {}
        for dim, size in enumerate(shape_of(value)):
            by, places = split.get(dim, ()), []
            for axis in by:
                if axis in axes:
                    leading[axis] = len(shape)
                else:
                    places.append(len(shape))
                shape.append(mesh.axis_size(axis))
                dims.append((axis,))
            self.place[dim] = [*places, len(shape)]
            shape.append(size // mesh.axes_size(by))
            dims.append(tuple(a for a in dim_axes[dim] if a not in (*axes, *by)))
        self.leading = [leading[axis] for axis in axes]
        divided = stablehlo.reshape(tensor_type(value.type, shape), value)
        self.value = with_sharding(divided, Sharding(mesh, tuple(dims)))

    def places(self, dims: Sequence[int]) -> list[int]:
        return [place for dim in dims for place in self.place[dim]]


def _gathered(completed: CompletedModule, op, side: int) -> ir.Value:
    """An operand of a product, its free dims gathered where the result has them so.

    Gathered before it is divided, it is gathered once for other products too.
    """
    value, result = op.operands[side], completed.sharding(op.results[0]).dims
    ranks = [len(shape_of(operand)) for operand in op.operands]
    batch, contracting = dot_dims(op, ranks[0])
    free = [
        [d for d in range(rank) if d not in (*b, *c)]
        for rank, b, c in zip(ranks, batch, contracting, strict=True)
    ]
    start = len(batch[0]) + (len(free[0]) if side else 0)
    sharding = completed.sharding(value)
    dims = list(sharding.dims)
    for dim, wanted in zip(free[side], result[start:], strict=False):
        if dims[dim][: len(wanted)] == wanted:
            dims[dim] = wanted
    if tuple(dims) == sharding.dims:
        return value
    gathered = with_sharding(value, dataclasses.replace(sharding, dims=tuple(dims)))
    completed.shardings[gathered] = dataclasses.replace(sharding, dims=tuple(dims))
    return gathered


def _dot(completed: CompletedModule, summed: Summed, split) -> ir.Value:
    op = summed.op
    sides = [
        _Divided(completed, _gathered(completed, op, side), dims, summed.axes)
        for side, dims in enumerate(split)
    ]
    batch, contracting = dot_dims(op, len(shape_of(op.operands[0])))
    batch = [[*s.leading, *s.places(d)] for s, d in zip(sides, batch, strict=True)]
    contracting = [s.places(d) for s, d in zip(sides, contracting, strict=True)]
    result = op.results[0]
    lead = [completed.mesh.axis_size(axis) for axis in summed.axes]
    product = stablehlo.dot_general(
        tensor_type(result.type, (*lead, *shape_of(result))),
        *(side.value for side in sides),
        stablehlo.DotDimensionNumbers.get(*batch, *contracting),
    )
    keep_precision(op, product)
    return product


def _reduce(completed: CompletedModule, summed: Summed, split) -> ir.Value:
    op = summed.op
    divided = _Divided(completed, op.operands[0], split[0], summed.axes)
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


_DIVIDED = {
    "stablehlo.dot": _dot,
    "stablehlo.dot_general": _dot,
    "stablehlo.reduce": _reduce,
}
