"""ResNet against plain TF ops; its size and FLOPs; eight devices; what it refuses."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Layer, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.basic.normalization import GroupNorm
from meshwright.layers.convolutions.resnet import ResNet

RESNET_50 = ResNet(num_classes=1000)
SMALL = ResNet(num_classes=5, blocks=(2, 1), widths=(2, 3), zero_last_scale=False)
TRAINING = Context(mode=Mode.TRAIN, path="net")
PLACES = ("batch", "height", "width", "channels")


def weights_of(layer) -> NestedMap:
    """All of them random, biases and scales too."""
    rng = np.random.default_rng(1)
    return layer.weights().map(
        lambda s: tf.constant(0.5 * rng.standard_normal(s.shape), tf.float32)
    )


def pictures(*shape) -> tf.Tensor:
    return tf.constant(np.random.default_rng(2).standard_normal(shape), tf.float32)


def papers_network(layer, theta, x):
    """By TF's own windows, strides and moments."""

    def normalized(part, x, stride):
        x = tf.nn.conv2d(x, part.convolution.kernel, stride, "SAME")
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        norm = part.norm
        return tf.nn.batch_normalization(x, mean, variance, norm.bias, norm.scale, 1e-5)

    x = tf.nn.relu(normalized(theta.stem, x, 2))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for stage, count in enumerate(layer.blocks):
        for number in range(count):
            block = theta[f"stage_{stage}_block_{number}"]
            stride = 2 if stage > 0 and number == 0 else 1
            y = tf.nn.relu(normalized(block.reduce, x, 1))
            y = tf.nn.relu(normalized(block.window, y, stride))
            y = normalized(block.expand, y, 1)
            if number == 0:
                x = normalized(block.shortcut, x, stride)
            x = tf.nn.relu(x + y)
    return tf.reduce_mean(x, [1, 2]) @ theta.head.kernel + theta.head.bias


@pytest.mark.parametrize(
    "layer",
    [SMALL, dataclasses.replace(SMALL, blocks=(1, 1, 2), widths=(2, 2, 3))],
    ids=["two stages", "three stages"],
)
def test_is_the_network_of_the_paper(layer):
    theta, x = weights_of(layer), pictures(4, 32, 48, 3)
    trained = [  # Of running statistics the gradients are their newest values.
        path for path, spec in layer.weights().items_by_path() if not spec.is_statistic
    ]
    sources = [x, *map(theta.get_path, trained)]
    dy = tf.constant(np.random.default_rng(3).standard_normal([4, 5]), tf.float32)

    def logits_and_gradients(network):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = network(theta, x)
        return y, *tape.gradient(y, sources, dy)

    got = logits_and_gradients(functools.partial(layer.fprop, TRAINING))
    want = logits_and_gradients(functools.partial(papers_network, layer))
    largest = [np.abs(gradient).max() for gradient in want]
    assert min(largest) > 0
    for i, name in enumerate(["logits", "x", *trained]):
        atol = 1e-5 * max(largest[i], 0.1 * max(largest))  # As `assert_layer_parity`.
        np.testing.assert_allclose(got[i], want[i], rtol=0, atol=atol, err_msg=name)


def test_resnet_50_has_the_size_all_count():
    """torchvision's: 25,557,032 weights and 4.09e9 products for a picture of 224^2."""
    specs = RESNET_50.weights().leaves()
    assert sum(s.size for s in specs if not s.is_statistic) == 25_557_032
    # A mean and a variance for each scale.
    assert sum(s.size for s in specs if s.is_statistic) == 53_120
    assert RESNET_50.flops((224, 224)) == pytest.approx(2 * 4.09e9, rel=0.001)


@pytest.mark.parametrize(
    ("layer", "size"), [(RESNET_50, (224, 224)), (SMALL, (37, 50))], ids=["50", "odd"]
)
def test_counts_the_flops_of_its_kernels(layer, size):
    theta = layer.weights().map(lambda s: tf.TensorSpec(s.shape))
    run = tf.function(functools.partial(layer.fprop, TRAINING), autograph=False)
    graph = run.get_concrete_function(theta, tf.TensorSpec([1, *size, 3])).graph
    total, products = 0, 0
    for op in graph.get_operations():
        if op.type == "Conv2D":
            places = math.prod(op.outputs[0].shape[1:3])
            total += 2 * places * math.prod(op.inputs[1].shape)
        elif op.type == "MatMul":
            products += 2 * math.prod(op.inputs[1].shape)
    assert products and layer.flops(size) == total + products


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_gradients_reach_all_weights(dtype):
    theta = initialize(SMALL.weights(), key_from_seed(0))
    ctx = dataclasses.replace(TRAINING, activation_dtype=dtype)
    with tf.GradientTape() as tape:
        tape.watch(theta)
        y = SMALL.fprop(ctx, theta, pictures(4, 33, 26, 3))
        loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 3)
    gradients = theta.pack(tape.gradient(loss, theta.leaves()))
    assert y.dtype == dtype and y.shape == (4, 5)
    for path, gradient in gradients.items_by_path():
        assert gradient is not None and gradient.dtype == tf.float32, path
        assert np.isfinite(gradient).all() and np.any(gradient), path


def test_blocks_start_by_passing_on_what_they_are_given():
    zero = dataclasses.replace(SMALL, zero_last_scale=True)
    theta = initialize(zero.weights(), key_from_seed(0))
    scales = {p: w for p, w in theta.items_by_path() if p.endswith("norm.scale")}
    for path, scale in scales.items():
        assert (scale.numpy() == (0.0 if ".expand." in path else 1.0)).all(), path
    block, x = zero.parts["stage_0_block_1"], pictures(2, 4, 4, 8)
    y = block.fprop(TRAINING, theta.stage_0_block_1, x)
    np.testing.assert_array_equal(y, tf.nn.relu(x))
    others = initialize(SMALL.weights(), key_from_seed(0)).items_by_path()
    assert all((w.numpy() == 1).all() for p, w in others if p.endswith("norm.scale"))


def test_the_norm_is_the_one_asked_for():
    norm = functools.partial(GroupNorm, num_groups=1)
    layer = dataclasses.replace(SMALL, norm=norm)
    theta, x = weights_of(layer), pictures(2, 16, 16, 3)
    y = layer.fprop(TRAINING, theta, x)
    alone = layer.fprop(TRAINING, theta, x[:1])  # Not so with batch norm.
    np.testing.assert_allclose(y[:1], alone, rtol=1e-5, atol=1e-5)


# Eight devices.


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSplitPictures(Layer):
    """A network of whose tensors only the pictures are annotated."""

    network: ResNet

    def weights(self) -> NestedMap:
        return self.network.weights()

    def fprop(self, ctx, theta, x):
        return self.network.fprop(ctx, theta, ctx.split(x, PLACES, name="image"))


DATA = ShardingPlan(mesh_axes=("data",), mesh_shape=(8,), activations={"batch": "data"})
SPATIAL = ShardingPlan(
    mesh_axes=("data", "spatial"),
    mesh_shape=(2, 4),
    activations={"batch": "data", "height": "spatial"},
)


SPLIT = OfSplitPictures(network=dataclasses.replace(SMALL, blocks=(1, 1)))


@pytest.mark.parametrize(
    ("plan", "partitioner"),
    [
        *((DATA, partitioner) for partitioner in Partitioner),
        (SPATIAL, Partitioner.SHARDY),
        pytest.param(SPATIAL, Partitioner.GSPMD, marks=pytest.mark.slow),
    ],
)
def test_computes_on_eight_devices_what_it_does_on_one(plan, partitioner):
    x = pictures(8, 64, 32, 3).numpy()
    assert_layer_parity(SPLIT, x, plan=plan, partitioner=partitioner)


@pytest.mark.parametrize(
    "partitioner",
    [Partitioner.SHARDY, pytest.param(Partitioner.GSPMD, marks=pytest.mark.slow)],
)
def test_split_by_rows_devices_exchange_nothing_but_sums(partitioner):
    """Of gradients, and of batch norm's statistics."""

    def gradients(theta, x):
        ctx = Context(plan=DATA, mode=Mode.TRAIN)
        with tf.GradientTape() as tape:
            tape.watch(theta)
            loss = tf.reduce_sum(SPLIT.fprop(ctx, theta, x) ** 3)
        return tape.gradient(loss, theta)

    specs = SPLIT.weights()
    program = compile_program(
        gradients,
        [specs.map(lambda s: tf.TensorSpec(s.shape)), tf.TensorSpec([16, 32, 32, 3])],
        DATA.mesh,
        in_shardings=[specs.map(lambda s: s.sharding(DATA)), None],
        partitioner=partitioner,
    )
    kinds = {c.kind for c in program.collectives()}
    assert kinds == {"all-reduce"}


# What it refuses.


def run_on(shape):
    return SMALL.fprop(TRAINING, weights_of(SMALL), tf.zeros(shape))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ResNet(num_classes=5, blocks=(3, 4)),
            r"ResNet\.blocks has 2 stages and widths 4: give both one number for each",
        ),
        (
            lambda: ResNet(num_classes=5, blocks=()),
            r"ResNet\.blocks is \(\): give each stage a number of 1 or more, such as",
        ),
        (
            lambda: ResNet(num_classes=5, blocks=(1, 0, 1, 1)),
            r"ResNet\.blocks is \(1, 0, 1, 1\): give each stage",
        ),
        (lambda: ResNet(num_classes=5, widths=64), r"ResNet\.widths is 64: give each"),
        (
            lambda: ResNet(num_classes=1),
            r"ResNet\.num_classes is 1; it must be a whole num",
        ),
        (
            lambda: ResNet(num_classes=5, in_channels=0),
            r"ResNet\.in_channels is 0; it must be a whole number of at least 1",
        ),
        (
            lambda: run_on([1, 8, 8, 1]),
            r"'net' takes inputs whose last dims are \[3\] but was given \(1, 8, 8, 1",
        ),
        (
            lambda: run_on([1, 8, 3]),
            r"'net' has windows of 2 dims but was given \(1, 8, 3\)",
        ),
    ],
)
def test_what_makes_no_network_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
