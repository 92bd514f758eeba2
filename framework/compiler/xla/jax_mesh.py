"""Device meshes and shardings as JAX has them, over real devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np
import tensorflow as tf

from meshwright.framework.devices.device_order import device_order
from meshwright.framework.devices.topology import (
    expect_no_tpu,
    place_on_torus,
    topology_of,
)
from meshwright.framework.sharding.mesh import DeviceMesh, SubAxis
from meshwright.framework.sharding.sharding import Sharding


def jax_mesh(
    mesh: DeviceMesh, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """The devices of `mesh`, in its order; without one, along the links of a TPU torus.

    Args:
      mesh: the device mesh; its ids are places in `devices`.
      devices: those of a topology to compile for; by default all that this program's
        processes have, `jax.devices()`, whatever their numbers are.

    Raises:
      TypeError: `devices` is the name of a topology, or no sequence of devices.
      ValueError: the mesh has more devices than there are, or ids that no device has.
    """
    expect_no_tpu()
    here = devices is None
    if isinstance(devices, str) or not (here or isinstance(devices, Iterable)):
        name = devices if isinstance(devices, str) else "v5e:2x4"
        raise TypeError(f"devices is {devices!r}: pass mw.topology_devices({name!r})")
    devices = jax.devices() if here else list(devices)
    missing = [i for i in mesh.ids.flat if not 0 <= i < len(devices)]
    if missing and not here:
        raise ValueError(
            f"device mesh ({mesh}) needs {mesh.size} devices but the topology has "
            f"{len(devices)} (no device {missing[0]}); name a larger topology, or a "
            "smaller mesh, in gin files by ShardingPlan.mesh_shape and .device_ids"
        )
    if missing:
        raise ValueError(
            f"device mesh ({mesh}) needs {mesh.size} devices but {len(devices)} "
            f"{jax.default_backend()} devices exist (no device {missing[0]}); use a "
            "smaller mesh, in gin files by ShardingPlan.mesh_shape and .device_ids, "
            'or, on CPU, more virtual devices: mw.set_platform("cpu", device_count='
            f"{max(mesh.ids.flat) + 1}) in Python, for a command "
            f"--device_count={max(mesh.ids.flat) + 1}"
        )
    ids, torus = mesh.ids, topology_of(devices)
    if mesh.device_ids is None and torus is not None and torus.size == mesh.size:
        devices = sorted(devices, key=place_on_torus)
        ids = device_order(mesh.shape, torus).ids
    grid = np.vectorize(devices.__getitem__, otypes=[object])(ids)
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.shape)
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=auto)


def named_sharding(
    sharding: Sharding, mesh: jax.sharding.Mesh | None = None
) -> jax.sharding.NamedSharding:
    """`sharding` over real devices.

    JAX has no parts of axes: where there are some, it gets a mesh of them.
    """
    mesh, devices = mesh or jax_mesh(sharding.mesh), sharding.mesh
    digits = _digits(sharding)
    names = [devices.name(digit) for digit in digits]
    if names != list(devices.axis_names):
        grid = mesh.devices.reshape([digit.size for digit in digits])
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        mesh = jax.sharding.Mesh(grid, names, axis_types=auto)

    def named(axis: str) -> list[str]:
        part = devices.part(axis)
        return [
            name
            for name, digit in zip(names, digits, strict=True)
            if digit.axis == part.axis and part.before <= digit.before < part.end
        ]

    spec = jax.sharding.PartitionSpec(
        *(
            tuple(name for axis in axes for name in named(axis))
            for axes in sharding.dims
        )
    )
    return jax.sharding.NamedSharding(mesh, spec)


def _digits(sharding: Sharding) -> list[SubAxis]:
    """The mesh's axes, each divided where a part begins or ends that splits a dim."""
    mesh, digits = sharding.mesh, []
    parts = [mesh.part(axis) for axes in sharding.dims for axis in axes]
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        of_axis = [part for part in parts if part.axis == axis]
        cuts = {1, size, *(p.before for p in of_axis), *(p.end for p in of_axis)}
        pairs = list(itertools.pairwise(sorted(cuts))) or [(1, 1)]
        digits += [SubAxis(axis, start, end // start) for start, end in pairs]
    return digits


def abstract_array(
    shape: Sequence[int], dtype: tf.DType, sharding: Sharding
) -> jax.ShapeDtypeStruct:
    """The description of a device array into which a checkpoint is restored."""
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype.as_numpy_dtype, sharding=named_sharding(sharding)
    )
