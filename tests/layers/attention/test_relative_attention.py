"""Relative attention against loops; local attention; who sees whom; bad input."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.modeling.random import key_from_seed
from meshwright.layers.attention.relative import relative_attention
from meshwright.layers.attention.relative.relative_attention import RelativeAttention

B, S, M, N, D = 2, 11, 6, 2, 4
MASK = np.arange(S) < np.array([[S], [8]])
X = np.random.default_rng(0).standard_normal([B, S, M]).astype(np.float32)


def attention(left=None, right=None, **kwargs):
    """A layer and weights large enough that attention is far from uniform."""
    layer = RelativeAttention(
        model_dims=M,
        num_heads=N,
        head_dim=D,
        left_context=left,
        right_context=right,
        **kwargs,
    )
    rng = np.random.default_rng(1)
    theta = layer.weights().map(
        lambda s: tf.constant(0.7 * rng.standard_normal(s.shape), tf.float32)
    )
    return layer, theta


def run(layer, theta, x=X, mask=MASK, ctx=None) -> np.ndarray:
    return layer.fprop(
        ctx or Context(), theta, tf.constant(x), mask=tf.constant(mask)
    ).numpy()


def reference(theta, left, right) -> np.ndarray:
    """By loops over everything, straight from the paper's formula."""
    w = theta.map(lambda t: t.numpy().astype(np.float64))
    half = np.arange(M // 2)
    out = np.zeros([B, S, M])
    for b, i, n in np.ndindex(B, S, N):
        logits, values = [], []
        for j in range(S):
            if not MASK[b, j] or not -right <= i - j <= left:
                continue
            angle = (i - j) / 10000 ** (half / (M / 2))
            waves = np.concatenate([np.sin(angle), np.cos(angle)])
            q = X[b, i] @ w.w_q[:, n] + w.b_q[n]
            k = X[b, j] @ w.w_k[:, n] + w.b_k[n]
            by_key = (q + w.u[n]) @ k
            by_distance = (q + w.v[n]) @ (waves @ w.w_r[:, n])
            logits.append((by_key + by_distance) / np.sqrt(D))
            values.append(X[b, j] @ w.w_v[:, n] + w.b_v[n])
        score = np.exp(logits)
        out[b, i] += score / score.sum() @ values @ w.w_o[n] if values else 0
    return out + w.b_o


@pytest.mark.parametrize(
    ("left", "right"),
    [(None, None), (None, 0), (2, None), (0, 0), (3, 0), (0, 2), (1, 2), (6, 6)],
)
def test_each_context_against_loops(left, right):
    """Of 11 frames, blocks of 1, 3 and 4, the last one filled up; or one block."""
    layer, theta = attention(left, right)
    everything = S if left is None else left, S if right is None else right
    expected = reference(theta, *everything)
    y = run(layer, theta)
    np.testing.assert_allclose(y[MASK], expected[MASK], rtol=1e-4, atol=1e-4)


def test_local_attention_is_a_masked_global_one(monkeypatch):
    """The gradients too."""
    layer, theta = attention(2, 1)

    def gradients():
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(Context(), theta, x, mask=tf.constant(MASK))
            loss = tf.reduce_sum(tf.boolean_mask(y, MASK) ** 2)
        return tf.nest.flatten([y, *tape.gradient(loss, (theta, x))])

    assert layer._blocks(S).count == 3
    local = gradients()
    single_block = relative_attention._Blocks(count=1, size=S, left=0, right=0)
    monkeypatch.setattr(RelativeAttention, "_blocks", lambda *_: single_block)
    for a, b in zip(local, gradients(), strict=True):
        a, b = (t.numpy()[MASK] if t.shape == X.shape else t for t in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_all_padding_stays_finite():
    layer, theta = attention(2, 1)
    assert np.isfinite(run(layer, theta, mask=np.zeros([B, S], bool))).all()


def test_dropout_is_of_probabilities_in_training_only():
    layer, theta = attention(dropout_rate=0.5)
    plain, _ = attention()
    np.testing.assert_array_equal(run(layer, theta), run(plain, theta))
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
    dropped = run(layer, theta, ctx=ctx)
    np.testing.assert_array_equal(dropped, run(layer, theta, ctx=ctx))
    assert np.abs(dropped - run(plain, theta)).max() > 0.1


def test_biases_are_optional():
    layer, theta = attention(use_bias=False)
    full, biased = attention()
    zeros = biased.map(tf.zeros_like)
    zeros.update(theta)
    np.testing.assert_array_equal(run(layer, theta), run(full, zeros))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"left": -1}, r"RelativeAttention\.left_context is -1"),
        ({"right": -2}, r"RelativeAttention\.right_context is -2"),
        ({"dropout_rate": 1.0}, r"RelativeAttention\.dropout_rate is 1\.0"),
        ({"max_timescale": 1}, r"RelativeAttention\.max_timescale is 1"),
    ],
)
def test_settings_out_of_range_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        attention(**kwargs)


def test_odd_model_dims_are_refused():
    with pytest.raises(ValueError, match="model_dims is 5: make it even"):
        RelativeAttention(model_dims=5, num_heads=1, head_dim=4)
