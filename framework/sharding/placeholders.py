"""Custom calls that the compiler replaces, for operations that TF has no op for."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.sharding.mesh import DeviceMesh

PREFIX = "meshwright."
KERNEL_PREFIX = "meshwright_kernel."
_DEVICE_KIND, _PARTITIONER = (
    contextvars.ContextVar[str | None](name, default=None)
    for name in ("device_kind", "partitioner")
)
_MESH = contextvars.ContextVar[DeviceMesh | None]("mesh", default=None)


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


def kernel(
    kind: str,
    tensors: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
    config: Mapping[str, Any],
) -> list[tf.Tensor]:
    """A fused kernel, which each device runs on its own shards.

    Where a mesh has several devices, it belongs in a region that is manual along all
    axes. The compiler puts in what JAX lowers the kernel to for the program's devices
    (`framework/compiler/stablehlo/kernels`).

    Args:
      kind: the kernel's name there.
      tensors: a device's operands.
      results: the specs of its results.
      config: the kernel's settings.
    """
    with tf.name_scope(kind):
        return list(
            xla.custom_call_v2(
                KERNEL_PREFIX + kind,
                list(tensors),
                list(results),
                backend_config=json.dumps(dict(config)),
                has_side_effect=False,
            )
        )


@contextlib.contextmanager
def tracing_for(
    device_kind: str, partitioner: str = "shardy", mesh: DeviceMesh | None = None
) -> Iterator[None]:
    """What is traced inside is for devices of this kind: "v5e", "cpu" or "cuda".

    And for a partitioner, "shardy" or "gspmd", and a mesh.
    """
    given = {_DEVICE_KIND: device_kind, _PARTITIONER: partitioner, _MESH: mesh}
    tokens = [(variable, variable.set(value)) for variable, value in given.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def traced_for() -> str | None:
    """The kind of devices of the program that is traced; None outside of programs."""
    return _DEVICE_KIND.get()


def traced_partitioner() -> str | None:
    """What that program is split by; None outside of programs."""
    return _PARTITIONER.get()


def traced_mesh() -> DeviceMesh | None:
    """The mesh of that program; None outside of programs."""
    return _MESH.get()


def mesh_text(mesh: DeviceMesh) -> str:
    """The mesh and its device order, to compare meshes by."""
    order = "" if mesh.device_ids is None else f" of devices {list(mesh.device_ids)}"
    return f"{mesh}{order}"
