"""The 3D U-Net against plain TF ops; sizes, weights and FLOPs; what it refuses."""

import dataclasses
import functools
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.normalization import BatchNorm, GroupNorm
from meshwright.layers.convolutions.convolution import Padding
from meshwright.layers.convolutions.unet3d import UNet3D, Upsampling

PAPER = UNet3D(  # Figure 2 of Çiçek et al.
    in_channels=3,
    num_classes=3,
    analysis=((32, 64), (64, 128), (128, 256), (256, 512)),
    synthesis=((64, 64), (128, 128), (256, 256)),
    padding=Padding.VALID,
)
TWO_LEVELS = UNet3D(
    in_channels=2, num_classes=3, analysis=((2, 3), (4,)), synthesis=((5,),)
)
THREE_LEVELS = dataclasses.replace(
    TWO_LEVELS, analysis=((3,), (4, 2), (5,)), synthesis=((2, 4), (3,))
)
THIN = dataclasses.replace(
    TWO_LEVELS, analysis=((3,), (4,), (5,)), synthesis=((2,), (3,))
)
CONVOLUTION = {"strides": [1] * 5, "data_format": "NDHWC"}
TRAINING = Context(mode=Mode.TRAIN, path="net")


def weights_of(layer) -> NestedMap:
    """All of them random, biases and scales too."""
    rng = np.random.default_rng(1)
    return layer.weights().map(
        lambda s: tf.constant(0.4 * rng.standard_normal(s.shape), tf.float32)
    )


def volume(layer, *size) -> tf.Tensor:
    rng = np.random.default_rng(2)
    return tf.constant(rng.standard_normal([2, *size, layer.in_channels]), tf.float32)


def paper_network(layer, theta, x):
    """The paper's network by other ops than the layer's, where there are others."""
    beside = []
    for level in range(len(layer.analysis)):
        if level:
            beside.append(x)
            x = maxima(x)
        x = convolved(theta[f"analysis_{level}"], x, layer.padding)
    for level in reversed(range(len(layer.synthesis))):
        if layer.upsampling is Upsampling.TRANSPOSED:
            up = theta[f"up_{level}"]
            cubes = tf.einsum("bxyzc,cijkd->bxiyjzkd", x, up.kernel)
            x = tf.reshape(cubes, [x.shape[0], *(2 * n for n in x.shape[1:4]), -1])
            x += up.bias
        else:
            for dim in (1, 2, 3):
                x = tf.repeat(x, 2, axis=dim)
        fine = beside.pop()
        if layer.padding is Padding.VALID:
            off = [(n - m) // 2 for n, m in zip(fine.shape, x.shape, strict=True)]
            fine = fine[:, *(slice(i, -i) for i in off[1:4])]
        else:  # What pooling added to an odd size.
            x = x[:, *map(slice, fine.shape[1:4])]
        x = tf.concat([x, fine], axis=-1)
        x = convolved(theta[f"synthesis_{level}"], x, layer.padding)
    return tf.tensordot(x, theta.classes.kernel[0, 0, 0], 1) + theta.classes.bias


def maxima(x):
    ends = [(0, n % 2) for n in x.shape[1:4]]
    x = tf.pad(x, [(0, 0), *ends, (0, 0)], constant_values=-np.inf)
    x = tf.maximum(x[:, ::2], x[:, 1::2])
    x = tf.maximum(x[:, :, ::2], x[:, :, 1::2])
    return tf.maximum(x[:, :, :, ::2], x[:, :, :, 1::2])


def convolved(theta, x, padding):
    i = 0
    while (part := theta.get(f"convolution_{i}")) is not None:
        x = tf.nn.conv3d(x, part.kernel, padding=padding.name, **CONVOLUTION)
        if (norm := theta.get(f"norm_{i}")) is not None:
            assert "bias" not in part
            mean, variance = tf.nn.moments(x, [0, 1, 2, 3])
            x = tf.nn.batch_normalization(
                x, mean, variance, norm.bias, norm.scale, 1e-5
            )
        else:
            x += part.bias
        x, i = tf.nn.relu(x), i + 1
    return x


NEAREST = {"upsampling": Upsampling.NEAREST}
VALID = {"padding": Padding.VALID}


NETWORKS = [
    (TWO_LEVELS, (4, 8, 6), {}),
    (THREE_LEVELS, (5, 7, 6), {}),  # Odd at both upper levels, the first, the second.
    (TWO_LEVELS, (5, 4, 7), {"window": 5}),
    (TWO_LEVELS, (12, 14, 16), VALID),
    (THREE_LEVELS, (5, 7, 8), NEAREST),
    (TWO_LEVELS, (14, 12, 12), {**VALID, **NEAREST}),
]


@pytest.mark.parametrize(
    ("layer", "size", "kind"),
    [
        *((*network, {**kind, "norm": None}) for *network, kind in NETWORKS),
        *((*network, {**kind, "norm": BatchNorm}) for *network, kind in NETWORKS),
        # No norm, whose outputs are near each other: TF's gradient of max_pool3d on CPU
        # goes, whole, to each value of a window that is within 1e-5 of its maximum.
        (THIN, (22, 26, 22), {**VALID, "norm": None}),
    ],
)
def test_is_the_network_of_the_paper(layer, size, kind):
    layer = dataclasses.replace(layer, **kind)
    theta, x = weights_of(layer), volume(layer, *size)
    trained = [  # Of running statistics the gradients are their newest values.
        path for path, spec in layer.weights().items_by_path() if not spec.is_statistic
    ]
    sources = [x, *map(theta.get_path, trained)]
    dy = np.random.default_rng(3).standard_normal([2, *layer.labelled(size), 3])
    dy = tf.constant(dy, tf.float32)

    def logits_and_gradients(network):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = network(theta, x)
        return y, *tape.gradient(y, sources, dy)

    got = logits_and_gradients(functools.partial(layer.fprop, TRAINING))
    want = logits_and_gradients(functools.partial(paper_network, layer))
    assert got[0].shape == dy.shape
    largest = [np.abs(gradient).max() for gradient in want]
    assert min(largest) > 0
    for i, name in enumerate(["logits", "x", *trained]):
        atol = 1e-5 * max(largest[i], 0.1 * max(largest))  # As `assert_layer_parity`.
        np.testing.assert_allclose(got[i], want[i], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("upsampling", Upsampling)
def test_gradients_reach_all_weights(dtype, upsampling):
    layer = dataclasses.replace(THREE_LEVELS, upsampling=upsampling)
    theta = initialize(layer.weights(), key_from_seed(0))
    ctx = dataclasses.replace(TRAINING, activation_dtype=dtype)
    with tf.GradientTape() as tape:
        tape.watch(theta)
        y = layer.fprop(ctx, theta, volume(layer, 8, 5, 4))
        loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 3)
    gradients = theta.pack(tape.gradient(loss, theta.leaves()))
    assert y.dtype == dtype and np.isfinite(tf.cast(y, tf.float32)).all()
    for path, gradient in gradients.items_by_path():
        assert gradient is not None, path
        assert gradient.dtype == tf.float32, path
        assert np.isfinite(gradient).all() and np.any(gradient), path


def test_the_norm_is_the_one_asked_for():
    norm = functools.partial(GroupNorm, num_groups=1)
    layer = dataclasses.replace(TWO_LEVELS, norm=norm)
    theta, x = weights_of(layer), volume(layer, 4, 4, 4)
    y = layer.fprop(TRAINING, theta, x)
    alone = layer.fprop(TRAINING, theta, x[:1])  # Not so with batch norm.
    np.testing.assert_allclose(y[:1], alone, rtol=1e-5, atol=1e-5)
    assert {"scale", "bias"} == set(theta.analysis_0.norm_0)


def test_has_as_many_weights_as_the_paper_counts():
    """Çiçek et al., section 2: 19 069 955, the upsampling without biases, no norms."""
    up_biases = 512 + 256 + 128
    plain = dataclasses.replace(PAPER, norm=None).weights().leaves()
    assert sum(s.size for s in plain) - up_biases == 19_069_955
    # Batch norm takes the place of the biases, and has a scale beside.
    scales = sum(map(sum, (*PAPER.analysis, *PAPER.synthesis)))
    trained = [s for s in PAPER.weights().leaves() if not s.is_statistic]
    assert sum(s.size for s in trained) - up_biases - scales == 19_069_955


def test_labels_what_the_paper_labels():
    assert PAPER.labelled((132, 132, 116)) == (44, 44, 28)


def test_sizes_of_the_paper_are_those_whose_levels_are_even():
    """By hand: from n come (n - 4) / 2 a level; at the end there are n - 88."""
    for n in range(1, 160):
        if n % 8 == 4 and n > 88:
            assert PAPER.labelled((n,)) == (n - 88,)
        else:
            with pytest.raises(ValueError, match=rf"along a dim of {n} a level is odd"):
                PAPER.labelled((132, n, 116))


@pytest.mark.parametrize(
    "layer",
    [
        dataclasses.replace(TWO_LEVELS, **VALID, **NEAREST),
        dataclasses.replace(THREE_LEVELS, **VALID),
        dataclasses.replace(THREE_LEVELS, **VALID, window=5),
    ],
    ids=["two", "three", "window"],
)
def test_names_the_sizes_next_to_one_that_does_not_fit(layer):
    @functools.cache
    def refusal(n):
        try:
            assert layer.labelled((n,))[0] > 0
        except ValueError as e:
            return str(e)

    refused = [n for n in range(1, 60) if refusal(n)]
    assert 20 < len(refused) < 59
    for n in refused:
        named = re.search(r"next to it are ([\d and]+), or use Padding", refusal(n))[1]
        *below, above = map(int, named.split(" and "))
        first = below[0] if below else 0
        assert first < n < above
        fitting = [m for m in range(1, above + 1) if not refusal(m)]
        assert [m for m in fitting if m >= first] == [*below, above]


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (PAPER, (132, 132, 116)),
        (dataclasses.replace(PAPER, padding=Padding.SAME), (64, 50, 7)),
        (dataclasses.replace(THREE_LEVELS, **NEAREST, window=5), (5, 7, 8)),
    ],
    ids=["valid", "same", "nearest"],
)
def test_counts_the_flops_of_its_convolutions(layer, size):
    theta = layer.weights().map(lambda s: tf.TensorSpec(s.shape))
    x = tf.TensorSpec([1, *size, layer.in_channels])
    run = tf.function(functools.partial(layer.fprop, TRAINING), autograph=False)
    graph = run.get_concrete_function(theta, x).graph
    total, kinds = 0, set()
    for op in graph.get_operations():
        if op.type == "Conv3D":
            places = op.outputs[0].shape[1:4]
        elif op.type == "Conv3DBackpropInputV2":  # A transposed one: of its input.
            places = op.inputs[2].shape[1:4]
        else:
            continue
        kinds.add(op.type)
        total += 2 * math.prod(places) * math.prod(op.inputs[1].shape)
    assert layer.flops(size) == total
    assert len(kinds) == 1 + (layer.upsampling is Upsampling.TRANSPOSED)


def levels(analysis, synthesis, **kwargs):
    return dataclasses.replace(
        TWO_LEVELS, analysis=analysis, synthesis=synthesis, **kwargs
    )


def run_on(shape, **kwargs):
    layer = dataclasses.replace(TWO_LEVELS, **kwargs)
    return layer.fprop(TRAINING, weights_of(layer), tf.zeros(shape))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: levels(((2,), (3,)), ((2,), (3,))),
            r"analysis has 2 levels and synthesis 2: give synthesis one less",
        ),
        (lambda: levels((), ()), r"UNet3D\.analysis has 0 levels and synthesis 0"),
        (
            lambda: levels(((2,), ()), ((3,),)),
            r"UNet3D\.analysis is \(\(2,\), \(\)\): give each level the channels of",
        ),
        (
            lambda: levels(((2,), (3,)), ((0,),)),
            r"UNet3D\.synthesis is \(\(0,\),\): give each level .*, such as \(\(32, 64",
        ),
        (lambda: levels((32, 64), (32,)), r"UNet3D\.analysis is \(32, 64\): give each"),
        (
            lambda: levels(((2,), (3,)), ((2,),), window=4),
            r"UNet3D\.window is 4: make it 1, 3, 5",
        ),
        (lambda: run_on([1] * 5, window=-1), r"window is -1; .* at least 1"),
        (
            lambda: run_on([1] * 5, window=(3, 3, 3)),
            r"UNet3D\.window is \(3, 3, 3\); it must be a whole number of at lea",
        ),
        (
            lambda: run_on([1] * 5, upsampling="nearest"),
            r"UNet3D\.upsampling is 'nearest'; it must be one of Upsampling\.TRANSP",
        ),
        (
            lambda: run_on([1] * 5, padding="valid"),
            r"UNet3D\.padding is 'valid'; it must be one of Padding\.SAME, Padding\.V",
        ),
        (lambda: run_on([1] * 5, num_classes=1), r"UNet3D\.num_classes is 1; it must"),
        (lambda: run_on([1] * 5, in_channels=0), r"UNet3D\.in_channels is 0; it must"),
        (
            lambda: run_on([1, 4, 4, 4, 3]),
            r"'net' takes inputs whose last dims are \[2\] but was given \(1, 4, 4, 4",
        ),
        (
            lambda: run_on([1, 4, 4, 2]),
            r"'net' has windows of 3 dims but was given \(1, 4, 4, 2\)",
        ),
        (
            lambda: run_on([1, 12, 13, 14, 2], padding=Padding.VALID),
            r"Padding\.VALID cannot take a volume of \(12, 13, 14\): along a dim of 13 "
            r"a level is odd or too small; next to it are 12 and 14, or use Padding\.S",
        ),
        (
            # By hand: each convolution takes 600, and leaves at least 1.
            lambda: dataclasses.replace(TWO_LEVELS, **VALID, window=601).labelled((9,)),
            r"along a dim of 9 a level is odd or too small; next to it are 3002, or",
        ),
        (
            lambda: PAPER.flops((132, 132, 16)),
            r"along a dim of 16 a level is odd or too small; next to it are 92, or",
        ),
    ],
)
def test_what_makes_no_network_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
