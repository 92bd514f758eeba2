"""Where partial sums are made: sums over split dims, with a leading dim for each axis.

A product's or a reduction's summed dim becomes two, what the axis splits and the rest,
of which only the rest is summed; other axes that split it before these make dims of
their own, which are summed too. That is all for either partitioner. Other sums are made
in a region that is manual along the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.partial.ends import with_sharding
from meshwright.framework.compiler.partial.partial_sums import Summed, local_sum
from meshwright.framework.compiler.stablehlo.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    OUT_OF_MANUAL,
    border_config,
    dot_dims,
    keep_precision,
    placeholder_call,
    reduced_dims,
    shape_of,
    tensor_type,
)
from meshwright.framework.sharding.sharding import Sharding

Axes = tuple[str, ...]


def sum_in_parts(completed: CompletedModule, found: Summed) -> ir.Value:
    """A sum with a leading dim for each axis, at the current insertion point."""
    divided = _DIVIDED.get(found.op.name)
    split = _split(completed, found) if divided else []
    if split:
        return divided(completed, found, split)
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
    """For each operand how its summed dims are to be divided; [] if they cannot be.

    Major first, the axes that the sum is over and those that split a dim before them.
    """
    split = []
    for number, dims in enumerate(found.dims):
        if dims is None:
            continue
        own = completed.sharding(found.op.operands[number]).dims
        pairs = enumerate(zip(dims, own, strict=True))
        split.append({dim: _up_to(*pair) for dim, pair in pairs if pair[0]})
    return split if _alike(completed, found, split) else []


def _up_to(axes: Axes, own: Axes) -> Axes:
    """What splits a dim, up to the last of `axes`; these, if another operand's does."""
    last = max((n for n, axis in enumerate(own) if axis in axes), default=None)
    return axes if last is None else own[: last + 1]


def _alike(completed: CompletedModule, found: Summed, split) -> bool:
    """Whether what is summed together is divided alike, and evenly."""
    for value, dims in zip(found.op.operands, split, strict=False):
        sizes = shape_of(value)
        if any(sizes[d] % completed.mesh.axes_size(axes) for d, axes in dims.items()):
            return False
    if found.op.name == "stablehlo.reduce":
        return True
    _, (left, right) = dot_dims(found.op, len(shape_of(found.op.operands[0])))
    pairs = zip(left, right, strict=True)
    return all(split[0].get(i) == split[1].get(j) for i, j in pairs)


class _Divided:
    """An operand whose summed dims are divided by the axes that split them."""

    def __init__(self, completed: CompletedModule, value: ir.Value, split, axes: Axes):
        mesh, shape, dims = completed.mesh, [], []
        own = completed.sharding(value).dims
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
            dims.append(tuple(a for a in own[dim] if a not in (*axes, *by)))
        self.leading = [leading[axis] for axis in axes]
        divided = stablehlo.reshape(tensor_type(value.type, shape), value)
        self.value = with_sharding(divided, Sharding(mesh, tuple(dims)))

    def places(self, dims: Sequence[int]) -> list[int]:
        return [place for dim in dims for place in self.place[dim]]


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
    keep_precision(op, product)
    return product


def _reduce(completed: CompletedModule, found: Summed, split) -> ir.Value:
    op = found.op
    divided = _Divided(completed, op.operands[0], split[0], found.axes)
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
