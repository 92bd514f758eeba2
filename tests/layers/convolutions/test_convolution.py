"""Convolutions against numpy; alignment, padding, causality; on eight devices.

Dims: B batch, S sequence, T time, F frequency, M model, C channels.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.convolutions.convolution import (
    Convolution,
    ConvSubsampling,
    DepthwiseConv1D,
    Padding,
    TransposedConvolution,
)

B, S, M = 2, 9, 6
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M]).astype(np.float32)
MASK = np.arange(S) < np.array([[S], [5]])
PLAN = ShardingPlan(
    mesh_shape=(2, 4),
    weights={"model": "X", "channels": "Y"},
    activations={"batch": "X", "model": "Y", "channels": "Y"},
)


def weights_of(layer):
    """All of them random, biases too."""
    rng = np.random.default_rng(1)
    return layer.weights().map(
        lambda s: tf.constant(0.3 * rng.standard_normal(s.shape), tf.float32)
    )


@pytest.mark.parametrize(
    ("window", "is_causal"), [(1, False), (5, False), (21, False), (4, True)]
)
def test_depthwise_convolution_and_its_gradients(window, is_causal):
    layer = DepthwiseConv1D(model_dims=M, window=window, is_causal=is_causal)
    theta = weights_of(layer)
    x, dy = tf.constant(X), tf.constant(X[::-1])
    before = window - 1 if is_causal else window // 2

    def reference(x, kernel):
        wide = tf.pad(x, [(0, 0), (before, window - 1 - before), (0, 0)])
        kernel = kernel[:, None, :, None]
        strides = [1, 1, 1, 1]
        y = tf.nn.depthwise_conv2d(wide[:, :, None], kernel, strides, "VALID")
        return y[:, :, 0]

    with tf.GradientTape(persistent=True) as tape:
        tape.watch((x, theta.kernel))
        ours, theirs = layer.fprop(Context(), theta, x), reference(x, theta.kernel)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for source in (x, theta.kernel):
        got, want = (tape.gradient(y, source, dy) for y in (ours, theirs))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_depthwise_convolution_takes_padding_for_zeros():
    layer = DepthwiseConv1D(model_dims=M, window=5)
    theta = weights_of(layer)
    changed = np.where(MASK[..., None], X, np.inf).astype(np.float32)
    zeroed = np.where(MASK[..., None], X, 0).astype(np.float32)
    y = layer.fprop(Context(), theta, tf.constant(changed), mask=tf.constant(MASK))
    want = layer.fprop(Context(), theta, tf.constant(zeroed))
    np.testing.assert_array_equal(y, want)


def test_16_bit_products_are_summed_in_32_bits():
    """257 ones: summed in bfloat16 they would stop at 256."""
    layer = DepthwiseConv1D(model_dims=1, window=257, is_causal=True)
    theta = layer.weights().map(lambda s: tf.ones(s.shape))
    ctx = Context(activation_dtype=tf.bfloat16)
    x = tf.concat([tf.ones([1, 256, 1]), tf.fill([1, 1, 1], 4.0)], axis=1)
    y = layer.fprop(ctx, theta, x)
    assert y.dtype == tf.bfloat16 and float(y[0, -1, 0]) == 260.0


def test_what_is_beside_counts_as_further_channels():
    layer = Convolution(in_channels=6, channels=3, window=(3, 2), strides=(2, 1))
    theta = weights_of(layer)
    x = tf.constant(RNG.standard_normal([2, 5, 4, 6]), tf.float32)
    parts = tf.split(x, [1, 3, 2], axis=-1)
    got, want = (layer.fprop(Context(), theta, *args) for args in (parts, [x]))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"'one.part' .* last dims are \[3\]"):
        layer.fprop(Context(path="one.part"), theta, parts[0], parts[1])


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize(("window", "stride"), [(3, 1), (3, 2), (1, 1), (4, 3)])
def test_convolution_is_aligned_whatever_the_size(window, stride, size):
    layer = Convolution(in_channels=2, channels=3, window=[window], strides=[stride])
    theta = weights_of(layer)
    x = RNG.standard_normal([1, size, 2]).astype(np.float32)
    y = layer.fprop(Context(), theta, tf.constant(x))
    assert y.shape == (1, -(-size // stride), 3)
    first = (window - stride) // 2
    wide = np.pad(x[0], [(first, window), (0, 0)])
    for i in range(y.shape[1]):
        frames = wide[i * stride : i * stride + window]
        want = np.einsum("kc,kcd->d", frames, theta.kernel) + theta.bias
        np.testing.assert_allclose(y[0, i], want, rtol=1e-5, atol=1e-5)


def test_convolution_of_even_sizes_is_that_of_same_padding():
    layer = Convolution(in_channels=1, channels=2, window=(3, 3, 3), strides=(2, 1, 2))
    theta = weights_of(layer)
    x = tf.constant(RNG.standard_normal([2, 4, 5, 6, 1]), tf.float32)
    y = layer.fprop(Context(), theta, x)
    want = tf.nn.conv3d(x, theta.kernel, [1, 2, 1, 2, 1], "SAME") + theta.bias
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def assert_same_with_gradients(layer, reference, x):
    """`reference` takes (theta, x); all gradients are compared too."""
    theta, x = weights_of(layer), tf.constant(x, tf.float32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch((theta, x))
        ours, theirs = layer.fprop(Context(), theta, x), reference(theta, x)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    dy = tf.constant(RNG.standard_normal(ours.shape), tf.float32)
    for path, source in [*theta.items_by_path(), ("x", x)]:
        got, want = (tape.gradient(y, source, dy) for y in (ours, theirs))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=path)


def by_definition(layer):
    """Window by window, where `Convolution` says that they begin."""

    def convolve(theta, x):
        same = layer.padding is Padding.SAME
        ends = list(zip(layer.window, layer.strides, strict=True))
        before = [same * (k - s) // 2 for k, s in ends]
        beyond = [same * k for k in layer.window]
        wide = tf.pad(x, [(0, 0), *zip(before, beyond, strict=True), (0, 0)])
        steps = zip(x.shape[1:-1], ends, strict=True)
        sizes = [-(-n // s) if same else (n - k) // s + 1 for n, (k, s) in steps]
        windows = []
        for place in itertools.product(*map(range, sizes)):
            at = zip(place, ends, strict=True)
            windows.append(wide[:, *(slice(i * s, i * s + k) for i, (k, s) in at)])
        dims = "xyz"[: len(sizes)]
        y = tf.einsum(f"pb{dims}c,{dims}cd->bpd", tf.stack(windows), theta.kernel)
        y = tf.reshape(y, [x.shape[0], *sizes, -1])
        return y + theta.bias if layer.use_bias else y

    return convolve


@pytest.mark.parametrize(
    ("size", "window", "strides", "padding"),
    [
        ((5, 3, 4), (3, 3, 3), (1, 1, 1), Padding.SAME),
        ((5, 4, 7), (3, 3, 3), (2, 2, 2), Padding.SAME),
        ((1, 2, 6), (3, 5, 2), (1, 2, 1), Padding.SAME),
        ((5, 3, 4), (3, 3, 2), (1, 1, 1), Padding.VALID),
        ((6, 5), (3, 2), (2, 1), Padding.VALID),
        ((9,), (4,), (3,), Padding.VALID),
    ],
    ids=str,
)
@pytest.mark.parametrize("use_bias", [True, False])
def test_convolution_is_what_it_says(size, window, strides, padding, use_bias):
    layer = Convolution(
        in_channels=2,
        channels=3,
        window=window,
        strides=strides,
        padding=padding,
        use_bias=use_bias,
    )
    assert ("bias" in layer.weights()) == use_bias
    x = RNG.standard_normal([2, *size, 2])
    assert_same_with_gradients(layer, by_definition(layer), x)


@pytest.mark.parametrize("window", [(3,), (2, 3), (2, 2, 2), (3, 1, 2)], ids=str)
def test_transposed_convolution_makes_each_position_a_window(window):
    layer = TransposedConvolution(in_channels=2, channels=3, window=window)
    rank, size = len(window), (3, 2, 4)[: len(window)]

    def reference(theta, x):
        # [B, n..., window..., C], and each n beside its window.
        windows = tf.tensordot(x, theta.kernel, 1)
        pairs = [dim for i in range(1, rank + 1) for dim in (i, i + rank)]
        wide = [n * k for n, k in zip(size, window, strict=True)]
        y = tf.transpose(windows, [0, *pairs, 2 * rank + 1])
        return tf.reshape(y, [x.shape[0], *wide, 3]) + theta.bias

    x = RNG.standard_normal([2, *size, 2])
    assert_same_with_gradients(layer, reference, x)


SUBSAMPLING = ConvSubsampling(num_bins=10, channels=4, model_dims=M)


@pytest.mark.parametrize("length", [1, 4, 13, 14, 15, 16])
def test_subsampling_does_not_depend_on_the_padding(length):
    theta = weights_of(SUBSAMPLING)
    x = RNG.standard_normal([B, 16, 10]).astype(np.float32)
    mask = np.arange(16) < np.array([[length], [16]])
    padded = SUBSAMPLING.fprop(Context(), theta, tf.constant(x), mask=tf.constant(mask))
    alone = SUBSAMPLING.fprop(Context(), theta, tf.constant(x[:1, :length]))
    real = -(-length // 4)
    assert alone.x.shape == (1, real, M) and padded.x.shape == (B, 4, M)
    assert "mask" not in alone
    np.testing.assert_array_equal(padded.mask[0], np.arange(4) < real)
    np.testing.assert_allclose(padded.x[0, :real], alone.x[0], rtol=1e-5, atol=1e-5)
    changed = np.where(mask[..., None], x, np.nan).astype(np.float32)
    again = SUBSAMPLING.fprop(
        Context(), theta, tf.constant(changed), mask=tf.constant(mask)
    )
    np.testing.assert_array_equal(again.x, padded.x)


def test_subsampling_against_tf():
    theta = weights_of(SUBSAMPLING)
    x = tf.constant(RNG.standard_normal([B, 16, 12]), tf.float32)
    layer = dataclasses.replace(SUBSAMPLING, num_bins=12)
    y = x[..., None]
    for part in (theta.first, theta.second):
        y = tf.nn.relu(tf.nn.conv2d(y, part.kernel, 2, "SAME") + part.bias)
    y = tf.einsum("btfc,fcm->btm", y, theta.w_out) + theta.b_out
    result = layer.fprop(Context(), theta, x).x
    np.testing.assert_allclose(result, y, rtol=1e-4, atol=1e-4)


def test_subsampling_counts_the_flops_of_its_convolutions():
    # A frame of M: 4 frames of 10 bins; 2 x 5 places of 9 x 4 products, 3 of 9 x 4 x 4.
    convolutions = 2 * (10 * 9 * 4 + 3 * 9 * 4 * 4)
    matrices = [s.size for s in SUBSAMPLING.weights().leaves() if s.is_matrix]
    total = 2 * sum(matrices) + SUBSAMPLING.extra_flops(100)
    assert total == convolutions + 2 * 3 * 4 * M


SPLIT_TIME = dataclasses.replace(PLAN, activations={"batch": "X", "time": "Y"})


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize("plan", [PLAN, SPLIT_TIME], ids=["channels", "time"])
def test_subsampling_computes_on_eight_devices_what_it_does_on_one(plan, partitioner):
    x = RNG.standard_normal([B, 14, 10]).astype(np.float32)
    mask = np.arange(14) < np.array([[14], [9]])
    assert_layer_parity(SUBSAMPLING, x, plan=plan, partitioner=partitioner, mask=mask)


@pytest.mark.parametrize("partitioner", Partitioner)
def test_depthwise_computes_on_eight_devices_what_it_does_on_one(partitioner):
    layer = DepthwiseConv1D(model_dims=M, window=5)
    assert_layer_parity(layer, X, plan=PLAN, partitioner=partitioner, mask=MASK)


def test_first_weights_keep_the_variance_of_their_input():
    layer = Convolution(in_channels=32, channels=64, window=(3, 3), strides=(1, 1))
    theta = initialize(layer.weights(), key_from_seed(0))
    np.testing.assert_allclose(np.std(theta.kernel), (9 * 32) ** -0.5, rtol=0.05)
    up = TransposedConvolution(in_channels=32, channels=64, window=(3, 3))
    theta = initialize(up.weights(), key_from_seed(0))
    np.testing.assert_allclose(np.std(theta.kernel), 32**-0.5, rtol=0.05)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"DepthwiseConv1D\.window is 4, which has no"):
        DepthwiseConv1D(model_dims=M, window=4)
    with pytest.raises(ValueError, match=r"DepthwiseConv1D\.window is 0"):
        DepthwiseConv1D(model_dims=M, window=0)
    for strides in [(2,), (2, 4), (0, 1)]:
        with pytest.raises(ValueError, match=r"Convolution\.strides is .* stride from"):
            Convolution(in_channels=1, channels=1, window=(3, 3), strides=strides)
    with pytest.raises(ValueError, match=r"ConvSubsampling\.channels is 0"):
        ConvSubsampling(num_bins=8, channels=0, model_dims=4)
    with pytest.raises(ValueError, match=r"last dims are \[10\] but was given"):
        SUBSAMPLING.fprop(Context(), weights_of(SUBSAMPLING), tf.zeros([1, 8, 9]))


ONE = {"in_channels": 1, "channels": 1}
FLAT = Convolution(**ONE, window=(3, 3), strides=(1, 1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: dataclasses.replace(FLAT, padding="SAME"),
            r"Convolution\.padding is 'SAME'; it must be one of Padding\.SAME, ",
        ),
        (
            lambda: TransposedConvolution(**ONE, window=()),
            r"TransposedConvolution\.window is \(\): give each dim of it a size of 1",
        ),
        (
            lambda: TransposedConvolution(**ONE, window=(2, 0)),
            r"TransposedConvolution\.window is \(2, 0\): give each dim",
        ),
    ],
)
def test_settings_that_make_no_convolution_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "layer", [FLAT, TransposedConvolution(**ONE, window=(2, 2))], ids=["down", "up"]
)
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 8, 1], r"'top' has windows of 2 dims but was given \(1, 8, 1\): give it"),
        ([1, 8, 8, 2], r"'top' takes inputs whose last dims are \[1\] but was given"),
    ],
)
def test_an_input_of_other_dims_is_refused(layer, shape, message):
    with pytest.raises(ValueError, match=message):
        layer.fprop(Context(path="top"), weights_of(layer), tf.zeros(shape))
