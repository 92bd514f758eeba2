"""Compiling for GPUs that are not here: names, errors, and what links them."""

import importlib.util

import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import topologies

from meshwright.framework.compiler.hlo.roofline import ESTIMATES
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.devices.gpu_topology import gpus_of_size, target_config
from meshwright.framework.devices.hardware import GPU_KINDS, hardware_of
from meshwright.framework.devices.network import GpuNetwork
from meshwright.framework.devices.topology import topology, topology_devices
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.xla_form import axis_groups
from tests import needs


@pytest.mark.parametrize(
    ("name", "hosts", "per_host", "canonical"),
    [
        ("h100:8", 1, 8, "h100:8"),
        ("h100:1x8", 1, 8, "h100:8"),
        ("a100:4x8", 4, 8, "a100:4x8"),
        ("b200:1", 1, 1, "b200:1"),
    ],
)
def test_a_name_has_kind_hosts_and_gpus(name, hosts, per_host, canonical):
    gpus = topology(name)
    assert (gpus.hosts, gpus.per_host, gpus.name) == (hosts, per_host, canonical)
    assert gpus.size == hosts * per_host


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("k80:8", "unknown kind: one of v2, .* or of a100, h100, h200, b200, then"),
        ("h100", "hosts have up to 8 GPUs, as in 'h100:8'; several .* 'h100:4x8'"),
        ("h100:9", "hosts have up to 8 GPUs"),
        ("h200:2x16", "hosts have up to 8 GPUs, as in 'h200:8'"),
        ("h100:0", "hosts have up to 8 GPUs"),
        ("h100:2x2x2", "hosts have up to 8 GPUs"),
    ],
)
def test_a_topology_that_does_not_exist_is_an_error(name, message):
    with pytest.raises(ValueError, match=message):
        topology_devices(name)


def test_sizes_are_spread_over_the_fewest_hosts():
    kinds = list(GPU_KINDS)
    assert [gpus.name for gpus in gpus_of_size(8)] == [f"{kind}:8" for kind in kinds]
    assert gpus_of_size(32)[1].name == "h100:4x8"
    assert gpus_of_size(12)[1].name == "h100:2x6"
    assert gpus_of_size(17) == []


@pytest.mark.parametrize(
    ("is_installed", "error", "message"),
    [
        (False, ImportError, r"pip install 'meshwright\[plan_gpu\]'"),
        (True, ValueError, r"call set_platform\('cpu'\) first thing"),
    ],
)
def test_without_the_plugin_it_says_what_to_do(
    monkeypatch, is_installed, error, message
):
    def refuse(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    spec = object() if is_installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(error, match=message):
        topology_devices("h100:8")


@pytest.mark.parametrize("kind", GPU_KINDS.values(), ids=GPU_KINDS)
def test_the_compiler_is_told_of_the_same_device(kind):
    config = target_config(kind)
    assert f'name: "{kind.jax_name}' in config
    assert f"device_memory_size: {kind.memory}\n" in config
    bandwidth = int(config.split("memory_bandwidth: ")[1].split()[0])
    assert bandwidth == pytest.approx(kind.memory_bandwidth, rel=0.05)


@needs.cuda_plugin
@pytest.mark.parametrize("name", ["a100:8", "h100:8", "h200:8", "b200:8", "h100:2x4"])
def test_compiles_for_gpus_that_are_not_here(name):
    mesh = DeviceMesh(("X", "Y"), (2, 4))
    a, b, out = (
        Sharding.from_dims_mapping(mesh, split)
        for split in (["X", "Y"], ["Y", -1], ["X", -1])
    )
    devices = topology_devices(name)
    program = compile_program(
        tf.matmul,
        [tf.TensorSpec([64, 32]), tf.TensorSpec([32, 16])],
        mesh,
        in_shardings=[a, b],
        out_shardings=out,
        devices=devices,
        compiler_options=ESTIMATES if topology(name).kind.has_tables else None,
    )
    (collective,) = program.collectives()
    assert (collective.kind, collective.axes) == ("all-reduce", ("Y",))
    assert hardware_of(devices[0]) is topology(name).kind
    assert [device.id for device in devices] == list(range(8))


@needs.cuda_plugin
def test_cpu_devices_are_as_before_once_gpus_were_compiled_for():
    topology_devices("h100:8")
    mesh = DeviceMesh(("X",), (8,))
    split = Sharding.from_dims_mapping(mesh, ["X"])
    program = compile_program(
        tf.square, [tf.TensorSpec([8])], mesh, in_shardings=[split]
    )
    np.testing.assert_array_equal(program(np.arange(8.0, dtype="f")), np.arange(8) ** 2)


H100 = GPU_KINDS["h100"]
SIZE = 2**30


def moving(phase):
    assert phase.waiting == H100.latency
    return phase.moving


def test_data_goes_by_links_in_a_host_and_by_nics_between_hosts():
    mesh = DeviceMesh(("hosts", "links", "pairs"), (4, 4, 2))
    network = GpuNetwork(mesh=mesh, gpus=topology("h100:4x8"))
    links, hosts, both, two_of_each = (
        axis_groups(mesh, axes)
        for axes in (
            ("links", "pairs"),
            ("hosts",),
            mesh.axis_names,
            ("hosts", "pairs"),
        )
    )
    assert moving(network.around(links, SIZE)) == SIZE * 7 / 8 / H100.link_bandwidth
    assert moving(network.around(hosts, SIZE)) == SIZE * 3 / 4 / H100.host_bandwidth
    # Two NICs of a host together bring what it lacks; eight are faster than its links,
    # which carry what another member's NIC or no NIC brought.
    assert moving(network.around(two_of_each, SIZE)) == pytest.approx(
        SIZE * 3 / 4 / (2 * H100.host_bandwidth)
    )
    assert moving(network.around(both, SIZE)) == SIZE * 28 / 32 / H100.link_bandwidth
    assert moving(network.between([(0, 1), (8, 9)], SIZE)) == SIZE / H100.link_bandwidth
    assert moving(network.between([(0, 1), (7, 8)], SIZE)) == SIZE / H100.host_bandwidth
    assert moving(network.all_to_all(links, SIZE)) == pytest.approx(
        SIZE * 7 / 8 / H100.link_bandwidth
    )
    assert moving(network.all_to_all(both, SIZE)) == SIZE * 3 / 4 / H100.host_bandwidth
    assert moving(network.around([(i,) for i in range(32)], SIZE)) == 0


def test_the_meshs_ids_say_which_host_a_device_is_on():
    ids = np.arange(16).reshape(2, 8).T  # Neighbours along Y are on two hosts.
    mesh = DeviceMesh(("X", "Y"), (8, 2), ids.flatten())
    network = GpuNetwork(mesh=mesh, gpus=topology("h100:2x8"))
    along_y = network.around(axis_groups(mesh, ("Y",)), SIZE)
    along_x = network.around(axis_groups(mesh, ("X",)), SIZE)
    assert moving(along_y) == SIZE / 2 / H100.host_bandwidth
    assert moving(along_x) == SIZE * 7 / 8 / H100.link_bandwidth
