"""The stream split along the sequence between layers that split heads and hidden dims.

What they read of it is gathered and what they give is scattered, forward and backward.
"""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling.layer import Context, added_up, annotate_weights
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.basic.feed_forward import Activation
from meshwright.layers.basic.linear import BSM
from meshwright.layers.conformer import conformer_layer
from meshwright.layers.experts.gatings import Top2
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import transformer_layer

B, S, M = 4, 16, 8
SPLIT = {"heads": "tensor", "hidden": "tensor", "vocab": "tensor"}
X = np.random.default_rng(0).standard_normal([B, S, M], np.float32)


def plan_of(*unreduced_gradient_axes, stream=True, shape=(2, 4)):
    return ShardingPlan(
        mesh_axes=("data", "tensor"),
        mesh_shape=shape,
        weights=SPLIT,
        activations={"batch": "data", **SPLIT}
        | ({"stream": "tensor"} if stream else {}),
        unreduced_gradient_axes=unreduced_gradient_axes,
    )


PLAN = plan_of("tensor")
LAYER = transformer_layer(
    model_dims=M,
    hidden_dims=32,
    num_heads=4,
    head_dim=2,
    activation=Activation.GATED_SILU,
)


def gradients_under(plan, summed=True):
    """(weights, x, dy) -> gradients of the layer by weights and x."""

    def step(theta, x, dy):
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            read = annotate_weights(plan, LAYER.weights(), theta)
            y = LAYER.fprop(Context(plan=plan), read, x)
        dtheta, dx = tape.gradient(y, (theta, x), output_gradients=dy)
        if summed:
            dtheta = added_up(plan, LAYER.weights(), dtheta)
        return dtheta, dx

    return step


def arguments(plan):
    """Specs and shardings of the weights, x and dy."""
    weights = LAYER.weights()
    stream = plan.activation_sharding(BSM)
    by_path = weights.map_with_path(lambda path, spec: spec.sharding(plan, path))
    specs = [
        weights.map(lambda s: tf.TensorSpec(s.shape)),
        *[tf.TensorSpec(X.shape)] * 2,
    ]
    return specs, [by_path, stream, stream]


def typed(plan):
    specs, shardings = arguments(plan)
    weights = LAYER.weights()
    return mw.check_types(
        gradients_under(plan, summed=False),
        specs,
        plan.mesh,
        in_shardings=shardings,
        out_shardings=(
            weights.map(lambda spec: plan.read_sharding(spec.dims).dual()),
            shardings[1],
        ),
        dim_names=[weights.map(lambda spec: spec.dims), BSM, BSM],
    )


@pytest.mark.parametrize("stream", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("unreduced_gradient_axes", [(), ("data", "tensor")])
def test_a_layer_is_well_typed_with_its_gradients(stream, unreduced_gradient_axes):
    """As it is: nobody annotates what its norms return."""
    assert not typed(plan_of(*unreduced_gradient_axes, stream=stream)).errors


def test_types_say_what_is_gathered_and_what_is_scattered():
    program = typed(plan_of("data", "tensor"))
    split = "f32[batch@data, stream@tensor, model]"
    assert program.type_of("attention_norm/mul_1") == split
    assert program.type_of("attention/reshard") == (
        "f32[batch@data, stream, model]{R:tensor}"
    )
    assert program.type_of("attention/typed").endswith("{U:tensor}")
    assert program.type_of("attention/reshard_1") == "f32[4@data, 16@tensor, model]"
    assert program.type_of("0.attention.w_q") == "f32[model, 4@tensor, 2]{U:data}"
    assert program.type_of("0.attention_norm.scale") == "f32[model]{U:data,tensor}"


def moved(plan, partitioner):
    """How often what of the stream's size moves along the tensor axis, by kind."""
    specs, shardings = arguments(plan)
    program = mw.compile_program(
        gradients_under(plan),
        specs,
        plan.mesh,
        in_shardings=shardings,
        out_shardings=(shardings[0], shardings[1]),
        partitioner=partitioner,
    )
    counts = collections.Counter()
    for collective in program.collectives():
        if collective.axes == ("tensor",):
            sizes = [np.prod(shape) for shape in collective.shapes]
            counts[collective.kind] += sum(size > 2 * M for size in sizes)
    return {kind: int(count) for kind, count in counts.items() if count}


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_each_transition_is_one_collective_of_its_kind(partitioner):
    """In and out of two parts, there and back; the last way out has no reader here."""
    want = {"all-gather": 4, "reduce-scatter": 3}
    assert moved(PLAN, partitioner) == want
    # Left to the CPU's compiler, sums are whole on each device and then cut.
    assert "reduce-scatter" not in moved(plan_of(), partitioner)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_gradients_of_a_whole_stream_are_added_up_once(partitioner):
    """Of queries, keys and values; and of both products of a gated feed-forward."""
    typed_, plain = (
        moved(plan_of(*axes, stream=False), partitioner) for axes in (("tensor",), ())
    )
    assert typed_ == {"all-reduce": 3}
    assert plain == {"all-reduce": 6}


SIZES = {"model_dims": M, "num_heads": 4, "head_dim": 2}
EXPERTS = MoE(
    gating=Top2(model_dims=M, num_experts=2),
    experts=ExpertFeedForward(model_dims=M, num_experts=2, hidden_dims=32),
)
LAYERS = {
    "dropout": transformer_layer(**SIZES, hidden_dims=32, dropout_rate=0.1),
    "heads_that_do_not_divide": transformer_layer(
        **SIZES | {"num_heads": 3}, hidden_dims=30, positions=PositionKind.RELATIVE
    ),
    "conformer": conformer_layer(**SIZES, hidden_dims=32, window=3),
    "experts": transformer_layer(**SIZES, feed_forward=EXPERTS),
}
CASES = itertools.product(LAYERS, ("SHARDY", "GSPMD"))
MARKS = dict.fromkeys(CASES, [pytest.mark.slow])
MARKS |= {("dropout", "GSPMD"): [], ("experts", "SHARDY"): []}
MARKS |= {("conformer", "GSPMD"): [pytest.mark.always]}


@pytest.mark.parametrize(
    "name,partitioner", [pytest.param(*case, marks=MARKS[case]) for case in MARKS]
)
def test_a_layer_computes_what_it_does_on_one_device(name, partitioner):
    partitioner = mw.Partitioner[partitioner]
    assert_layer_parity(LAYERS[name], X, plan=PLAN, partitioner=partitioner)


@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
@pytest.mark.parametrize("unreduced", [(), ("tensor",)], ids=["sum", "unreduced"])
def test_what_is_gathered_may_be_saved(unreduced, partitioner):
    """The stream as products read it, and what they give as it is scattered."""
    stack = Repeat(
        body=LAYER,
        num_layers=2,
        recompute=Recompute.ALL_BUT_NAMED,
        saved_names=("attention_in", "attention_out", "feed_forward_in", "hidden"),
    )
    partitioner = mw.Partitioner[partitioner]
    assert_layer_parity(stack, X, plan=plan_of(*unreduced), partitioner=partitioner)


def test_what_does_not_divide_is_still_right():
    """Neither heads nor hidden units, nor the sequence."""
    layer = LAYERS["heads_that_do_not_divide"]
    assert_layer_parity(layer, X[:, :11], plan=PLAN)


def test_a_decoder_reads_its_memory_whole():
    layer = transformer_layer(**SIZES, hidden_dims=32, has_memory=True)
    assert_layer_parity(layer, X, plan=PLAN, memory=np.tanh(X[:, ::2]))


@pytest.mark.parametrize(
    "partitioner",
    [
        pytest.param("GSPMD", marks=pytest.mark.always),
        pytest.param("SHARDY", marks=pytest.mark.slow),
    ],
)
def test_in_a_pipeline_gradients_are_whole(partitioner):
    layer = Pipeline(
        stack=Repeat(body=LAYER, num_layers=2), num_stages=2, num_microbatches=2
    )
    plan = dataclasses.replace(
        PLAN,
        mesh_axes=("stage", "data", "tensor"),
        mesh_shape=(2, 2, 2),
        weights={**SPLIT, "stages": "stage"},
    )
    assert_layer_parity(layer, X, plan=plan, partitioner=mw.Partitioner[partitioner])
