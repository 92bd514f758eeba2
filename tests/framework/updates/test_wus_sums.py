"""Sums over the batch, reduced onto shards: what may and may not follow them."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw

MESH = mw.DeviceMesh(("data",), (8,))
ROWS = mw.Sharding.from_dims_mapping(MESH, ["data", -1])
X = np.random.default_rng(0).normal(size=(16, 15)).astype(np.float32)


def rounded_after_the_sum(w, x):
    return w + tf.reshape(tf.cast(tf.reduce_sum(x, 0), tf.int32), [3, 5])


def cast_after_the_sum(w, x):
    g = tf.cast(tf.reshape(tf.reduce_sum(x, 0), [3, 5]), tf.bfloat16)
    return w + tf.cast(g, tf.float32)


def reduced_again(w, x):
    g = tf.reshape(tf.reduce_sum(x, 0), [3, 5])
    return w - (g - tf.reduce_max(g))


def whole_numbers(w, x):
    return w + tf.reduce_sum(tf.cast(x, tf.int32), 0)


def shared_table(w, x):
    """Neither dim is divided by 8; rows of padding are never looked up."""
    ids = tf.cast(tf.abs(x[:, 0]) * 1000, tf.int32) % 101
    with tf.GradientTape() as tape:
        tape.watch(w)
        rows = tf.gather(tf.reshape(w + 1.0, w.shape), ids)
        logits = tf.matmul(rows * x[:, :3], w, transpose_b=True)
        loss = tf.reduce_mean(tf.square(logits - x[:, :1]))
    g = tape.gradient(loss, w)
    # As rows have a norm, they are not combined with columns.
    return w - g / (1.0 + tf.reduce_sum(tf.square(g), 1, keepdims=True))


def read_twice(w, x):
    product = tf.matmul(x, x, transpose_a=True)
    return w - product * tf.reduce_sum(tf.sort(product, 0)[:2])


@pytest.mark.parametrize(
    "update,weight",
    [
        (rounded_after_the_sum, tf.TensorSpec([3, 5], tf.int32)),
        (cast_after_the_sum, tf.TensorSpec([3, 5])),
        (reduced_again, tf.TensorSpec([3, 5])),
        (shared_table, tf.TensorSpec([101, 3])),
        (whole_numbers, tf.TensorSpec([15], tf.int32)),
        (read_twice, tf.TensorSpec([15, 15])),
    ],
    ids=lambda param: getattr(param, "__name__", ""),
)
def test_sharded_sums_are_the_same(update, weight):
    replicated = mw.Sharding.replicated(MESH, weight.shape.rank)
    results = {}
    for mode in (mw.WeightUpdateSharding.OFF, mw.WeightUpdateSharding.ALL):
        program = mw.compile_program(
            lambda state, x: {"state": {"w": update(state["w"], x)}},
            [{"w": weight}, tf.TensorSpec(X.shape)],
            MESH,
            in_shardings=[{"w": replicated}, ROWS],
            out_shardings={"state": {"w": replicated}},
            update_sharding=mw.UpdateSharding(mode=mode, data_axes=("data",)),
        )
        start = np.zeros(weight.shape, weight.dtype.as_numpy_dtype)
        out = program.unshard(program({"w": start}, X))
        results[mode] = out["state"]["w"]
    assert len(program.updates.sharded) == 1
    off, on = results.values()
    np.testing.assert_allclose(on, off, rtol=2e-6, atol=2e-6 * np.abs(off).max())


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda w: {"w": w[:8]}, r"w of the state is float32\(16, 4\), .*\(8, 4\)"),
        (lambda w: {"w": tf.cast(w, tf.bfloat16)}, "'state' it is bfloat16"),
        (lambda w: {"v": w}, r"missing \['w'\], unknown \['v'\]"),
    ],
)
def test_state_that_comes_out_otherwise_is_refused(change, message):
    sharding = mw.UpdateSharding(mode=mw.WeightUpdateSharding.ALL, data_axes=("data",))
    with pytest.raises(ValueError, match=message):
        mw.compile_program(
            lambda state: {"state": change(state["w"])},
            [{"w": tf.TensorSpec([16, 4])}],
            MESH,
            in_shardings=[{"w": mw.Sharding.replicated(MESH, 2)}],
            update_sharding=sharding,
        )


def test_a_mode_alone_is_no_update_sharding():
    with pytest.raises(
        ValueError, match="'all'; it must be an UpdateSharding, such as"
    ):
        mw.compile_program(
            lambda state: {"state": state},
            [tf.TensorSpec([16])],
            MESH,
            update_sharding="all",
        )
