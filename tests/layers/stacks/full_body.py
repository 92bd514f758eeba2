"""A layer that has all that a stack's can have, pipelined and in a row.

Dims: B batch, S sequence, M model, H hidden.
"""

import dataclasses
import functools
import math
import re

import numpy as np
import tensorflow as tf

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
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineOrder
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat
from tests.layers.stacks.staged import by_stage

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
    stages,
    microbatches,
    repeats=1,
    mode=StageMode.VECTORIZED,
    *,
    deferred=(),
    order=PipelineOrder.FORWARD_FIRST,
    **stack,
):
    return Pipeline(
        deferred_gradients=deferred,
        order=order,
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


def in_a_row(microbatches, layers, theta, inputs):
    """Layer after layer, of each microbatch by itself, by TF's own kernels."""
    outs = []
    for m in range(microbatches):
        rows = inputs.map(lambda t, m=m: t[m::microbatches])
        x, aux = rows.x, []
        for i in range(layers):
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


def plain_theta(layers=LAYERS):
    return initialize(Repeat(body=Body(), num_layers=layers).weights(), key())


@functools.cache
def wanted(microbatches, layers=LAYERS):
    run = functools.partial(in_a_row, microbatches, layers)
    got = outputs_and_gradients(run, plain_theta(layers), INPUTS.map(tf.constant))
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
    layers = layer.stack.num_layers
    theta = by_stage(layer, plain_theta(layers)).map(lambda t: t.numpy())
    got = program.unshard(program(theta, INPUTS))
    got.theta = layer.plain_weights(got.theta.map(tf.constant))
    for path, want in wanted(layer.num_microbatches, layers).items_by_path():
        gradient = np.asarray(got.get_path(path))
        atol = 1e-5 * max(np.abs(want).max(), 1.0)
        np.testing.assert_allclose(gradient, want, rtol=0, atol=atol, err_msg=path)


VECTORIZED, MANUAL = StageMode
SHARDY, GSPMD = Partitioner
SAVED = {"recompute": Recompute.ALL_BUT_NAMED, "saved_names": ("hidden",)}
NOTHING = {"recompute": Recompute.NOTHING}


def assert_gradients_are_reduced_after_the_loops(program):
    """In them the statistic alone is, which is a mean and no sum."""
    reductions = [
        (bool(re.search(r"/while(_\d+)?/", c.op_name)), c.shapes)
        for c in program.collectives()
        if c.kind in ("all-reduce", "reduce-scatter") and "data" in "".join(c.axes)
    ]
    for shapes in (shapes for in_loop, shapes in reductions if in_loop):
        assert all(math.prod(shape) <= H for shape in shapes)
