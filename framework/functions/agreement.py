"""Processes that call a function together have to call it alike."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.xla.processes import check_same, check_takes_part
from meshwright.framework.devices.topology import expect_no_tpu
from meshwright.framework.functions.layouts.layout import path_of
from meshwright.framework.functions.mesh_variable import MeshValue
from meshwright.framework.sharding.mesh import DeviceMesh

_PLAIN = (bool, int, float, str, type(None))


def check_before_tracing(name: str, mesh: DeviceMesh, leaves: Sequence[Any]) -> None:
    """Checks that all processes are about to trace a function for the same arguments.

    A program that some of them run and others do not never ends.

    Args:
      name: the function's.
      mesh: its mesh.
      leaves: its arguments; a `tf.TensorSpec` for each tensor.

    Raises:
      ValueError: they are not; or a process has no device of the mesh.
      RuntimeError: a process does not come.
    """
    expect_no_tpu()
    if jax.process_count() == 1:
        return
    check_takes_part(mesh)
    facts = {f"argument {i}": _kind(leaf) for i, leaf in enumerate(leaves)}
    check_same(f"the first call of {name} with such arguments", facts)


def check_before_call(
    name: str, calls: int, values: Sequence[MeshValue], tensors: Sequence[Any]
) -> None:
    """Checks that all processes give the devices the same numbers.

    Those of variables always, when they are put onto the mesh. Those of arguments in
    calls 1, 2, 4, 8 and so on: random numbers that are not seeded show in the first.

    Args:
      name: the function's.
      calls: how often its program was called, with this call.
      values: of its variables.
      tensors: its arguments.

    Raises:
      ValueError: they do not.
      RuntimeError: a process does not come.
    """
    if jax.process_count() == 1:
        return
    facts = {
        f"variable {path_of(value.variable())!r}": _digest(value.host_value())
        for value in values
        if not value.stays_on_mesh
    }
    if calls & (calls - 1) == 0:
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, jax.Array):  # It would be on the mesh already.
                facts[f"tensor {i} of the arguments"] = _digest(np.asarray(tensor))
    if facts:
        check_same(f"call {calls} of {name}", facts)


def check_constants(name: str, constants: Sequence[tf.Tensor]) -> None:
    """Checks that the large constants of a function are the same in all processes."""
    if constants and jax.process_count() > 1:
        facts = {f"constant {i}": _digest(c.numpy()) for i, c in enumerate(constants)}
        check_same(f"the program of {name}", facts)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, tf.TensorSpec):
        return f"{leaf.dtype.name}{leaf.shape}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


def _digest(array: np.ndarray) -> str:
    bits = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return f"{array.dtype}{list(array.shape)} with the checksum {bits:08x}"
