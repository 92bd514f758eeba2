"""Pipelines equal their layers in a row, however they are cut, run and split.

Dims: B batch, S sequence, M model, H hidden, E experts.
"""

import collections
import dataclasses
import functools
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling import random
from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    WeightSpec,
    annotate_weights,
    as_gradient,
    initialize,
)
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.experts.gatings import Switch
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat, Unroll
from meshwright.layers.transformer import transformer_layer
from tests.layers.stacks.staged import Staged, by_stage

B, S, M, H, LAYERS = 12, 2, 8, 8, 8
RNG = np.random.default_rng(0)
INPUTS = NestedMap(
    x=RNG.standard_normal([B, S, M], np.float32),
    memory=RNG.standard_normal([B, M], np.float32),
    segment_ids=RNG.integers(0, 3, [B, S]).astype(np.int32),
)
BSH = ("batch", "sequence", "hidden")


def key():
    return random.key_from_seed(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body(Layer):
    """All that a stack's layer can have: dropout, masks, memory, aux, a statistic."""

    def weights(self):
        def weight(*dims, **kwargs):
            shape = tuple({"model": M, "hidden": H}[d] for d in dims)
            return WeightSpec(shape=shape, dims=dims, initializer=FanIn(), **kwargs)

        return NestedMap(
            w_in=weight("model", "hidden"),
            w_out=weight("hidden", "model"),
            average=weight("hidden", statistic_decay=0.9),
        )

    def fprop(self, ctx, theta, x, *, memory, segment_ids, absent=None):
        assert absent is None
        h = tf.nn.relu(tf.einsum("bsm,mh->bsh", x + memory[:, None], theta.w_in))
        h = ctx.split(h, BSH, name="hidden")
        rows = tf.reduce_mean(h, [0, 1])
        h = as_gradient(h, theta.average, rows)
        h *= tf.cast(segment_ids > 0, tf.float32)[..., None]
        if ctx.key is not None:
            h *= 2 * random.uniform(ctx.random_key(), h.shape)
        y = ctx.split(x + tf.einsum("bsh,hm->bsm", h, theta.w_out), (*BSH[:2], "model"))
        sums = NestedMap(tokens=tf.reduce_sum(tf.cast(segment_ids > 0, tf.float32)))
        return NestedMap(x=y, aux=NestedMap(loss=tf.reduce_mean(h * h), sums=sums))


def pipeline(
    stages, microbatches, repeats=1, mode=StageMode.VECTORIZED, *, deferred=(), **stack
):
    return Pipeline(
        deferred_gradients=deferred,
        stack=Repeat(**{"body": Body(), "num_layers": LAYERS, **stack}),
        num_stages=stages,
        num_microbatches=microbatches,
        num_repeats=repeats,
        stage_mode=mode,
    )


def plan(*mesh, **activations):
    return ShardingPlan(
        mesh_axes=("stage", "data", "model"),
        mesh_shape=mesh,
        weights={"stages": "stage", "hidden": "model"},
        activations={
            "batch": ("data", "stage"),
            "microbatch": "data",
            "hidden": "model",
            **activations,
        },
    )


def outputs_and_gradients(run, theta, inputs):
    """Of a loss that depends on every element, and on `aux`."""
    with tf.GradientTape() as tape:
        sources = [theta, inputs.x, inputs.memory]
        tape.watch(sources)
        y = run(theta, inputs)
        numbers = random.normal(key(), y.x.shape)
        loss = tf.reduce_sum(y.x * numbers) + tf.reduce_sum(y.aux.loss)
    theta, x, memory = tape.gradient(loss, sources)
    return NestedMap(y=y, theta=theta, dx=x, dmemory=memory)


def in_a_row(microbatches, theta, inputs):
    """Layer after layer, of each microbatch by itself, by TF's own kernels."""
    outs = []
    for m in range(microbatches):
        rows = inputs.map(lambda t, m=m: t[m::microbatches])
        x, aux = rows.x, []
        for i in range(LAYERS):
            own_key = random.fold_in(random.fold_in(key(), i), m)
            ctx = Context(mode=Mode.TRAIN, key=own_key, path="stack")
            y = Body().fprop(ctx, theta.map(lambda w, i=i: w[i]), **{**rows, "x": x})
            x = y.x
            aux.append(y.aux)
        outs.append(NestedMap(x=x, aux=aux[0].map(lambda *t: tf.stack(t), *aux[1:])))
    x = tf.reshape(tf.stack([out.x for out in outs], axis=1), inputs.x.shape)
    pairs = [(out.aux.loss, out.aux.sums.tokens) for out in outs]
    loss, tokens = (tf.stack(t) for t in zip(*pairs, strict=True))
    sums = NestedMap(tokens=tf.reduce_sum(tokens, 0))
    return NestedMap(x=x, aux=NestedMap(loss=tf.reduce_mean(loss, 0), sums=sums))


def plain_theta():
    return initialize(Repeat(body=Body(), num_layers=LAYERS).weights(), key())


@functools.cache
def wanted(microbatches):
    run = functools.partial(in_a_row, microbatches)
    got = outputs_and_gradients(run, plain_theta(), INPUTS.map(tf.constant))
    # The statistic of a batch is the mean of its microbatches'.
    got.theta.average /= microbatches
    return got.map(lambda t: t.numpy())


def compiled(layer, plan, partitioner=Partitioner.SHARDY):
    specs = layer.weights()

    def run(theta, inputs):
        ctx = Context(plan=plan, mode=Mode.TRAIN, key=key(), path="stack")
        return layer.fprop(ctx, annotate_weights(plan, specs, theta), **inputs)

    return compile_program(
        functools.partial(outputs_and_gradients, run),
        [
            specs.map(lambda s: tf.TensorSpec(s.shape)),
            INPUTS.map(lambda x: tf.TensorSpec(x.shape, x.dtype)),
        ],
        plan.mesh,
        in_shardings=[specs.map(lambda s: s.sharding(plan)), None],
        partitioner=partitioner,
        name="pipeline",
    )


def assert_parity(layer, program):
    theta = by_stage(layer, plain_theta()).map(lambda t: t.numpy())
    got = program.unshard(program(theta, INPUTS))
    got.theta = layer.plain_weights(got.theta.map(tf.constant))
    for path, want in wanted(layer.num_microbatches).items_by_path():
        gradient = np.asarray(got.get_path(path))
        atol = 1e-5 * max(np.abs(want).max(), 1.0)
        np.testing.assert_allclose(gradient, want, rtol=0, atol=atol, err_msg=path)


VECTORIZED, MANUAL = StageMode
SHARDY, GSPMD = Partitioner
SAVED = {"recompute": Recompute.ALL_BUT_NAMED, "saved_names": ("hidden",)}
NOTHING = {"recompute": Recompute.NOTHING}
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


def assert_gradients_are_reduced_after_the_loops(program):
    """In them the statistic alone is, which is a mean and no sum."""
    reductions = [
        (bool(re.search(r"/while(_\d+)?/", c.op_name)), c.shapes)
        for c in program.collectives()
        if c.kind in ("all-reduce", "reduce-scatter") and "data" in "".join(c.axes)
    ]
    for shapes in (shapes for in_loop, shapes in reductions if in_loop):
        assert all(math.prod(shape) <= H for shape in shapes)


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
    assert any("test_pipeline.py" in line for line in lines), lines


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
        (
            lambda: pipeline(3, 3),
            r"8 layers do not divide into 3 stages with 1 repeats: change Repeat.num_",
        ),
        (lambda: pipeline(4, 3, 4), r"into 4 stages with 4 repeats: .* multiple of 16"),
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
            r"'stack': a batch of 12 does not divide into 5 microbatches: change the "
            r"global batch or Pipeline.num_microbatches",
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
