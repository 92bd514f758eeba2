"""Dropout: rate, mean, determinism, when it does nothing."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.dropout import Dropout


def drop(x, *, rate: float = 0.25, seed: int = 0, scope: str = "a", **kwargs):
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(seed), **kwargs)
    with ctx.scope(scope) as c:
        return Dropout(rate=rate).fprop(c, NestedMap(), x)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.9])
def test_drops_at_its_rate_and_keeps_the_mean(rate, dtype):
    x = tf.ones([64, 1024], dtype)
    y = drop(x, rate=rate)
    assert y.dtype == dtype
    y = tf.cast(y, tf.float32).numpy()
    sigma = np.sqrt(rate * (1 - rate) / y.size)
    assert abs((y == 0).mean() - rate) < 5 * sigma
    # What is kept has one value; 16 bits round it.
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=4e-3)


def test_depends_on_the_key_and_the_path_only():
    x = tf.ones([1000])
    np.testing.assert_array_equal(drop(x), drop(x))
    assert np.any(drop(x) != drop(x, seed=1))
    assert np.any(drop(x) != drop(x, scope="b"))


def test_gradient_is_dropped_where_the_value_is():
    x = tf.random.stateless_uniform([1000], [0, 0], minval=1.0, maxval=2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = drop(x)
    np.testing.assert_allclose(tape.gradient(y, x), y / x, rtol=1e-6)


def test_is_the_identity_in_evaluation_and_at_rate_0():
    x = tf.ones([10])
    layer = Dropout(rate=0.5)
    assert layer.fprop(Context(mode=Mode.EVAL), NestedMap(), x) is x
    assert Dropout().fprop(Context(mode=Mode.TRAIN), NestedMap(), x) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match=r"Dropout\.rate is .*at least 0 and below 1"):
        Dropout(rate=rate)


def test_training_without_a_key_is_refused():
    with pytest.raises(ValueError, match="the context has no key"):
        Dropout(rate=0.5).fprop(Context(mode=Mode.TRAIN), NestedMap(), tf.ones([2]))


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_is_dead_at_zero_has_the_same_gradient(jit_compile, dtype):
    """A ReLU's and a softmax's, without the mask."""
    x = tf.cast(tf.random.stateless_normal([64, 32], [0, 0]), dtype)
    far = tf.where(x > 1, tf.constant(-1e4, dtype), x)  # Some probabilities are 0.

    def gradient(before, x, **how):
        ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = Dropout(rate=0.25).fprop(ctx, NestedMap(), before(x), **how)
            loss = tf.reduce_sum(y * tf.cast(tf.range(32), dtype))
        return tape.gradient(loss, x)

    for before, at in ((tf.nn.relu, x), (tf.nn.softmax, far)):
        got = tf.function(
            lambda x, before=before: gradient(
                before, x, read_by_products=True, dead_at_zero=True
            ),
            jit_compile=jit_compile,
        )(at)
        want = gradient(before, at)
        tolerance = 1e-6 if dtype == tf.float32 else 2**-7
        np.testing.assert_allclose(
            tf.cast(got, tf.float32),
            tf.cast(want, tf.float32),
            rtol=tolerance,
            atol=tolerance * float(tf.reduce_max(tf.abs(tf.cast(want, tf.float32)))),
        )


def test_results_and_gradients_for_products_are_behind_barriers(hlo_text):
    """Else a TPU draws the numbers again in each product that reads them."""
    x, key = tf.TensorSpec([8, 8]), tf.TensorSpec([2], tf.uint32)

    def barriers(**how):
        def fn(x, key):
            ctx = Context(mode=Mode.TRAIN, key=key)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = Dropout(rate=0.25).fprop(ctx, NestedMap(), x, **how)
            return y, tape.gradient(y, x)

        return hlo_text(fn, x, key).count(" opt-barrier(")

    # One is of the numbers of rows and columns.
    assert barriers() == barriers(read_by_products=True) == 2
