"""Normalization against numpy."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.normalization import LayerNorm, RMSNorm

RNG = np.random.default_rng(0)
X = RNG.standard_normal([2, 3, 8]) * 5 + 2
SCALE, BIAS = RNG.standard_normal([2, 8])


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm(epsilon):
    theta = NestedMap(scale=tf.constant(SCALE, tf.float32))
    layer = RMSNorm(model_dims=8, epsilon=epsilon)
    y = layer.fprop(Context(), theta, tf.constant(X, tf.float32))
    expected = X / np.sqrt((X**2).mean(-1, keepdims=True) + epsilon) * SCALE
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_layer_norm(epsilon):
    theta = NestedMap(
        scale=tf.constant(SCALE, tf.float32), bias=tf.constant(BIAS, tf.float32)
    )
    layer = LayerNorm(model_dims=8, epsilon=epsilon)
    y = layer.fprop(Context(), theta, tf.constant(X, tf.float32))
    std = np.sqrt(X.var(-1, keepdims=True) + epsilon)
    expected = (X - X.mean(-1, keepdims=True)) / std * SCALE + BIAS
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer", [RMSNorm(model_dims=4096), LayerNorm(model_dims=4096)]
)
def test_statistics_of_16_bit_inputs_are_taken_in_32_bits(layer):
    """Summed in bfloat16, 4096 squares would stop growing after a few hundred."""
    x = tf.cast(RNG.choice([-1.0, 1.0], [1, 1, 4096]), tf.bfloat16)
    theta = layer.weights().map(lambda s: s.initializer(None, s.shape, s.dtype))
    y = layer.fprop(Context(activation_dtype=tf.bfloat16), theta, x)
    np.testing.assert_allclose(tf.abs(tf.cast(y, tf.float32)), 1.0, rtol=2e-2)
