"""Compiling for devices that are not here: TPU topologies, and what goes wrong."""

import os

import jax
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.topology import (
    give_compiler_stack,
    topology,
    topology_devices,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests import needs

MESH = DeviceMesh(("X", "Y"), (2, 4))
STACK = "--fibers_default_thread_stack_size"


def matmul(mesh, devices):
    """A product whose contracting dim is split along Y."""
    splits = [["X", "Y"], ["Y", -1], ["X", -1]]
    a, b, out = [Sharding.from_dims_mapping(mesh, s) for s in splits]
    specs = [tf.TensorSpec([64, 32]), tf.TensorSpec([32, 16])]
    return compile_program(
        tf.matmul,
        specs,
        mesh,
        in_shardings=[a, b],
        out_shardings=out,
        name="product",
        devices=devices,
    )


@pytest.mark.parametrize(
    "name,message",
    [
        ("v9:2x2", "unknown kind: one of v2, v3, .*as in 'v3:16x16'"),
        ("", "unknown kind"),
        ("v5e-8", "unknown kind.* as in 'h100:4x8'; did you mean 'v5e:2x4'"),
        ("v5litepod-16", "did you mean 'v5e:4x4'"),
        ("v5litepod:2x4", "did you mean 'v5e:2x4'"),
        ("v3-8", "did you mean 'v3:2x2'"),
        ("v4-8", "did you mean 'v4:2x2x1'"),
        ("v4-16", "did you mean 'v4:2x2x2'"),
        ("v4-256", "did you mean 'v4:4x4x8'"),
        ("v5p-16", "did you mean 'v5p:2x2x2'"),
        ("h100-8", "did you mean 'h100:8'"),
        ("V5E:2x4", "did you mean 'v5e:2x4'"),
        ("tpu-v5e:2x4", "did you mean 'v5e:2x4'"),
        ("v5e:2X4", "joined by 'x', as in 'v5e:16x16'; did you mean 'v5e:2x4'"),
        ("v3", "v3 pods have 2 dims and go up to 'v3:32x32'"),
        ("v3:64x64", "v3 pods have 2 dims and go up to 'v3:32x32'"),
        ("v3:16x64", "go up to 'v3:32x32'"),
        ("v3:8x", "chips along each dim as numbers from 1, joined by 'x', as in 'v3:3"),
        ("v3:0x2", "numbers from 1"),
        ("v3:2x2x2", "v3 pods have 2 dims"),
        ("v4:4x4", "v4 pods have 3 dims and go up to 'v4:16x16x16'"),
        ("v5p:28x28x28", "go up to 'v5p:16x20x28'"),
    ],
)
def test_a_topology_that_nobody_has_is_an_error(name, message):
    with pytest.raises(ValueError, match=message):
        topology_devices(name)


@needs.libtpu
@pytest.mark.parametrize(
    "name",
    ["v3:1x1", "v3:2x1", "v4:1x1x1", "v4:1x1x2", "v5e:1x1", "v6e:1x2", "v3:2x2"],
)
def test_a_part_of_a_host_is_a_topology(name):
    assert len(topology_devices(name)) == topology(name).size


@needs.libtpu
@pytest.mark.parametrize(
    "name,devices",
    [("v3:2x2", 2), ("v4:2x2x1", 1), ("v4:2x2x2", 1), ("v5p:2x2x1", 1)],
)
def test_a_chip_has_as_many_devices_as_on_a_machine(name, devices):
    """libtpu shows the cores of a v4 chip as two unless it is asked for "megacore"."""
    places = [(tuple(d.coords), d.core_on_chip) for d in topology_devices(name)]
    chips = {chip for chip, _ in places}
    assert chips == {(*c, *[0] * (3 - len(c))) for c in _chips(name)}
    assert {core for _, core in places} == set(range(devices))
    assert len(places) == len(chips) * devices == topology(name).size


def _chips(name):
    return np.ndindex(topology(name).chips)


@pytest.mark.parametrize(
    "given,then",
    [
        (None, f"{STACK}=1048576"),
        ("--xla_a=1", f"--xla_a=1 {STACK}=1048576"),
        (f"{STACK}=4096 --xla_a=1", f"{STACK}=4096 --xla_a=1"),
    ],
)
def test_the_compiler_has_a_stack_for_fused_products(monkeypatch, given, then):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    if given is not None:
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    give_compiler_stack()
    assert os.environ["LIBTPU_INIT_ARGS"] == then


@needs.libtpu
def test_one_device_of_a_topology():
    mesh = DeviceMesh(("X", "Y"), (1, 1))
    order = order_of(mesh, topology("v3:1x1"))
    assert order.ids.tolist() == [[0]] and order.loads == (0, 0)
    program = matmul(mesh, topology_devices("v3:1x1"))
    assert program.collectives() == []
    assert program.memory().arguments < 2**20


def test_a_program_for_other_devices_can_be_read_but_not_run():
    program = matmul(MESH, jax.devices())
    (collective,) = program.collectives()
    assert (collective.kind, collective.axes) == ("all-reduce", ("Y",))
    with pytest.raises(ValueError, match="product was compiled for a topology.*not he"):
        program(np.ones([64, 32]), np.ones([32, 16]))


def test_mesh_ids_are_places_among_the_devices():
    devices = jax.devices()[::-1]
    program = matmul(MESH, devices)
    indices = program.arguments.shardings[0].devices_indices_map((64, 32))
    assert indices[devices[0]] == (slice(0, 32), slice(0, 8))
    assert indices[devices[5]] == (slice(32, 64), slice(8, 16))


def test_a_mesh_larger_than_the_topology_is_an_error():
    with pytest.raises(ValueError, match="needs 8 devices but the topology has 4.*lar"):
        matmul(MESH, jax.devices()[:4])


@needs.libtpu
def test_devices_come_row_by_row():
    devices = topology_devices("v3:4x2")
    places = [(d.coords[1], d.coords[0], d.core_on_chip) for d in devices]
    assert places == sorted(places) and len(set(places)) == 16
    assert [d.coords[:2] for d in devices[:4]] == [[0, 0], [0, 0], [1, 0], [1, 0]]


@needs.libtpu
def test_compiles_for_a_tpu_that_is_not_here():
    program = matmul(DeviceMesh(("X", "Y"), (4, 8)), topology_devices("v3:4x4"))
    (collective,) = program.collectives()
    assert (collective.kind, collective.axes) == ("all-reduce", ("Y",))
    assert collective.shapes == ((16, 16),)
    assert program.memory().arguments > 0


@needs.libtpu
@pytest.mark.parametrize(
    "name,near",
    [
        ("v5e:3x3", "v5e:2x2 or v5e:2x4 or v5e:4x2 or v5e:4x4"),
        ("v5e:1x4", "v5e:2x4"),
        ("v3:3x5", "v3:2x4 or v3:2x6 or v3:4x4 or v3:4x6"),
        ("v5p:3x2x3", "v5p:2x2x3 or v5p:4x2x3"),
    ],
)
def test_a_box_of_odd_sides_is_refused_with_those_that_exist(name, near):
    with pytest.raises(ValueError, match=f"no TPU topology '{name}': .* give {near}$"):
        topology_devices(name)
    assert all(topology_devices(each) for each in near.split(" or "))
