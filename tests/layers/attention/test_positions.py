"""Rotary positions, relative buckets and biases."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.layers.attention.mask_rules import MaskKind
from meshwright.layers.attention.positions import rotate, sinusoids
from meshwright.layers.attention.relative.relative_bias import (
    relative_bias,
    relative_bucket,
)

DATA = pathlib.Path(__file__).parents[2] / "data"
RNG = np.random.default_rng(0)


def test_rotation_turns_pairs_by_position_times_frequency():
    x = RNG.standard_normal([2, 5, 3, 8])
    positions = RNG.integers(0, 100, [2, 5])
    ours = rotate(tf.constant(x, tf.float32), tf.constant(positions, tf.int32))
    frequency = 10000.0 ** (-2 * np.arange(4) / 8)
    turn = np.exp(1j * positions[:, :, None, None] * frequency)
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_rotated_products_depend_on_relative_positions_only():
    q, k = tf.constant(RNG.standard_normal([2, 1, 6, 2, 16]), tf.float32)

    def products(shift: int):
        positions = tf.range(shift, shift + 6)[None]
        return tf.einsum(
            "bsnd,btnd->bnst", rotate(q, positions), rotate(k, positions)
        ).numpy()

    np.testing.assert_allclose(products(0), products(37), rtol=1e-4, atol=1e-4)
    unrotated = tf.einsum("bsnd,btnd->bnst", q, k)
    assert np.abs(products(0) - unrotated).max() > 0.1


def test_rotation_of_16_bit_values_uses_32_bit_angles():
    x = tf.ones([1, 1, 1, 2], tf.bfloat16)
    y = rotate(x, tf.constant([[1001]]))  # bfloat16 would round 1001 to 1000.
    assert y.dtype == tf.bfloat16
    expected = [np.cos(1001) - np.sin(1001), np.cos(1001) + np.sin(1001)]
    np.testing.assert_allclose(tf.cast(y[0, 0, 0], tf.float32), expected, atol=1e-2)


GOLDEN = dict(np.load(DATA / "relative_position_bucket.npz"))


@pytest.mark.parametrize("case", [name for name in GOLDEN if name.startswith("out/")])
def test_buckets_reproduce_lingvo(case):
    buckets, distance, bidirectional = map(int, re.findall(r"\d+", case))
    ours = relative_bucket(
        tf.constant(GOLDEN["in/relative_position_key_minus_query"]),
        mask=MaskKind.FULL if bidirectional else MaskKind.CAUSAL,
        num_buckets=buckets,
        max_distance=distance,
    )
    np.testing.assert_array_equal(ours, GOLDEN[case])


@pytest.mark.parametrize("mask", MaskKind)
def test_bias_is_the_weight_of_the_bucket_of_each_pair(mask):
    S, N, buckets, distance = 40, 3, 8, 16
    weight = tf.constant(RNG.standard_normal([buckets, N]), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(weight)
        bias = relative_bias(weight, S, S, mask=mask, max_distance=distance)
    index = np.arange(S)
    bucket = relative_bucket(
        tf.constant(index[None, :] - index[:, None], tf.int32),
        mask=mask,
        num_buckets=buckets,
        max_distance=distance,
    ).numpy()
    expected = weight.numpy()[bucket].transpose(2, 0, 1)
    np.testing.assert_array_equal(bias, expected)
    counts = np.bincount(bucket.ravel(), minlength=buckets)
    gradient = tape.gradient(bias, weight)
    np.testing.assert_allclose(gradient, np.tile(counts[:, None], [1, N]))


@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "mask"),
    [(1, 8, MaskKind.CAUSAL), (2, 8, MaskKind.FULL), (32, 16, MaskKind.CAUSAL)],
)
def test_buckets_that_cannot_be_are_refused(num_buckets, max_distance, mask):
    with pytest.raises(ValueError, match="change num_buckets or max_distance"):
        relative_bucket(
            tf.range(3), mask=mask, num_buckets=num_buckets, max_distance=max_distance
        )


def test_sinusoids_are_vaswanis():
    positions = np.array([[0, 1, 7], [3, 500, 2]])
    got = sinusoids(tf.constant(positions), 8, max_timescale=100.0).numpy()
    angle = positions[..., None] * 100.0 ** (-np.arange(4) / 4)
    expected = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    assert got.shape == (2, 3, 8) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-4)
