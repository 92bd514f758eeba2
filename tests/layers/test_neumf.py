"""NeuMF against numpy, its sizes, and the same numbers however tables are split."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.basic.embedding import Lookup
from meshwright.layers.neumf import NeuMF

U, ITEMS, B = 10, 6, 8
SMALL = {"users": U, "items": ITEMS, "factors": 4, "mlp_dims": (12, 10, 8)}
RNG = np.random.default_rng(0)
USER = RNG.integers(0, U, B).astype(np.int32)
ITEM = RNG.integers(0, ITEMS, B).astype(np.int32)


def neumf(**kwargs):
    """A small one, with weights that are all as large as those of its kernels."""
    layer = NeuMF(**SMALL, **kwargs)
    theta = initialize(layer.weights(), key_from_seed(0))
    return layer, theta.map(
        lambda w: tf.constant(RNG.standard_normal(w.shape), w.dtype)
    )


def by_numpy(theta, user, item) -> np.ndarray:
    """As the paper has it: vectors side by side, and one kernel for both scores."""
    w = theta.map(lambda t: np.float64(t))
    product = w.gmf.user[user] * w.gmf.item[item]
    x = np.concatenate([w.mlp.user[user], w.mlp.item[item]], -1)
    first = w.mlp.layer_1
    kernel = np.concatenate([first.user_kernel, first.item_kernel])
    x = np.maximum(x @ kernel + first.bias, 0)
    x = np.maximum(x @ w.mlp.layer_2.kernel + w.mlp.layer_2.bias, 0)
    score = np.concatenate([w.gmf.score, w.mlp.score])
    return (np.concatenate([product, x], -1) @ score + w.bias)[:, 0]


@pytest.mark.parametrize("lookup", Lookup)
def test_scores_are_the_papers(lookup):
    layer, theta = neumf(lookup=lookup)
    result = layer.fprop(Context(), theta, tf.constant(USER), item=tf.constant(ITEM))
    assert result.shape == (B,)
    np.testing.assert_allclose(result, by_numpy(theta, USER, ITEM), rtol=1e-5)


def test_sizes_of_movielens():
    """Tables of 64 and 128 a row, then 256 x 256, 256 x 128, 128 x 64 and 128 x 1."""
    layer = NeuMF(users=138_493, items=26_744)
    specs = layer.weights()
    tables = (138_493 + 26_744) * (64 + 128)
    mlp = (256 + 1) * 256 + (256 + 1) * 128 + (128 + 1) * 64
    assert sum(spec.size for spec in specs.leaves()) == tables + mlp + 128 + 1
    assert (specs.gmf.user.shape, specs.gmf.user.dims) == (
        (138_493, 64),
        ("users", "model"),
    )
    assert (specs.mlp.item.shape, specs.mlp.item.dims) == (
        (26_744, 128),
        ("items", "model"),
    )
    products = 256 * 256 + 256 * 128 + 128 * 64 + 64
    assert layer.flops() == 2 * products + 3 * 64


def test_the_first_kernels_start_as_one_would():
    layer = NeuMF(users=4, items=4, factors=48, mlp_dims=(256, 256, 16))
    theta = initialize(layer.weights(), key_from_seed(0))
    for kernel in (theta.mlp.layer_1.user_kernel, theta.mlp.layer_1.item_kernel):
        np.testing.assert_allclose(np.std(kernel), 1 / 16, rtol=0.02)
    for score in (theta.gmf.score, theta.mlp.score):
        np.testing.assert_allclose(np.std(score), 1 / 8, rtol=0.4)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_all_weights_are_trained(dtype):
    layer, theta = neumf()
    with tf.GradientTape() as tape:
        tape.watch(theta)
        ctx = Context(activation_dtype=dtype)
        result = layer.fprop(ctx, theta, tf.constant(USER), item=tf.constant(ITEM))
    gradients = theta.pack(tape.gradient(result, theta.leaves()))
    assert result.dtype == dtype
    for path, gradient in gradients.items_by_path():
        assert isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32, path
        assert np.any(gradient), path


PLANS = {
    "data": ShardingPlan(
        mesh_axes=("data",), mesh_shape=(8,), activations={"batch": "data"}
    ),
    "rows": ShardingPlan(  # 4 divides neither table's rows.
        mesh_shape=(2, 4),
        weights={"users": "Y", "items": "Y"},
        activations={"batch": "X"},
    ),
    "model": ShardingPlan(
        mesh_shape=(2, 4),
        weights={"model": "Y", "hidden": "X"},
        activations={"batch": "X", "model": "Y", "hidden": "Y"},
    ),
}


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize("plan", PLANS)
def test_computes_on_eight_devices_what_it_does_on_one(plan, partitioner, monkeypatch):
    # As it starts, all that comes of the tables is too small to matter.
    monkeypatch.setattr("meshwright.layers.neumf._TABLE_STDDEV", 1.0)
    layer = NeuMF(**SMALL)
    assert_layer_parity(
        layer, USER, item=ITEM, plan=PLANS[plan], partitioner=partitioner
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"users": 0}, r"NeuMF.users is 0; it must be a whole number of at least 1"),
        ({"factors": "8"}, "NeuMF.factors is '8'"),
        ({"mlp_dims": (12, 0)}, r"NeuMF.mlp_dims\[1\] is 0"),
        ({"mlp_dims": (12,)}, r"NeuMF.mlp_dims is \(12,\): give how much"),
        ({"mlp_dims": (13, 4)}, "an even number as half is the user's"),
        ({"lookup": "gather"}, "NeuMF.lookup is 'gather'; it must be one of"),
    ],
)
def test_wrong_sizes_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        NeuMF(**{**SMALL, **given})


def test_users_and_items_that_are_no_pairs_are_refused():
    layer, theta = neumf()
    message = (
        r"layer 'top' takes users and items \[B\], but was given \(8,\) and \(2,\)"
    )
    with pytest.raises(ValueError, match=message):
        user, item = tf.constant(USER), tf.constant(ITEM[:2])
        layer.fprop(Context(path="top"), theta, user, item=item)
