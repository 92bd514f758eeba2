"""Pipelines with 1F1B's memory compute what their layers in a row do.

Dims: B batch, S sequence, M model.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.modeling import random
from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import (
    Context,
    Mode,
    WeightSpec,
    annotate_weights,
    initialize,
)
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.pipelines.one_f_one_b import LossHead
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineOrder
from tests.layers.stacks.full_body import (
    GSPMD,
    INPUTS,
    MANUAL,
    NOTHING,
    SAVED,
    SHARDY,
    B,
    M,
    S,
    key,
    pipeline,
    plain_theta,
    plan,
    wanted,
)
from tests.layers.stacks.staged import by_stage

one_f_one_b = functools.partial(pipeline, order=PipelineOrder.ONE_F_ONE_B)
HEAD = NestedMap(
    scale=WeightSpec(shape=(M,), dims=("model",), initializer=Constant(1.0))
)
FACTOR = 3.0  # Of the loss, in what is differentiated.


def of_rows(ctx, theta, x, rows):
    """The loss of `full_body.outputs_and_gradients`, and how many rows there were."""
    x = ctx.split(x, ("batch", "stream", "model"))
    count = tf.cast(tf.shape(x)[0], tf.float32)
    return tf.reduce_sum(x * theta.scale * rows.numbers), {"rows": count}


def loss_and_gradients(layer, plan, theta, scale, inputs, spec=HEAD, head=of_rows):
    ctx = Context(plan=plan, mode=Mode.TRAIN, key=key(), path="stack")
    numbers = random.normal(key(), [B, S, M])
    with tf.GradientTape() as tape:
        sources = [theta, scale, inputs.x, inputs.memory]
        tape.watch(sources)
        made = layer.loss(
            ctx,
            annotate_weights(plan, layer.weights(), theta),
            head=LossHead(
                ctx=Context(plan=plan, mode=Mode.TRAIN, key=key(), path="head"),
                fn=head,
                theta=annotate_weights(plan, spec, scale),
                specs=spec,
                rows=NestedMap(numbers=numbers),
                sums=("rows",),
                aux_loss=lambda aux: tf.reduce_sum(aux.loss),
            ),
            **inputs,
        )
        loss = FACTOR * made.loss
    theta, scale, x, memory = tape.gradient(loss, sources)
    return NestedMap(made=made, theta=theta, scale=scale, dx=x, dmemory=memory)


def compiled(layer, plan, partitioner=SHARDY):
    specs = [layer.weights(), HEAD]
    return compile_program(
        functools.partial(loss_and_gradients, layer, plan),
        [
            *(s.map(lambda s: tf.TensorSpec(s.shape)) for s in specs),
            INPUTS.map(lambda x: tf.TensorSpec(x.shape, x.dtype)),
        ],
        plan.mesh,
        in_shardings=[*(s.map(lambda s: s.sharding(plan)) for s in specs), None],
        partitioner=partitioner,
        name="pipeline",
    )


def assert_parity(layer, got):
    layers = layer.stack.num_layers
    want = wanted(layer.num_microbatches, layers)
    x = np.asarray(want.y.x) * random.normal(key(), [B, S, M]).numpy()
    expected = NestedMap(
        made=NestedMap(
            loss=x.sum() + want.y.aux.loss.sum(),
            sums=NestedMap(rows=np.float32(B)),
            aux=want.y.aux,
        ),
        theta=want.theta.map(lambda g: FACTOR * g),
        scale=NestedMap(scale=FACTOR * x.sum((0, 1))),
        dx=FACTOR * want.dx,
        dmemory=FACTOR * want.dmemory,
    )
    expected.theta.average = want.theta.average  # It is a value.
    got.theta = layer.plain_weights(got.theta.map(tf.constant))
    for path, value in expected.items_by_path():
        atol = 1e-5 * max(np.abs(value).max(), 1.0)
        np.testing.assert_allclose(
            got.get_path(path), value, rtol=0, atol=atol, err_msg=path
        )


# Stages, microbatches, repeats, mode; mesh; what is recomputed.
CASES = [
    ((2, 6), (2, 2, 2), {}, SHARDY),
    ((4, 3), (4, 1, 2), NOTHING, SHARDY),  # Fewer microbatches than stages.
    ((4, 6, 1, MANUAL), (4, 1, 2), SAVED, GSPMD),
    ((4, 6), (2, 2, 2), {}, SHARDY),  # Two stages to a device.
    ((2, 3, 2), (2, 2, 2), NOTHING, GSPMD),  # A group that is not full.
    ((2, 6, 4, MANUAL), (2, 2, 2), SAVED, SHARDY),
    ((4, 6), (4, 2, 1), {"num_layers": 6}, SHARDY),  # Two layers of a stage are none.
]
MORE = [  # Variants of these, as slow tests.
    ((2, 3), (2, 2, 2), NOTHING, GSPMD),
    ((4, 6), (4, 2, 1), SAVED, SHARDY),
    ((2, 6, 1, MANUAL), (2, 2, 2), NOTHING, SHARDY),
    ((1, 3), (1, 2, 4), {}, SHARDY),
    ((2, 6, 2), (2, 2, 2), {}, SHARDY),
    ((8, 1), (8, 1, 1), {}, SHARDY),
]


@pytest.mark.parametrize(
    "sizes,mesh,stack,partitioner",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=str,
)
def test_computes_what_its_layers_do_in_a_row(sizes, mesh, stack, partitioner):
    layer = one_f_one_b(*sizes, **stack)
    program = compiled(layer, plan(*mesh), partitioner)
    theta = by_stage(layer, plain_theta(layer.stack.num_layers))
    theta = theta.map(lambda t: t.numpy())
    scale = initialize(HEAD, key()).map(lambda t: t.numpy())
    assert_parity(layer, program.unshard(program(theta, scale, INPUTS)))


def run(layer, spec=HEAD, head=of_rows):
    theta, inputs = initialize(layer.weights(), key()), INPUTS.map(tf.constant)
    scale = initialize(spec, key())
    return loss_and_gradients(layer, plan(1, 1, 1), theta, scale, inputs, spec, head)


def without_its_loss():
    layer = one_f_one_b(2, 3)
    ctx = Context(mode=Mode.TRAIN, key=key(), path="encoder")
    return layer.fprop(ctx, initialize(layer.weights(), key()), **INPUTS)


def with_random_numbers(ctx, theta, x, rows):
    return tf.reduce_sum(x * random.normal(ctx.random_key(), x.shape)), {"rows": 0.0}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: one_f_one_b(2, 3, deferred=("w_in",)),
            r"Pipeline.deferred_gradients keep what .* Pipeline.order = "
            r"PipelineOrder.ONE_F_ONE_B keeps few: set one of them",
        ),
        (
            without_its_loss,
            r"'encoder': Pipeline.order is PipelineOrder.ONE_F_ONE_B, which needs the "
            r"loss of each microbatch .*: set Pipeline.order = %PipelineOrder.FORWARD_",
        ),
        (
            lambda: run(one_f_one_b(2, 5)),
            r"'stack': a batch of 12 does not divide into 5 microbatches",
        ),
        (
            lambda: run(
                one_f_one_b(2, 3),
                HEAD.map(lambda s: dataclasses.replace(s, statistic_decay=0.9)),
            ),
            r"'head': scale is a running statistic of what follows a pipeline",
        ),
        (
            lambda: run(one_f_one_b(1, 1, num_layers=1), head=with_random_numbers),
            r"'head' needs random numbers but the context has no key",
        ),
    ],
)
def test_what_has_no_loss_of_microbatches_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
