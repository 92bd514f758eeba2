"""The feed-forward layer against numpy."""

import math

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.layers.basic.feed_forward import Activation, FeedForward

ERF = np.vectorize(math.erf)


def gelu(x):
    return x * (1 + ERF(x / np.sqrt(2))) / 2


def silu(x):
    return x / (1 + np.exp(-x))


FUNCTIONS = {
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.GELU: gelu,
    Activation.SILU: silu,
    Activation.GATED_GELU: gelu,
    Activation.GATED_SILU: silu,
}


@pytest.mark.parametrize("activation", Activation)
def test_feed_forward(activation):
    layer = FeedForward(model_dims=6, hidden_dims=16, activation=activation)
    theta = initialize(layer.weights(), key_from_seed(0))
    x = np.random.default_rng(0).standard_normal([2, 3, 6]).astype(np.float32)
    y = layer.fprop(Context(), theta, tf.constant(x))
    hidden = x @ theta.w_in.numpy()
    if activation.is_gated:
        hidden = FUNCTIONS[activation](x @ theta.w_gate.numpy()) * hidden
    else:
        hidden = FUNCTIONS[activation](hidden)
    # gelu is the tanh approximation, off by up to 5e-4.
    tolerance = 3e-3 if "gelu" in activation.value else 1e-5
    np.testing.assert_allclose(y, hidden @ theta.w_out.numpy(), atol=tolerance)


def test_dropout_is_of_hidden_activations():
    """With W_out = 1, each output is a sum of what is left of 4096 equal values."""
    layer = FeedForward(model_dims=1, hidden_dims=4096, dropout_rate=0.5)
    theta = layer.weights().map(lambda s: tf.ones(s.shape))
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
    y = layer.fprop(ctx, theta, tf.ones([1, 8, 1])).numpy()
    assert len(np.unique(y)) > 1
    np.testing.assert_allclose(y, 4096, rtol=0.1)
    evaluated = layer.fprop(Context(mode=Mode.EVAL), theta, tf.ones([1, 8, 1]))
    np.testing.assert_allclose(evaluated, 4096)


def test_a_dropout_rate_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"FeedForward\.dropout_rate is 1\.5"):
        FeedForward(model_dims=1, hidden_dims=1, dropout_rate=1.5)
