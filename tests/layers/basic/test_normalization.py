"""Normalization against numpy; the running statistics of batch norm."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    annotate_weights,
    initialize,
)
from meshwright.framework.modeling.optimizers.adafactor import Adafactor
from meshwright.framework.modeling.optimizers.optimizer import SGD, Adam
from meshwright.framework.modeling.optimizers.schedules import ConstantSchedule
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.basic.normalization import (
    BatchNorm,
    GroupNorm,
    LayerNorm,
    RMSNorm,
)
from meshwright.layers.stacks.repeat import Repeat, Unroll

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


MASK = np.array([[True, True, False], [True, False, False]])


def weights_of(layer) -> NestedMap:
    rng = np.random.default_rng(1)
    return layer.weights().map(
        lambda s: tf.constant(1 + rng.random(s.shape), tf.float32)
    )


def masked(x: np.ndarray) -> tf.Tensor:
    """float32 `x`, with something else in what is not real."""
    return tf.constant(np.where(MASK[..., None], x, np.inf), tf.float32)


def test_group_norm():
    layer = GroupNorm(model_dims=8, num_groups=2, epsilon=0.5)
    theta = weights_of(layer)
    y = layer.fprop(Context(), theta, masked(X), mask=tf.constant(MASK))
    for b in range(2):
        groups = X[b][MASK[b]].reshape(-1, 2, 4)
        mean = groups.mean((0, 2), keepdims=True)
        std = np.sqrt(groups.var((0, 2), keepdims=True) + 0.5)
        expected = ((groups - mean) / std).reshape(-1, 8) * theta.scale + theta.bias
        np.testing.assert_allclose(y[b][MASK[b]], expected, rtol=1e-5, atol=1e-5)
    assert np.isfinite(y).all()


def test_group_norm_of_an_image():
    layer = GroupNorm(model_dims=8, num_groups=4)
    theta = weights_of(layer)
    x = tf.constant(RNG.standard_normal([2, 3, 4, 5, 8]), tf.float32)
    flat = layer.fprop(Context(), theta, tf.reshape(x, [2, 60, 8]))
    y = layer.fprop(Context(), theta, x)
    np.testing.assert_allclose(y, tf.reshape(flat, x.shape), rtol=1e-5, atol=1e-5)


def batch_norm(x, theta, mean, variance) -> np.ndarray:
    return (x - mean) / np.sqrt(variance + 1e-5) * theta.scale + theta.bias


def test_batch_norm_in_training_and_in_evaluation():
    layer = BatchNorm(model_dims=8)
    theta = weights_of(layer)
    x, mask = masked(X), tf.constant(MASK)
    y = layer.fprop(Context(mode=Mode.TRAIN), theta, x, mask=mask)
    real = X[MASK]
    expected = batch_norm(real, theta, real.mean(0), real.var(0))
    np.testing.assert_allclose(y[MASK], expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(y).all()
    y = layer.fprop(Context(), theta, x, mask=mask)
    expected = batch_norm(real, theta, theta.mean, theta.variance)
    np.testing.assert_allclose(y[MASK], expected, rtol=1e-5, atol=1e-5)


def test_groups_of_rows_have_statistics_of_their_own():
    """As if each were a batch; running statistics take the mean of the groups."""
    layer, alone = BatchNorm(model_dims=8, group_size=2), BatchNorm(model_dims=8)
    theta, ctx = weights_of(layer), Context(mode=Mode.TRAIN)
    x, mask = tf.constant(batches()[0][0]), tf.constant([*MASK, *~MASK])

    def run(layer, rows):
        with tf.GradientTape() as tape:
            tape.watch(theta)
            y = layer.fprop(ctx, theta, x[rows], mask=mask[rows])
        grads = tape.gradient(y, theta)
        return y, grads.mean, grads.variance

    groups = [run(alone, slice(0, 2)), run(alone, slice(2, 4))]
    y, *statistics = run(layer, slice(None))
    np.testing.assert_allclose(y, tf.concat([g[0] for g in groups], 0), rtol=1e-5)
    for number, got in enumerate(statistics, 1):
        mean = (groups[0][number] + groups[1][number]) / 2
        np.testing.assert_allclose(got, mean, rtol=1e-5)
    # In evaluation there are no groups.
    plain = layer.fprop(Context(), theta, x[:3], mask=mask[:3])
    np.testing.assert_array_equal(
        plain, alone.fprop(Context(), theta, x[:3], mask=mask[:3])
    )
    with pytest.raises(ValueError, match="groups of 2 rows do not divide the 3 of the"):
        layer.fprop(ctx, theta, x[:3])


@pytest.mark.parametrize("partitioner", Partitioner)
def test_groups_on_one_device_each_need_no_communication(partitioner):
    plan = ShardingPlan(
        mesh_axes=("data",), mesh_shape=(8,), activations={"batch": "data"}
    )
    layer = Residual(norm=BatchNorm(model_dims=8, group_size=2))
    x = 3 * RNG.standard_normal([16, 3, 8]).astype(np.float32)
    mask = np.tile(MASK, (8, 1))
    assert_layer_parity(layer, x, plan=plan, partitioner=partitioner, mask=mask)
    specs = layer.weights()

    def forward(theta, x, mask):
        ctx = Context(plan=plan, mode=Mode.TRAIN)
        x = plan.annotate_activation(x, ("batch", "sequence", "model"))
        return layer.fprop(ctx, annotate_weights(plan, specs, theta), x, mask=mask)

    program = compile_program(
        forward,
        [
            specs.map(lambda s: tf.TensorSpec(s.shape, s.dtype)),
            tf.TensorSpec(x.shape),
            tf.TensorSpec(mask.shape, tf.bool),
        ],
        plan.mesh,
        partitioner=partitioner,
    )
    assert not program.collectives()


def test_a_batch_without_anything_real_stays_finite():
    for layer in (BatchNorm(model_dims=8), GroupNorm(model_dims=8, num_groups=2)):
        theta, x = weights_of(layer), tf.ones([2, 3, 8])
        with tf.GradientTape() as tape:
            tape.watch(theta)
            mask = tf.zeros([2, 3], tf.bool)
            y = layer.fprop(Context(mode=Mode.TRAIN), theta, x, mask=mask)
        for t in (y, *tape.gradient(y, theta).leaves()):
            assert np.isfinite(t).all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(Layer):
    """Something whose second layer sees what the first has made."""

    norm: BatchNorm

    def weights(self):
        return self.norm.weights()

    def fprop(self, ctx, theta, x, *, mask):
        y = x + tf.tanh(self.norm.fprop(ctx, theta, x, mask=mask))
        return ctx.split(y, ("batch", "sequence", "model"))


RATE = ConstantSchedule(value=0.1)
OPTIMIZERS = {
    "sgd": SGD(learning_rate=RATE, momentum=0.9, clip_global_norm=0.1),
    "adam": Adam(learning_rate=RATE, weight_decay=0.1),
    "adafactor": Adafactor(learning_rate=RATE),
}
STACKS = {
    "saved": {"recompute": Recompute.NOTHING},
    "recomputed": {"recompute": Recompute.EVERYTHING},
    "unrolled": {"unroll": Unroll.UNROLLED},
}
PLAN = ShardingPlan(mesh_shape=(2, 4), activations={"batch": "X", "model": "Y"})


def batches() -> tuple[np.ndarray, np.ndarray]:
    """Of two steps: x [2, B, S, M] and a mask, other numbers of real frames in each."""
    x = 3 * RNG.standard_normal([2, 4, 3, 8]) + 2
    return x.astype(np.float32), np.stack([[*MASK, *MASK], [*~MASK, *MASK]])


def step_of(stack, optimizer, plan):
    """(step, theta, slots, x, mask) -> theta, slots after an update."""
    specs = stack.weights()

    def step(i, theta, slots, x, mask):
        ctx = Context(plan=plan, mode=Mode.TRAIN)
        with tf.GradientTape() as tape:
            tape.watch(theta)
            y = stack.fprop(ctx, annotate_weights(plan, specs, theta), x, mask=mask)
            loss = tf.reduce_sum(tf.where(mask[..., None], y, 0.0) ** 3)
        grads = tape.gradient(loss, theta)
        update = optimizer.update(i, grads, theta, slots, specs)
        return update.theta, update.slots

    return step


def running_after(history: list, xs: np.ndarray, masks: np.ndarray, decay: float):
    """What numpy makes of the batches, given the weights before each step."""
    running = {"mean": np.zeros([2, 8]), "variance": np.ones([2, 8])}
    for theta, x, mask in zip(history, xs, masks, strict=True):
        for i in range(2):
            layer_theta = theta.map(lambda t, i=i: np.asarray(t)[i])
            real = x[mask]
            now = {"mean": real.mean(0), "variance": real.var(0)}
            for name, values in running.items():
                values[i] = decay * values[i] + (1 - decay) * now[name]
            x = x + np.tanh(batch_norm(x, layer_theta, now["mean"], now["variance"]))
    return running


@pytest.mark.parametrize(
    ("optimizer", "policy", "partitioner"),
    [
        ("sgd", "saved", None),
        ("sgd", "recomputed", Partitioner.SHARDY),
        ("adam", "recomputed", None),
        ("adam", "saved", Partitioner.GSPMD),
        ("adafactor", "unrolled", None),
    ],
)
def test_running_statistics_are_those_of_numpy(optimizer, policy, partitioner):
    """On one device, by TF alone, and on eight; out of a loop, and recomputed."""
    norm, optimizer = BatchNorm(model_dims=8, decay=0.75), OPTIMIZERS[optimizer]
    stack = Repeat(body=Residual(norm=norm), num_layers=2, **STACKS[policy])
    plan = PLAN if partitioner else dataclasses.replace(PLAN, mesh_shape=(1, 1))
    step, kind = step_of(stack, optimizer, plan), tf.convert_to_tensor
    theta = initialize(stack.weights(), key_from_seed(0))
    slots = initialize(optimizer.slots(stack.weights()), key_from_seed(0))
    xs, masks = batches()
    if partitioner:
        args = [tf.constant(0), theta, slots, tf.constant(xs[0]), tf.constant(masks[0])]
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, args)
        step = compile_program(step, specs, plan.mesh, partitioner=partitioner)
        kind = np.asarray
    history = []
    for i in range(2):
        history.append(theta)
        args = [np.int32(i), theta, slots, xs[i], masks[i]]
        theta, slots = step(*tf.nest.map_structure(kind, args))
    for name, values in running_after(history, xs, masks, 0.75).items():
        np.testing.assert_allclose(theta[name], values, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(theta.scale) - history[0].scale).min() > 1e-4


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_groups is 3, which does not divide"):
        GroupNorm(model_dims=8, num_groups=3)
    with pytest.raises(ValueError, match=r"GroupNorm\.num_groups is 0"):
        GroupNorm(model_dims=8, num_groups=0)
    with pytest.raises(ValueError, match=r"BatchNorm\.decay is 1"):
        BatchNorm(model_dims=8, decay=1)


@pytest.mark.parametrize(
    "layer", [BatchNorm(model_dims=8), GroupNorm(model_dims=8, num_groups=2)]
)
def test_a_mask_of_paddings_is_refused(layer):
    paddings = tf.zeros([2, 3])
    with pytest.raises(ValueError, match=r"but is float32 \(2, 3\); for paddings pass"):
        layer.fprop(Context(), weights_of(layer), tf.zeros([2, 3, 8]), mask=paddings)
