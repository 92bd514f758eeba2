"""One bias of relative positions for all layers, against a copy for each of them."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.mask_rules import MaskKind, NearMask
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat, Unroll
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.stacks.shared_bias import SharedRelativeBias
from meshwright.layers.transformer import transformer_layer
from tests.layers.attention.on_devices import (
    PLAN,
    SEQUENCE_PARALLEL,
    gradients_of,
    some_of,
)
from tests.trainers.parity import initial_state, small_experiment, train

B, S, M, N, L, BUCKETS = 4, 19, 8, 4, 3, 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M], np.float32)
SEGMENTS = (np.arange(S) // 7).astype(np.int32)[None].repeat(B, 0)
PLANS = {
    "one device": dataclasses.replace(PLAN, mesh_shape=(1, 1)),
    "tensor": PLAN,
    "sequence": SEQUENCE_PARALLEL,
    "data": dataclasses.replace(
        PLAN, mesh_shape=(8, 1), unreduced_gradient_axes=("data",)
    ),
}


def layer_of(positions=PositionKind.SHARED, block_size=4, **kwargs):
    sizes = {"model_dims": M, "num_heads": N, "head_dim": 2, "hidden_dims": 16}
    return transformer_layer(
        **sizes | kwargs, positions=positions, block_size=block_size
    )


def shared(num_layers=L, recompute=Recompute.EVERYTHING, unroll=Unroll.LOOP, **kwargs):
    stack = Repeat(
        body=layer_of(**kwargs),
        num_layers=num_layers,
        recompute=recompute,
        unroll=unroll,
    )
    return SharedRelativeBias(stack=stack, num_buckets=BUCKETS)


def with_copies(layer):
    """The stack whose layers have biases of their own."""
    body = layer.stack.body
    attention = dataclasses.replace(
        body.attention, positions=PositionKind.RELATIVE, num_buckets=BUCKETS
    )
    body = dataclasses.replace(body, attention=attention)
    return dataclasses.replace(layer.stack, body=body)


def copied(theta):
    """The weights of a stack whose layers have copies of the shared bias."""
    copies = tf.stack([theta.relative_bias] * L)
    attention = theta.stack.attention | {"relative_bias": copies}
    return NestedMap(theta.stack | {"attention": attention})


def summed(gradients):
    """The gradients of copies, as those of a shared bias."""
    attention = dict(gradients.attention)
    bias = tf.reduce_sum(attention.pop("relative_bias"), 0)
    return NestedMap(
        relative_bias=bias, stack=NestedMap(gradients | {"attention": attention})
    )


def weights_of(layer):
    """With a bias that makes a difference."""
    theta = initialize(layer.weights(), key_from_seed(0))
    return NestedMap(theta | {"relative_bias": 50 * theta.relative_bias})


def gradients(layer, theta, x, **inputs):
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(1))
    with tf.GradientTape() as tape:
        tape.watch((theta, x))
        y = layer.fprop(ctx, theta, x, **inputs)
    return y, *tape.gradient(y, (theta, x), output_gradients=tf.sin(y))


compiled = functools.partial(tf.function, jit_compile=True, autograph=False)


def assert_close(got, want, tolerance=1e-5):
    tf.nest.assert_same_structure(got, want)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        scale = max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


MASKS = {
    "causal": MaskKind.CAUSAL,
    "full": MaskKind.FULL,
    "window": NearMask(left=5, right=0),
}


@pytest.mark.parametrize(
    "mask,block_size,unroll",
    some_of(
        itertools.product(MASKS, (Blocks.NONE, 4), Unroll),
        (
            ("causal", 4, Unroll.LOOP),
            ("full", Blocks.NONE, Unroll.LOOP),
            ("full", 4, Unroll.UNROLLED),
            ("window", 4, Unroll.LOOP),
        ),
    ),
)
def test_five_steps_are_those_of_copies_with_summed_gradients(mask, block_size, unroll):
    layer = shared(unroll=unroll, mask=MASKS[mask], block_size=block_size)
    copies = with_copies(layer)
    x, segments = tf.constant(X), tf.constant(SEGMENTS)

    @compiled
    def step(theta):
        y, dtheta, dx = gradients(layer, theta, x, segment_ids=segments)
        return y, dtheta, dx

    @compiled
    def step_of_copies(theta):
        y, dtheta, dx = gradients(copies, copied(theta), x, segment_ids=segments)
        return y, summed(dtheta), dx

    theta = other = weights_of(layer)
    for _ in range(5):
        got, want = step(theta), step_of_copies(other)
        assert_close(got, want)
        assert np.abs(want[1].relative_bias).max() > 1e-2
        theta, other = (
            t.map(lambda w, g: w - 1e-3 * g, out[1])
            for t, out in ((theta, got), (other, want))
        )
    assert_close(theta, other)


@functools.cache
def on_one_device(block_size):
    layer = shared(block_size=block_size)
    _, *grads = compiled(gradients_of_square)(layer, weights_of(layer), tf.constant(X))
    return grads


def gradients_of_square(layer, theta, x):
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(1))
    with tf.GradientTape() as tape:
        tape.watch((theta, x))
        y = with_copies(layer).fprop(ctx, copied(theta), x)
    return y, *tape.gradient(y, (theta, x), output_gradients=y)


@pytest.mark.parametrize(
    "plan,block_size,partitioner",
    some_of(
        itertools.product(PLANS, (Blocks.NONE, 4), ("SHARDY", "GSPMD")),
        (
            ("one device", 4, "SHARDY"),
            ("one device", Blocks.NONE, "GSPMD"),
            ("tensor", 4, "GSPMD"),
            ("tensor", Blocks.NONE, "SHARDY"),
            ("sequence", 4, "SHARDY"),
            ("sequence", Blocks.NONE, "GSPMD"),
            ("data", 4, "GSPMD"),
            ("data", Blocks.NONE, "SHARDY"),
        ),
    ),
)
def test_gradients_on_devices_are_those_of_copies_on_one(plan, block_size, partitioner):
    layer = shared(block_size=block_size)
    program = gradients_of(layer, PLANS[plan], X.shape, mw.Partitioner[partitioner])
    theta = weights_of(layer).map(lambda t: t.numpy())
    args = (theta, X, key_from_seed(1).numpy())
    assert_close(list(program.unshard(program(*args))), on_one_device(block_size))


def test_the_gradient_of_the_bias_has_its_dtype_where_activations_have_another():
    layer = shared()
    theta = weights_of(layer)
    ctx = Context(mode=Mode.TRAIN, activation_dtype=tf.bfloat16)

    @compiled
    def gradient(bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            x = tf.cast(X, tf.bfloat16)
            y = layer.fprop(ctx, NestedMap(theta | {"relative_bias": bias}), x)
        return tape.gradient(y, bias, output_gradients=y)

    got = gradient(theta.relative_bias)
    assert got.dtype == tf.float32 and np.isfinite(got).all() and np.any(got)


def test_a_decoders_stack_says_token_by_token_what_it_says_of_all():
    layer = shared(num_layers=2, has_memory=True)
    theta, ctx = weights_of(layer), Context()
    x, memory = tf.constant(X[:, :6]), tf.constant(np.tanh(X[:, 6:]))

    @compiled
    def at_once():
        return layer.fprop(ctx, theta, x, memory=memory)

    @compiled
    def steps():
        encoded = layer.encode_memory(ctx, theta, memory)
        paddings = tf.zeros(memory.shape[:2], tf.int32)
        cache, out = layer.init_cache(ctx, B, 6), []
        for t in range(6):
            given = {"memory": encoded, "memory_paddings": paddings}
            token = x[:, t : t + 1]
            y, cache = layer.step(ctx, theta, token, cache, tf.constant(t), **given)
            out.append(y)
        return tf.concat(out, axis=1)

    np.testing.assert_allclose(steps(), at_once(), rtol=1e-4, atol=1e-5)


TRAINED = (
    "LanguageModel.stack = @SharedRelativeBias()",
    "SharedRelativeBias.stack = @Repeat()",
    "SharedRelativeBias.num_buckets = 8",
    "transformer_layer.positions = %PositionKind.SHARED",
    "transformer_layer.max_distance = 6",
    "transformer_layer.query_scale = 1.0",
    "transformer_layer.dropout_rate = 0.1",
    "SEQUENCE_LENGTH = 13",
)


@pytest.mark.parametrize(
    "partitioner,block_size",
    some_of(
        itertools.product(("SHARDY", "GSPMD"), ("4", "%Blocks.NONE")),
        (("SHARDY", "4"), ("GSPMD", "4")),
    ),
)
def test_eight_devices_train_as_one(partitioner, block_size):
    def experiment(mesh, block_size):
        return small_experiment(
            f"MESH_SHAPE = {mesh}",
            f"transformer_layer.block_size = {block_size}",
            f"Experiment.partitioner = %Partitioner.{partitioner}",
            *TRAINED,
        )

    plain = experiment((1, 1), "%Blocks.NONE")
    start = initial_state(plain)
    got, want = train(experiment((2, 4), block_size), start), train(plain, start)
    assert len(got.losses) == 5 and got.losses[-1] < got.losses[0]
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    moved = "theta.stack.relative_bias"
    assert np.abs(want.state[moved] - start.get_path(moved)).max() > 1e-4
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(
            got.state[path] / scale, value / scale, atol=1e-3, err_msg=path
        )


def test_a_pipeline_is_refused():
    stack = Pipeline(
        stack=Repeat(body=layer_of(), num_layers=2), num_stages=2, num_microbatches=2
    )
    for each in (stack, Sequential(layers=(stack, layer_of()))):
        with pytest.raises(ValueError, match="Pipeline.*make it a Repeat, or .*RELAT"):
            SharedRelativeBias(stack=each)


def test_layers_that_do_not_read_the_bias_are_refused():
    body = Sequential(layers=(layer_of(), layer_of(PositionKind.ROTARY)))
    message = re.escape(
        "SharedRelativeBias.stack.body.layers[1] is TransformerLayer with "
        "PositionKind.ROTARY"
    )
    with pytest.raises(ValueError, match=message):
        SharedRelativeBias(stack=Repeat(body=body, num_layers=2))
    with pytest.raises(ValueError, match="SharedRelativeBias.stack must be|@Repeat"):
        SharedRelativeBias(stack=3)


def test_layers_with_different_heads_are_refused():
    layers = (layer_of(), layer_of(num_heads=2))
    with pytest.raises(ValueError, match=r"has 4.*has 2 heads: give all layers equal"):
        SharedRelativeBias(stack=Sequential(layers=layers))


def test_attention_names_the_bias_that_it_was_not_given_or_does_not_read():
    def run(layer, **inputs):
        theta = initialize(layer.weights(), key_from_seed(0))
        layer.fprop(Context(path="stack"), theta, tf.constant(X), **inputs)

    with pytest.raises(ValueError, match="'stack.attention' has PositionKind.SHARED"):
        run(layer_of())
    bias = tf.zeros([BUCKETS, N])
    with pytest.raises(ValueError, match="PositionKind.RELATIVE but was given a rel"):
        run(layer_of(PositionKind.RELATIVE), relative_bias=bias)
    with pytest.raises(ValueError, match=r"has 4 heads, but .*\(8, 2\): make its last"):
        run(layer_of(), relative_bias=bias[:, :2])
