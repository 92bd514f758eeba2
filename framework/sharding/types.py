"""Sharding types, by which a program says when a partial sum is reduced.

A tensor's type names the mesh axes that split each dim, those along which it is
unreduced, and those along which it is reduced: replicated, its gradient unreduced. The
gradient's type is the dual of the tensor's ("Replicate forwards, partial backwards").
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.sharding.annotations import (
    Annotation,
    OnConflict,
    annotate,
    annotation_of,
    checked_sharding,
    record_annotation,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import placeholder
from meshwright.framework.sharding.sharding import Sharding

RESHARD = "reshard"


@tf.autograph.experimental.do_not_convert
def reshard(
    tensor: tf.Tensor,
    device_mesh: DeviceMesh,
    dims_mapping: Sequence,
    *,
    unreduced: Sequence[str] = (),
    reduced: Sequence[str] = (),
) -> tf.Tensor:
    """Converts `tensor` from the type that it has to another.

    From unreduced to replicated this is an all-reduce, or a reduce-scatter to a dim
    that these axes split and none did before, if they divide it; from replicated to
    unreduced nothing is sent: one device keeps the tensor and the others have zeros.
    The gradient is converted back: if `tensor` is itself the result of `mesh_split` or
    `reshard`, to the dual of the type given there, otherwise to the same dims with
    nothing unreduced.

    Args:
      tensor: any tensor of static rank.
      device_mesh: the mesh.
      dims_mapping: as for `mesh_split`.
      unreduced, reduced: mesh axes, as for `mesh_split`.

    Returns:
      `tensor`, of the same value. In eager execution just `tensor`.

    Raises:
      ValueError: as `mesh_split`.
    """
    tensor = tf.convert_to_tensor(tensor)
    types = {"unreduced": unreduced, "reduced": reduced}
    after = checked_sharding("reshard", tensor, device_mesh, dims_mapping, **types)
    return reshard_to(tensor, after)


def reshard_to(
    tensor: tf.Tensor, after: Sharding, *, on_conflict: OnConflict = OnConflict.ERROR
) -> tf.Tensor:
    """`reshard` to a `Sharding`; `on_conflict` applies to its gradient."""
    if tf.executing_eagerly():
        return tensor
    before = annotation_of(tensor)
    return _converted(
        tensor, before, Annotation(after.without_trivial_types(), on_conflict)
    )


def _converted(
    tensor: tf.Tensor, before: Annotation | None, after: Annotation
) -> tf.Tensor:
    # The compiler knows whether a tensor was reduced instead.
    is_sure = before is not None and before.on_conflict is OnConflict.ERROR

    @tf.custom_gradient
    def op(x):
        from_ = str(before.sharding) if is_sure else ""
        config = {"before": from_, "sharding": str(after.sharding)}
        mesh = after.sharding.mesh
        y = placeholder(RESHARD, mesh, [x], x.shape, x.dtype, config)

        def grad(dy):
            dual = after.dual()
            dy = annotate(dy, dual.sharding, on_conflict=dual.on_conflict)
            reduced = Annotation(after.sharding.untyped(), OnConflict.ERROR)
            return _converted(dy, dual, before.dual() if before else reduced)

        return y, grad

    return record_annotation(op(tensor), after.sharding)
