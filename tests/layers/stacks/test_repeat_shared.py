"""What all layers of a repeated stack read: it gets the sum of their gradients."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import (
    Context,
    Mode,
    annotate_weights,
    initialize,
)
from meshwright.framework.modeling.recompute import Recompute
from meshwright.layers.stacks.repeat import Unroll
from tests.layers.stacks.repeated import (
    BSH,
    BSM,
    DEPTH,
    KEY,
    MASK,
    FeedForward,
    InARow,
    X,
    assert_close,
    operations,
    over_recompute,
    over_unroll,
    plan_of,
    repeat,
    specs,
)


class Reader(FeedForward):
    """Reads a memory that all layers share, as cross-attention does."""

    def fprop(self, ctx, theta, x, *, memory, mask):
        h = tf.einsum("bsm,mh->bsh", x, theta.w_in)
        key = tf.einsum("bsm,mh->bsh", tf.sin(memory["a"]), theta.w_in)
        h = ctx.split(h * key, BSH, name="hidden")
        y = ctx.split(tf.einsum("bsh,hm->bsm", h, theta.w_out), BSM)
        return ctx.split(x + tf.tanh(y) * ctx.cast(mask)[:, :, None], BSM)


def memory_gradients_of(layer, mesh_shape=(1, 1)):
    """(theta, x, memory) -> the gradients of a loss that reads `memory` itself too."""
    plan = plan_of(mesh_shape)
    mask = MASK.astype(np.int32)

    def fn(theta, x, memory):
        ctx = Context(plan=plan, mode=Mode.TRAIN)
        with tf.GradientTape() as tape:
            tape.watch((theta, x, memory))
            shared = ctx.split(2.0 * memory, BSM)
            theta_in = annotate_weights(plan, layer.weights(), theta)
            y = layer.fprop(ctx, theta_in, x, memory={"a": shared}, mask=mask)
            loss = tf.reduce_sum(y**2) + tf.reduce_sum(shared**3)
        return tape.gradient(loss, (theta, x, memory))

    return fn


def memory_arguments(layer):
    theta = initialize(layer.weights(), KEY).map(lambda w: w.numpy())
    return [theta, X, X[::-1].copy()]


@functools.cache
def memory_gradients_in_a_row(unroll, body=None):
    layer = InARow(body=body or Reader(), num_layers=DEPTH[unroll])
    args = tf.nest.map_structure(tf.constant, memory_arguments(layer))
    return memory_gradients_of(layer)(*args)


@over_unroll
@over_recompute
def test_what_the_layers_share_gets_the_sum_of_their_gradients(recompute, unroll):
    layer = repeat(Reader(), recompute, unroll=unroll)
    args = tf.nest.map_structure(tf.constant, memory_arguments(layer))
    assert_close(memory_gradients_of(layer)(*args), memory_gradients_in_a_row(unroll))


@over_unroll
def test_stacks_of_stacks_share_it_too(unroll):
    group = repeat(Reader(), Recompute.NOTHING, num_layers=2)
    layer = repeat(group, unroll=unroll)
    args = tf.nest.map_structure(tf.constant, memory_arguments(layer))
    want = memory_gradients_in_a_row(unroll, InARow(body=Reader(), num_layers=2))
    assert_close(memory_gradients_of(layer)(*args), want)


@pytest.mark.parametrize("partitioner", Partitioner)
def test_the_gradient_of_what_the_layers_share_on_eight_devices(partitioner):
    layer = repeat(Reader(), Recompute.NOTHING)
    args = memory_arguments(layer)
    program = compile_program(
        memory_gradients_of(layer, (2, 4)),
        specs(args),
        plan_of((2, 4)).mesh,
        partitioner=partitioner,
    )
    got = program.unshard(program(*args))
    assert_close(got, memory_gradients_in_a_row(Unroll.LOOP))


def test_what_follows_from_the_memory_alone_is_not_saved_for_each_layer():
    layer = repeat(Reader(), Recompute.NOTHING)
    names = operations(memory_gradients_of(layer), memory_arguments(layer))
    assert names["dot"] == 3 + 6  # The product of memory and weights is saved,
    assert names["sine"] == 2  # the sine of the memory is computed again.
