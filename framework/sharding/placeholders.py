"""Custom calls that the compiler replaces, for operations that TF has no op for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.sharding.mesh import DeviceMesh

PREFIX = "meshwright."


def placeholder(
    kind: str,
    mesh: DeviceMesh,
    tensors: Sequence[tf.Tensor],
    shape: Sequence[int],
    dtype: tf.DType,
    config: Mapping[str, Any],
) -> tf.Tensor:
    """An op `kind` that only a program for `mesh` can run.

    Raises:
      ValueError: in eager execution, which has no mesh.
    """
    if tf.executing_eagerly():
        raise ValueError(
            f"{kind} over the mesh ({mesh}) was called eagerly: it needs a program of "
            "compile_program, whose devices each hold a shard"
        )
    with tf.name_scope(kind):
        (result,) = xla.custom_call_v2(
            PREFIX + kind,
            list(tensors),
            [tf.TensorSpec(shape, dtype)],
            backend_config=json.dumps({"mesh": mesh_text(mesh), **config}),
            has_side_effect=False,
        )
    return result


def mesh_text(mesh: DeviceMesh) -> str:
    """The mesh and its device order, to compare meshes by."""
    order = "" if mesh.device_ids is None else f" of devices {list(mesh.device_ids)}"
    return f"{mesh}{order}"
