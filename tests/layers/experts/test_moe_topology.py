"""Mixtures of experts compiled for TPU pods: what moves between devices."""

import collections

import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.devices.topology import topology_devices
from meshwright.framework.modeling.layer import Context, Mode, annotate_weights
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.basic.linear import BSM
from meshwright.layers.experts.gatings import Top2
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from tests import needs

M, H, T = 256, 512, 256


@needs.libtpu
@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize(
    ("experts", "topology"),
    [
        (128, "v3:8x8"),
        pytest.param(2048, "v3:32x32", marks=pytest.mark.slow),
    ],
)
def test_one_all_to_all_each_way(experts, topology, partitioner):
    plan = ShardingPlan(
        mesh_axes=("X",),
        mesh_shape=(experts,),
        weights={"experts": "X"},
        activations={"batch": "X", "experts": "X"},
    )
    sizes = {"model_dims": M, "num_experts": experts}
    layer = MoE(
        gating=Top2(**sizes),
        experts=ExpertFeedForward(**sizes, hidden_dims=H),
        group_size=2 * T,
    )
    specs = layer.weights()

    def forward(theta, x, key):
        ctx = Context(plan=plan, mode=Mode.TRAIN, key=key, activation_dtype=tf.bfloat16)
        return layer.fprop(ctx, annotate_weights(plan, specs, theta), x)

    program = compile_program(
        forward,
        [
            specs.map(lambda s: tf.TensorSpec(s.shape)),
            tf.TensorSpec([2 * experts, T, M], tf.bfloat16),
            tf.TensorSpec([2], tf.uint32),
        ],
        plan.mesh,
        in_shardings=[
            specs.map(lambda s: s.sharding(plan)),
            plan.activation_sharding(BSM),
            None,
        ],
        partitioner=partitioner,
        devices=topology_devices(topology),
    )
    kinds = collections.Counter(c.kind for c in program.collectives())
    assert kinds.pop("all-to-all") == 2
    assert set(kinds) <= {"all-reduce"}  # Of the statistics.
