"""XlaSharding annotations: what a user writes on a tensor (GSPMD 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


def annotate(tensor: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    """The identity of `tensor`, laid out as `sharding`.

    The gradient is annotated by a copy of the same op (GSPMD 3.6, TF's own gradient of
    XlaSharding), so the backward computation is laid out like the forward one.
    On a mesh of one device, and in eager execution, which has none, there is nothing to
    say and the tensor is returned as is.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank != sharding.rank:
        raise ValueError(
            f"sharding {sharding} has {sharding.rank} dims but tensor "
            f"{tensor.name if not tf.executing_eagerly() else ''} has shape "
            f"{tensor.shape}"
        )
    if sharding.mesh.size == 1:
        return tensor
    return annotate_serialized(tensor, sharding.to_op_sharding().SerializeToString())


def mesh_split(
    tensor: tf.Tensor, device_mesh: DeviceMesh, dims_mapping: Sequence
) -> tf.Tensor:
    """Splits `tensor` over mesh axes.

    Args:
      tensor: any tensor of static rank.
      device_mesh: the mesh.
      dims_mapping: for each tensor dim the mesh axis that splits it, by index or name;
        -1 or None for none; a sequence of axes for a dim split by several. A dim that
        its axes do not divide is padded inside the program.

    Returns:
      `tensor`, annotated; so is its gradient. In eager execution just `tensor`.

    Raises:
      ValueError: the mapping's length is not the rank, an axis is unknown or used
        twice.
    """
    tensor = tf.convert_to_tensor(tensor)
    sharding = Sharding.from_dims_mapping(
        device_mesh, dims_mapping, rank=tensor.shape.rank
    )
    return annotate(tensor, sharding)


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Every device holds all of `tensor` (GShard 3.2), and all of its gradient."""
    proto = xla_data_pb2.OpSharding(type=xla_data_pb2.OpSharding.REPLICATED)
    return annotate_serialized(tf.convert_to_tensor(tensor), proto.SerializeToString())


def annotate_serialized(tensor: tf.Tensor, op_sharding: bytes) -> tf.Tensor:
    """`tensor`, annotated with a serialized OpSharding, unchecked."""
    if tf.executing_eagerly():
        return tensor
    return gen_xla_ops.xla_sharding(
        input=tensor, sharding=op_sharding, unspecified_dims=[]
    )
