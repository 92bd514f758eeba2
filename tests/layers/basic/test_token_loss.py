"""The loss of tokens against numpy."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.layers.basic.token_loss import cross_entropy, token_loss

RNG = np.random.default_rng(0)
V = 11


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_cross_entropy(dtype):
    logits = tf.cast(RNG.standard_normal([3, 4, V]) * 30, dtype)
    labels = RNG.integers(0, V, [3, 4])
    weights = RNG.integers(0, 2, [3, 4])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses = cross_entropy(
            logits, tf.constant(labels), weights=tf.constant(weights)
        )
    assert losses.dtype == tf.float32
    exact = tf.cast(logits, tf.float64).numpy()
    probs = np.exp(exact - exact.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    one_hot = np.eye(V)[labels]
    expected = -np.log((probs * one_hot).sum(-1)) * weights
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
    gradient = tf.cast(tape.gradient(losses, logits), tf.float32)
    expected = (probs - one_hot) * weights[..., None]
    tolerance = 1e-5 if dtype == tf.float32 else 5e-3
    np.testing.assert_allclose(gradient, expected, atol=tolerance)


@pytest.mark.parametrize("smoothing,z_loss", [(0.0, 0.0), (0.1, 0.0), (0.2, 1e-2)])
def test_the_loss_is_smoothed_and_keeps_the_denominator_small(smoothing, z_loss):
    logits = (RNG.standard_normal([3, 4, V]) * 3).astype(np.float32)
    labels, weights = RNG.integers(0, V, [3, 4]), RNG.random([3, 4])
    got = token_loss(
        tf.constant(logits),
        tf.constant(labels),
        tf.constant(weights.astype(np.float32)),
        label_smoothing=smoothing,
        z_loss=z_loss,
    )
    log_sums = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    log_probs = logits - log_sums[..., None]
    targets = (1 - smoothing) * np.eye(V)[labels] + smoothing / V
    total = -(targets * log_probs).sum(-1) + z_loss * log_sums**2
    nats = -(np.eye(V)[labels] * log_probs).sum(-1)
    np.testing.assert_allclose(got.nats, (nats * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(got.total, (total * weights).sum(), rtol=1e-5)
