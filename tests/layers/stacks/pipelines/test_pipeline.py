"""Pipelines equal their layers in a row, however they are cut, run and split.

Dims: B batch, S sequence, M model, H hidden, E experts.
"""

import collections
import dataclasses
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    WeightSpec,
    annotate_weights,
    initialize,
)
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.experts.gatings import Switch
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat, Unroll
from meshwright.layers.transformer import transformer_layer
from tests.layers.stacks.full_body import (
    GSPMD,
    INPUTS,
    LAYERS,
    MANUAL,
    NOTHING,
    SAVED,
    SHARDY,
    VECTORIZED,
    B,
    Body,
    H,
    M,
    S,
    assert_gradients_are_reduced_after_the_loops,
    assert_parity,
    compiled,
    key,
    outputs_and_gradients,
    pipeline,
    plain_theta,
    plan,
    wanted,
)
from tests.layers.stacks.staged import Staged, by_stage

CASES = [  # Stages, microbatches, repeats, mode; mesh; what is recomputed.
    ((1, 3), (1, 2, 4), {}, SHARDY),
    ((2, 2), (2, 2, 2), NOTHING, GSPMD),
    ((2, 3, 2), (2, 2, 2), SAVED, SHARDY),
    ((2, 6, 1, MANUAL), (2, 2, 2), NOTHING, SHARDY),
    ((2, 3, 2, MANUAL), (2, 2, 2), {}, GSPMD),
    ((4, 6), (4, 2, 1), {}, GSPMD),
    ((4, 2, 1, MANUAL), (4, 1, 2), SAVED, GSPMD),
    ((4, 3, 2), (2, 2, 2), {}, SHARDY),  # Two stages to a device.
    ((4, 6, 2, MANUAL), (2, 2, 2), NOTHING, SHARDY),
    ((8, 12), (8, 1, 1), SAVED, SHARDY),
    ((8, 4, 1, MANUAL), (8, 1, 1), {}, GSPMD),
    ((4, 4, 2), (1, 1, 1), {}, SHARDY),
]


@pytest.mark.parametrize("sizes,mesh,stack,partitioner", CASES, ids=str)
def test_equals_its_layers_in_a_row(sizes, mesh, stack, partitioner):
    layer = pipeline(*sizes, **stack)
    program = compiled(layer, plan(*mesh), partitioner)
    assert_parity(layer, program)
    if mesh[0] > 1:
        assert_one_permute_each_way(layer, program)
    if layer.stage_mode is VECTORIZED:
        assert_gradients_are_reduced_after_the_loops(program)


def assert_one_permute_each_way(layer, program):
    """Nothing else goes between stages; loops run as often as the schedule says."""
    between = [
        c
        for c in program.collectives()
        if re.search(r"/while(_\d+)?/", c.op_name) and "stage" in "".join(c.axes)
    ]
    # GSPMD gathers some words of random bits.
    counts = collections.Counter(c.kind for c in between if c.dtypes != ("u32",))
    assert counts == {"collective-permute": 2}
    trips = re.findall(r'known_trip_count[":{n]*(\d+)', program.hlo_text())
    in_a_row = layer.layers_of_stage // layer.num_repeats
    inner = [str(in_a_row)] * 2 if in_a_row > 1 else []
    assert sorted(trips) == sorted([str(layer.schedule.iterations)] * 2 + inner)


DEFERRED = [
    ((2, 3), (2, 2, 2), {}, SHARDY),
    ((2, 3, 2), (2, 2, 2), SAVED, SHARDY),
    ((4, 6, 2), (4, 2, 1), NOTHING, SHARDY),
    ((2, 6, 1, MANUAL), (2, 2, 2), NOTHING, SHARDY),
    ((2, 3, 2), (2, 2, 2), NOTHING, GSPMD),
    ((4, 3, 2), (2, 2, 2), {}, GSPMD),
]


@pytest.mark.parametrize("sizes,mesh,stack,partitioner", DEFERRED, ids=str)
def test_deferred_gradients_are_the_same(sizes, mesh, stack, partitioner):
    layer = pipeline(*sizes, deferred=("w_.*",), **stack)
    program = compiled(layer, plan(*mesh), partitioner)
    assert_parity(layer, program)
    if layer.stage_mode is VECTORIZED:
        assert_gradients_are_reduced_after_the_loops(program)


@pytest.mark.parametrize("partitioner", Partitioner)
def test_of_some_weights_gradients_stay_in_the_loop(partitioner):
    layer = pipeline(2, 3, 2, deferred=("w_out",))
    program = compiled(layer, plan(2, 2, 2), partitioner)
    assert_parity(layer, program)
    assert_gradients_are_reduced_after_the_loops(program)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubling(Layer):
    """Splits what has a gradient of its own, as a Conformer's convolution does."""

    def weights(self):
        shape, dims = (M, M), ("model", "hidden")
        return NestedMap(w=WeightSpec(shape=shape, dims=dims, initializer=FanIn()))

    def fprop(self, ctx, theta, x):
        twice = tf.custom_gradient(lambda x: (2 * x, lambda dy: 2 * dy))
        h = ctx.split(twice(x), ("batch", "sequence", "model"))
        return x + tf.tanh(tf.einsum("bsm,mh->bsh", h, theta.w))


@pytest.mark.parametrize("recompute", [{}, NOTHING], ids=str)
def test_a_factor_with_a_gradient_of_its_own_is_deferred(recompute):
    on = plan(2, 2, 2)

    weights = initialize(pipeline(2, 3, body=Doubling()).weights(), key())

    def gradients(deferred):
        layer = pipeline(2, 3, deferred=deferred, body=Doubling(), **recompute)

        def step(theta, x):
            ctx = Context(plan=on, mode=Mode.TRAIN, key=key(), path="stack")
            with tf.GradientTape() as tape:
                tape.watch((theta, x))
                y = layer.fprop(ctx, theta, x)
            return tape.gradient(y, (theta, x), output_gradients=y)

        args = [weights, INPUTS.x]
        specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape), args)
        return tf.nest.flatten(compile_program(step, specs, on.mesh)(*args))

    for got, expected in zip(gradients(("w",)), gradients(()), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_deferred_gradient_is_a_product_after_the_backward_loop():
    for deferred, in_loop in [((), 2), (("w_out",), 1), (("w_.*",), 0)]:
        layer = pipeline(2, 6, deferred=deferred)
        module = HloModule(compiled(layer, plan(2, 1, 1)).hlo_text())
        times = [
            math.prod(loop.trips for loop in module.loops_around(dot.computation))
            for dot in module.by_name.values()
            if dot.opcode == "dot" and dot.shape == (M, H)
        ]
        per_layer, each = layer.layers_of_stage, layer.schedule.iterations
        want = [per_layer] * (2 - in_loop) + [per_layer * each] * in_loop
        assert sorted(times) == want


def test_says_what_it_saves_for_deferred_gradients():
    """By layer, one entry for all bubbles; and what the loop makes for them."""
    layer, split = pipeline(2, 3, 2, deferred=("w_out",)), plan(2, 2, 2)
    ctx = Context(plan=split, mode=Mode.TRAIN, key=key(), path="stack")
    with tf.Graph().as_default():
        saved = layer.saved(ctx, **INPUTS.map(tf.constant))
    rows, each = B // 3, layer.layers_of_stage * layer.schedule.slots + 1
    # The layer's input; the hidden units and the output's gradient; inputs' gradients.
    kept = [(rows, S, M, each), (rows, S, H, each), (rows, S, M, each)]
    kept.append((rows, S, M, layer.schedule.slots))
    assert [(*stack.tensor.spec.shape, stack.count) for stack in saved.stacks] == kept


@pytest.mark.always
@pytest.mark.parametrize(
    ("mode", "partitioner"), [(VECTORIZED, GSPMD), (MANUAL, SHARDY)]
)
def test_experts_compute_in_a_pipeline_what_they_do_in_a_row(mode, partitioner):
    """Tokens go to the experts' devices in each stage, each microbatch by itself."""
    experts = MoE(
        gating=Switch(model_dims=M, num_experts=4),
        experts=ExpertFeedForward(model_dims=M, num_experts=4, hidden_dims=H),
    )
    layer = pipeline(2, 2, mode=mode, body=experts, num_layers=2)
    split = ShardingPlan(
        mesh_axes=("stage", "data"),
        mesh_shape=(2, 4),
        weights={"stages": "stage", "experts": "data"},
        activations={
            "batch": ("data", "stage"),
            "microbatch": "data",
            "experts": "data",
        },
    )
    x = np.random.default_rng(0).standard_normal([16, 2 * S, M], np.float32)
    staged = Staged(pipeline=layer)
    assert_layer_parity(staged, x, plan=split, partitioner=partitioner)


def test_evaluates_what_it_trains():
    layer, split = pipeline(2, 3, 2), plan(2, 2, 2)
    specs = layer.weights()

    def run(mode):
        def outputs(theta, inputs):
            ctx = Context(plan=split, mode=mode)
            theta = annotate_weights(split, specs, theta)
            return layer.fprop(ctx, theta, **inputs, absent=None)

        return outputs

    theta = by_stage(layer, plain_theta())
    inputs = INPUTS.map(tf.constant)
    got, want = (run(mode)(theta, inputs) for mode in (Mode.EVAL, Mode.TRAIN))
    for path, value in want.items_by_path():
        gradient = got.get_path(path)
        np.testing.assert_allclose(gradient, value, rtol=1e-6, err_msg=path)


def test_says_what_it_saves():
    """In every iteration, bubbles too; and the gradients of its input."""
    layer, split = pipeline(2, 3, 2, **SAVED), plan(2, 2, 2)
    ctx = Context(plan=split, mode=Mode.TRAIN, key=key(), path="stack")
    with tf.Graph().as_default():
        saved = layer.saved(ctx, **INPUTS.map(tf.constant))
    rows = B // 3
    each = layer.schedule.iterations * layer.layers_of_stage // 2
    kept = [(rows, S, M, each), (rows, S, H, each), (rows, S, M, layer.schedule.slots)]
    assert [(*stack.tensor.spec.shape, stack.count) for stack in saved.stacks] == kept
    assert {(s.stages, s.stage_axes) for s in saved.stacks} == {(2, ("stage",))}
    by_layer = tf.TensorSpec([LAYERS])
    aux = NestedMap(loss=by_layer, sums=NestedMap(tokens=by_layer))
    assert saved.result == NestedMap(x=tf.TensorSpec(INPUTS.x.shape), aux=aux)


def test_statistics_of_bubbles_do_not_count():
    """In most iterations of this one most stages have no microbatch."""
    layer = pipeline(8, 1)
    want = wanted(1).theta.average
    ctx = Context(mode=Mode.TRAIN, key=key(), path="stack")
    theta = by_stage(layer, plain_theta())
    run = lambda theta, inputs: layer.fprop(ctx, theta, **inputs)  # noqa: E731
    theta_gradients = outputs_and_gradients(run, theta, INPUTS.map(tf.constant)).theta
    got = layer.plain_weights(theta_gradients).average
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_names_its_layers_and_lines():
    program = compiled(pipeline(2, 2), plan(2, 2, 2))
    sums = [c for c in program.collectives() if c.kind == "all-reduce"]
    sources = [program.sources.find(c.op_name) for c in sums]
    lines = {str(source) for source in sources if source is not None}
    assert any("full_body.py" in line for line in lines), lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(Layer):
    """Has an op whose output's shape depends on values."""

    def fprop(self, ctx, theta, x):
        return x + tf.cast(tf.size(tf.where(x > 0)), x.dtype)


def run_small(layer, plan=None, x=INPUTS.x, **inputs):
    theta = initialize(layer.weights(), key())
    ctx = Context(plan=plan or ShardingPlan(), mode=Mode.TRAIN, key=key(), path="stack")
    return layer.fprop(ctx, theta, tf.convert_to_tensor(x), **inputs)


def odd():
    run = tf.function(run_small, autograph=False)
    return run(pipeline(2, 2, body=Odd()))


ROWS = {"memory": INPUTS.memory, "segment_ids": INPUTS.segment_ids}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: pipeline(0, 3), r"num_stages is 0; it must be a whole number of at"),
        (lambda: pipeline(2, "2"), r"num_microbatches is '2'; it must be a whole n"),
        (
            lambda: Pipeline(stack=Body(), num_stages=2, num_microbatches=2),
            r"Pipeline.stack is Body\(\); it must be of class Repeat, such as @R",
        ),
        (
            lambda: pipeline(2, 2, mode="manual"),
            r"stage_mode is 'manual'; it must be one of StageMode.VECTORIZED, ",
        ),
        (
            lambda: pipeline(2, 2, unroll=Unroll.UNROLLED),
            r"a pipeline is a loop, set Repeat.unroll = %Unroll.LOOP",
        ),
        (
            lambda: pipeline(2, 2, deferred=("w_in", "attention.*")),
            r"deferred_gradients has 'attention.\*', which fits no weight of a layer; "
            r"it has average, w_in, w_out",
        ),
        (
            lambda: run_small(pipeline(2, 2, deferred=("w_in", "average")), **ROWS),
            r"'stack': deferred_gradients has 'average', but no weight that it fits .*"
            r" is one product .*: leave it out; such weights are w_in$",
        ),
        (
            lambda: run_small(pipeline(2, 5), **ROWS),
            r"'stack': a batch of 12 does not divide into 5 microbatches, and layers "
            r"compute aux.loss, aux.sums.tokens, average of all rows of a microbatch: "
            r"change the global batch or Pipeline.num_microbatches",
        ),
        (
            lambda: run_small(pipeline(2, 2), **{**ROWS, "memory": tf.ones([M])}),
            r"'stack': a pipeline divides its inputs by rows, but one has shape \(8,\)",
        ),
        (
            lambda: run_small(pipeline(2, 2), plan(4, 1, 2), **ROWS),
            r"2 stages do not divide by the 4 devices along stage of the mesh",
        ),
        (
            lambda: run_small(pipeline(2, 4), plan(2, 4, 1), **ROWS),
            r"4 microbatches of a batch of 12 have 3 rows each, which do not divide "
            r"over the 4 devices along data: take fewer microbatches or a larger glob",
        ),
        (
            lambda: run_small(
                pipeline(2, 2),
                ShardingPlan(mesh_shape=(2, 4), activations={"batch": "X"}),
                **ROWS,
            ),
            r"the plan's weights name no axis for 'stages', so that each device w",
        ),
        (
            lambda: run_small(pipeline(2, 2), plan(2, 2, 2, hidden="stage"), **ROWS),
            r"dim 'hidden' is split by mesh axis stage, which has the stages of the "
            r"pipeline around it: split it by another axis",
        ),
        (
            lambda: run_small(
                pipeline(2, 2), plan(2, 2, 2, microbatch=("data", "stage")), **ROWS
            ),
            r"dim 'microbatch' is split by mesh axis stage, .* add activations",
        ),
        (odd, r"TF cannot vectorize Where \(op '.*'\): use StageMode.MANUAL"),
    ],
)
def test_what_makes_no_pipeline_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_decodes_token_by_token_as_its_stack():
    sizes = {"model_dims": M, "num_heads": 2, "head_dim": 4}
    stack = Repeat(body=transformer_layer(**sizes, hidden_dims=H), num_layers=4)
    layer = Pipeline(stack=stack, num_stages=2, num_microbatches=3, num_repeats=2)
    theta = initialize(stack.weights(), key())
    x = tf.constant(INPUTS.x)
    want = stack.fprop(Context(), theta, x)
    staged = by_stage(layer, theta)
    np.testing.assert_allclose(layer.fprop(Context(), staged, x), want, atol=1e-5)
    cache = layer.init_cache(Context(), B, S)
    for i in range(S):
        token = x[:, i : i + 1]
        y, cache = layer.step(Context(), staged, token, cache, tf.constant(i))
        np.testing.assert_allclose(y[:, 0], want[:, i], atol=1e-5)
