"""Experts' products by a kernel, against the loop over blocks."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.topology import topology, topology_devices
from meshwright.framework.modeling.layer import Context, Mode, annotate_weights
from meshwright.framework.sharding.placeholders import tracing_for
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.experts import ragged
from meshwright.layers.experts.dropless import Dropless
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from tests import needs
from tests.layers.experts.test_dropless import (
    TOP2,
    inputs_of,
    mixture,
)

PLANS = {
    "one device": ShardingPlan(mesh_shape=(1,), mesh_axes=("data",)),
    "experts": ShardingPlan(
        mesh_axes=("data", "tensor"),
        mesh_shape=(4, 2),
        weights={"experts": "data", "hidden": "tensor"},
        activations={"batch": "data", "experts": "data"},
    ),
    "data": ShardingPlan(
        mesh_axes=("data", "tensor"),
        mesh_shape=(4, 2),
        weights={"hidden": "tensor"},
        activations={"batch": "data"},
    ),
}


def gradients(plan, layer, shape, partitioner, devices=None, dtype=tf.float32):
    """The program of a layer's output and gradients."""
    specs = layer.weights()

    def step(theta, x):
        ctx = Context(plan=plan, mode=Mode.TRAIN, activation_dtype=dtype)
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            out = layer.fprop(ctx, annotate_weights(plan, specs, theta), x)
        dy = tf.sin(out.x)
        return out.x, *tape.gradient(out.x, (theta, x), output_gradients=dy)

    return mw.compile_program(
        step,
        [specs.map(lambda s: tf.TensorSpec(s.shape)), tf.TensorSpec(shape)],
        plan.mesh,
        in_shardings=[specs.map(lambda s: s.sharding(plan)), None],
        partitioner=partitioner,
        devices=devices,
    )


@functools.cache
def by_loop(routing, block_size):
    x, _, theta = inputs_of(routing, 8, 4)
    layer = mixture(block_size=block_size)
    program = gradients(PLANS["one device"], layer, x.shape, mw.Partitioner.SHARDY)
    return program.unshard(program(theta, x))


@pytest.mark.parametrize(
    "plan,routing,partitioner",
    [
        ("one device", "all_to_one", "SHARDY"),
        ("experts", "usual", "SHARDY"),
        ("experts", "all_to_one", "SHARDY"),
        ("data", "usual", "SHARDY"),
        ("data", "all_to_one", "GSPMD"),
    ],
)
def test_the_kernel_computes_what_the_loop_does(
    monkeypatch, plan, routing, partitioner
):
    want = by_loop(routing, 5)
    # JAX lowers it for CPUs too, to products of all rows with all experts.
    monkeypatch.setattr(ragged, "TPUS", ("cpu",))
    monkeypatch.setattr(ragged, "_ROWS_OF_EXPERT", 0)
    x, _, theta = inputs_of(routing, 8, 4)
    program = gradients(
        PLANS[plan], mixture(block_size=5), x.shape, mw.Partitioner[partitioner]
    )
    text = program.hlo_text()
    for part in ("ragged_forward", "ragged_transposed"):
        assert (part in text) == (partitioner == "SHARDY")
    for got, one in zip(
        tf.nest.flatten(program.unshard(program(theta, x))),
        tf.nest.flatten(want),
        strict=True,
    ):
        scale = max(1.0, np.abs(one).max())
        np.testing.assert_allclose(got, one, rtol=0, atol=1e-5 * scale)


def test_only_tpus_have_it_and_transposed_only_many_rows():
    assert not ragged.has_kernel((90, 128), 8, transposed=False)
    with tracing_for("cpu"):
        assert not ragged.has_kernel((90, 128), 8, transposed=False)
    with tracing_for("v5e", "gspmd"):
        assert not ragged.has_kernel((90, 128), 8, transposed=False)
    with tracing_for("v5e"):
        assert ragged.has_kernel((9, 128), 8, transposed=False)
        assert ragged.has_kernel((64, 128), 8, transposed=True)
        assert not ragged.has_kernel((63, 128), 8, transposed=True)


@needs.libtpu
def test_a_tpu_multiplies_no_rows_by_experts_of_others():
    """Products forward and by rows are the kernel's, and have a time."""
    sizes = {"model_dims": 256, "num_experts": 8}
    layer = MoE(
        gating=type(TOP2)(**sizes, k=2),
        experts=ExpertFeedForward(**sizes, hidden_dims=256),
        dropless=Dropless(),
    )
    plan = ShardingPlan(
        mesh_axes=("data", "tensor"),
        mesh_shape=(2, 2),
        weights={"experts": "data", "hidden": "tensor"},
        activations={"batch": "data", "experts": "data"},
    )
    name = "v5e:2x2"
    program = gradients(
        plan,
        layer,
        [8, 512, 256],
        mw.Partitioner.SHARDY,
        topology_devices(name),
        tf.bfloat16,
    )
    module = HloModule(program.hlo_text())
    kernels = [op for op in module.instructions if op.name.startswith("ragged-dot-n")]
    assert len(kernels) >= 4
    times = step_time(module, plan.mesh, order_of(plan.mesh, topology(name)))
    priced = [op for op in times.ops if op.name.startswith("ragged-dot-n")]
    first = [op for op in priced if op.count]  # Of rounds; others are not expected.
    assert len(first) >= 4 and all(op.seconds > 0 for op in first)
    assert len(priced) > len(first)
