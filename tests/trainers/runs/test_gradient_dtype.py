"""Gradients in float32 beside bfloat16 activations: computed, and added up, so."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.devices.topology import topology_devices
from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.layers.attention.relative.relative_attention import RelativeAttention
from meshwright.layers.basic.embedding import Lookup, TokenEmbedding
from meshwright.layers.basic.feed_forward import FeedForward
from meshwright.layers.convolutions.convolution import (
    Convolution,
    TransposedConvolution,
)
from meshwright.layers.experts.moe import ExpertFeedForward
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests import needs
from tests.trainers.parity import initial_state, small_experiment, train

BFLOAT16 = "Experiment.activation_dtype = %bfloat16"
FLOAT32 = "Experiment.gradient_dtype = %float32"
RNG = np.random.default_rng(0)


def tensor(*shape):
    return tf.cast(RNG.standard_normal(shape), tf.bfloat16)


LAYERS = {
    "feed_forward": (
        FeedForward(model_dims=16, hidden_dims=32, use_bias=True),
        tensor(4, 64, 16),
    ),
    "gathered": (
        TokenEmbedding(vocab_size=16, model_dims=16, lookup=Lookup.GATHER),
        tf.constant(RNG.integers(0, 16, [4, 64])),
    ),
    "one_hot": (
        TokenEmbedding(vocab_size=16, model_dims=16, lookup=Lookup.ONE_HOT),
        tf.constant(RNG.integers(0, 16, [4, 64])),
    ),
    "attention": (
        RelativeAttention(model_dims=16, num_heads=2, head_dim=8),
        tensor(2, 16, 16),
    ),
    "convolution": (
        Convolution(
            window=(3,), strides=(1,), in_channels=8, channels=8, use_bias=True
        ),
        tensor(4, 32, 8),
    ),
    "transposed": (
        TransposedConvolution(window=(2,), in_channels=8, channels=8),
        tensor(4, 32, 8),
    ),
    "experts": (
        ExpertFeedForward(num_experts=2, model_dims=8, hidden_dims=16),
        tensor(2, 4, 32, 8),
    ),
}


def gradients(layer, x, theta, *, compiled, **dtypes):
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0), **dtypes)

    def of_weights(x, leaves):
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y = tf.cast(layer.fprop(ctx, theta.pack(leaves), x), tf.float32)
            loss = tf.reduce_sum(y * tf.random.stateless_normal(y.shape, [1, 2]))
        return tape.gradient(loss, leaves)

    leaves = [tf.constant(leaf) for leaf in theta.leaves()]
    fn = tf.function(of_weights, jit_compile=True) if compiled else of_weights
    return fn(x, leaves)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_each_kind_of_weight_is_differentiated_in_float32(name, compiled):
    """Not rounded to 8 bits, and the same up to such roundings of what they follow."""
    layer, x = LAYERS[name]
    theta = initialize(layer.weights(), key_from_seed(1))
    low = {"activation_dtype": tf.bfloat16}
    wide = gradients(
        layer, x, theta, compiled=compiled, gradient_dtype=tf.float32, **low
    )
    narrow = gradients(layer, x, theta, compiled=compiled, **low)
    for (path, _), got, rounded in zip(
        theta.items_by_path(), wide, narrow, strict=True
    ):
        assert got.dtype == tf.float32
        scale = np.abs(got).max()
        np.testing.assert_allclose(
            got / scale, rounded / scale, atol=0.02, err_msg=path
        )
        if path == "b_k":  # A softmax does not depend on it: its gradient is roundings.
            continue
        again = tf.cast(tf.cast(got, tf.bfloat16), tf.float32)
        assert np.any(again.numpy() != got.numpy()), path


def experiment(*params, plan="data", mesh="(8,)", **how):
    mesh = f"MESH_SHAPE = {mesh}"
    return small_experiment(mesh, BFLOAT16, *params, plan=plan, **how)


@functools.cache
def on_one_device(experts):
    job = experiment(FLOAT32, plan="finalized", mesh="(1, 1)", experts=experts)
    return train(job, initial_state(job), 3)


@pytest.mark.parametrize(
    "plan,mesh,partitioner,updates,experts",
    [
        ("data", "(8,)", "SHARDY", "all", 0),
        ("data", "(8,)", "GSPMD", "off", 0),
        ("finalized", "(2, 4)", "SHARDY", "off", 0),
        ("finalized", "(4, 2)", "GSPMD", "all", 0),
    ],
)
def test_devices_train_as_one(plan, mesh, partitioner, updates, experts):
    job = experiment(
        FLOAT32,
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        f"Experiment.weight_update_sharding = '{updates}'",
        plan=plan,
        mesh=mesh,
        experts=experts,
    )
    got, want = train(job, initial_state(job), 3), on_one_device(experts)
    # Activations are rounded in another order: see test_bfloat16.py.
    np.testing.assert_allclose(got.losses, want.losses, rtol=2.0**-10)
    np.testing.assert_allclose(got.norms, want.norms, rtol=2.0**-8)


@needs.libtpu
@pytest.mark.parametrize("updates", ["off", "all"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tpu_adds_gradients_up_in_that_dtype(dtype, updates):
    job = experiment(
        *([FLOAT32] if dtype == "float32" else []),
        "transformer_layer.dropout_rate = 0.1",
        f"Experiment.weight_update_sharding = '{updates}'",
    )
    programs = StepPrograms(job, devices=topology_devices("v3:2x2"))
    sums = [
        name
        for collective in programs.main.collectives()
        if collective.kind in ("all-reduce", "reduce-scatter")
        # Weights that a loop reads, which XLA gathers by adding zeros.
        and not collective.op_name.endswith("/while")
        for name, shape in zip(collective.dtypes, collective.shapes, strict=True)
        # Without scales of norms, which are float32 anyway, and scalars.
        if np.prod(shape) > 64
    ]
    assert sums and set(sums) == {{"bfloat16": "bf16", "float32": "f32"}[dtype]}


def test_fewer_bits_than_activations_are_refused():
    message = "gradient_dtype is bfloat16, which has fewer bits than .* float32: set it"
    with pytest.raises(ValueError, match=message):
        small_experiment("MESH_SHAPE = (1, 1)", "Experiment.gradient_dtype = %bfloat16")
    same = experiment("Experiment.gradient_dtype = %bfloat16")
    assert not dataclasses.replace(
        Context(), activation_dtype=tf.bfloat16, gradient_dtype=same.gradient_dtype
    ).widens_gradients
