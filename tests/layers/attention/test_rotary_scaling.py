"""Scaled rotary positions: which frequencies are slowed, and by how much."""

import math

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.positions import (
    LinearScaling,
    Llama3Scaling,
    PositionKind,
    RotaryScaling,
    YarnScaling,
    rotate,
)
from meshwright.layers.basic.normalization import RMSNorm

RNG = np.random.default_rng(0)
HALF, BASE = 32, 10000.0
PLAIN = BASE ** (-np.arange(HALF) / HALF)
SCALINGS = {
    "linear": LinearScaling(factor=4.0),
    "llama3": Llama3Scaling(original_length=256),
    "yarn": YarnScaling(factor=4.0, original_length=1024),
}


def kept(scaling: RotaryScaling, factor: float) -> np.ndarray:
    """The part of each frequency that is not divided by the factor."""
    scaled = scaling.scaled(tf.constant(PLAIN, tf.float32), base=BASE).numpy()
    return (scaled / PLAIN - 1 / factor) / (1 - 1 / factor)


def test_a_linear_factor_divides_positions():
    x = tf.constant(RNG.standard_normal([1, 3, 2, 8]), tf.float32)
    scaled = rotate(x, tf.constant([[0, 4, 40]]), scaling=SCALINGS["linear"])
    np.testing.assert_allclose(
        scaled, rotate(x, tf.constant([[0, 1, 10]])), rtol=1e-5, atol=1e-6
    )


def test_llama_3_keeps_what_turns_often():
    turns = 256 * PLAIN / (2 * math.pi)
    part = kept(SCALINGS["llama3"], 8.0)
    np.testing.assert_allclose(part[turns >= 4], 1, rtol=1e-5)
    np.testing.assert_allclose(part[turns <= 1], 0, atol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    np.testing.assert_allclose(part[between], (turns[between] - 1) / 3, rtol=1e-4)


def test_yarn_keeps_what_turns_often_and_sharpens():
    turns = 1024 * PLAIN / (2 * math.pi)
    first, last = np.sum(turns > 32) - 1, np.sum(turns > 1)
    ramp = 1 - np.clip((np.arange(HALF) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(kept(SCALINGS["yarn"], 4.0), ramp, atol=1e-5)
    assert 0 < first < last < HALF
    factor = 0.1 * math.log(4) + 1
    assert SCALINGS["yarn"].magnitude == factor
    x = tf.constant(RNG.standard_normal([1, 1, 1, 64]), tf.float32)
    first_place = rotate(x, tf.constant([[0]]), scaling=SCALINGS["yarn"])
    np.testing.assert_allclose(first_place, factor * x, rtol=1e-6)
    given = YarnScaling(factor=4.0, original_length=256, attention_factor=1.5)
    assert given.magnitude == 1.5


def test_yarn_whose_first_and_last_pair_are_the_same():
    """Contexts so short that not even the first pair turns once."""
    part = kept(YarnScaling(factor=4.0, original_length=6), 4.0)
    np.testing.assert_allclose(part, [1] + [0] * (HALF - 1), atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_decoding_by_steps_equals_all_at_once(scaling):
    layer = MultiHeadAttention(
        model_dims=8,
        num_heads=2,
        head_dim=4,
        positions=PositionKind.ROTARY,
        rotary_scaling=scaling,
        use_bias=True,
        use_out_bias=False,
        qk_norm=RMSNorm(model_dims=4, offset=1.0),
        query_scale=2.0,
    )
    theta = initialize(layer.weights(), key_from_seed(0))
    assert "b_o" not in theta and "b_q" in theta
    x = tf.constant(RNG.standard_normal([2, 6, 8]), tf.float32)
    whole = layer.fprop(Context(), theta, x)
    cache = layer.init_cache(Context(), 2, 6)
    step = tf.function(
        lambda x, cache, at: layer.step(Context(), theta, x, cache, at),
        jit_compile=True,
    )
    for at in range(6):
        y, cache = step(x[:, at : at + 1], cache, tf.constant(at))
        np.testing.assert_allclose(y[:, 0], whole[:, at], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LinearScaling(factor=0.5),
            r"LinearScaling\.factor is 0\.5; it must be a number of at least 1",
        ),
        (
            lambda: Llama3Scaling(high_turns=1.0),
            r"Llama3Scaling\.high_turns is 1\.0, but must be above Llama3Scaling\.low_",
        ),
        (
            lambda: YarnScaling(factor=2.0, original_length=8, slow_turns=40.0),
            r"YarnScaling\.fast_turns is 32\.0, but must be above YarnScaling\.slow_",
        ),
        (
            lambda: MultiHeadAttention(
                model_dims=8, num_heads=2, head_dim=4, qk_norm=RMSNorm(model_dims=8)
            ),
            r"qk_norm has RMSNorm\.model_dims 8, but normalizes heads of head_dim 4",
        ),
        (
            lambda: MultiHeadAttention(
                model_dims=8, num_heads=2, head_dim=4, rotary_scaling="yarn"
            ),
            "rotary_scaling is 'yarn'; it must be of class RotaryScaling, such as @",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
