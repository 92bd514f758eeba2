"""Reduces gradients right onto their shards (weight-update sharding 5.1).

By default XLA all-reduces a gradient and slices the result; the CPU compiler keeps
that, and the TPU compiler makes a reduce-scatter of it only where it recognizes one.
Here the ops that sum over the batch are put into a region that is manual along the data
axes: each device sums up its own part, and a reduce-scatter follows, one axis after the
other, as rings are. Over axes that do not split the update the shards are then
all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.partial.begins import as_parts
from meshwright.framework.compiler.partial.ends import add_up, scatter
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    cut_end,
    pad_end,
    tensor_type,
    zeros,
)
from meshwright.framework.compiler.weight_update_sharding.gradient import Gradient
from meshwright.framework.compiler.weight_update_sharding.update_layouts import (
    UpdateLayout,
)
from meshwright.framework.sharding.sharding import Sharding


def reduce_scattered(
    completed: CompletedModule, summed: Gradient, value: ir.Value, layout: UpdateLayout
) -> ir.Value | None:
    """The shards of a gradient, at the current insertion point; None if not possible.

    Args:
      completed: the module.
      summed: how it is summed up.
      value: the gradient.
      layout: how it is divided.
    """
    mesh, first = completed.mesh, layout.first(value)
    unsplit = layout.sharding(value, split=False)
    if unsplit.dims[first] or not mesh.entire(layout.axes) <= set(summed.axes):
        return None
    shape = layout.shape(value)
    padded_size = layout.sharding(value).padded_shape(shape)[first]
    padded = (*shape[:first], padded_size, *shape[first + 1 :])
    local = summed.local(completed)
    if layout.count > 1:
        local = stablehlo.reshape(tensor_type(value.type, shape), local)
    if padded != shape and not _grow(local, padded):
        local = pad_end(local, padded)
    parts = as_parts(local, mesh, summed.axes)
    # Dims that other axes split unevenly are gathered before.
    before = [
        axes if size % mesh.axes_size(axes) == 0 else ()
        for size, axes in zip(padded, unsplit.dims, strict=True)
    ]
    after = [layout.axes if dim == first else axes for dim, axes in enumerate(before)]
    left = mesh.left_of(summed.axes, layout.axes)
    total = scatter(
        parts,
        Sharding(mesh, tuple(before), unreduced=summed.axes),
        Sharding(mesh, tuple(after)),
        first,
        left,
    )
    if left:
        total = add_up(total, mesh, left, left)
    return cut_end(total, shape)


def _grow(local: ir.Value, shape: Sequence[int]) -> bool:
    """Makes a scatter pad its sum with zeros at the ends, so that it is not copied."""
    made = [local.owner.operation]
    while made[-1].name == "stablehlo.convert":
        made.append(made[-1].operands[0].owner.operation)
    if made[-1].name != "stablehlo.scatter":
        return False
    with ir.InsertionPoint(made[-1]):
        made[-1].operands[0] = zeros(tensor_type(made[-1].results[0].type, shape))
    for op in made:
        op.results[0].set_type(tensor_type(op.results[0].type, shape))
    return True
