"""Assertions and checks of numerics: programs make them, and calls tell of them."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
HERE = pathlib.Path(__file__).name
GOOD = np.full([8, 4], 1.5, np.float32)
BAD = GOOD.copy()
BAD[5, 2] = -1


def split(x):
    return mw.mesh_split(x, MESH, ["data", "model"])


def positive(x):
    tf.debugging.assert_positive(x, "x must be positive")
    return x * 2


def raw(x):
    tf.debugging.Assert(tf.reduce_all(x > 0), [x])
    return x * 2


def numerics(x):
    with tf.name_scope("head"):
        return tf.debugging.check_numerics(tf.math.log(x), "logits") * 2


@tf.function
def called(x):
    return positive(x)


def in_a_loop(x):
    for i in tf.range(3):
        tf.debugging.assert_greater(x, tf.cast(-i, tf.float32), "too small")
        x = x + 1.0
    return x


def in_a_branch(x):
    if x[5, 2] < 0:
        x = positive(x)
    return x


def mapped(x):
    return tf.map_fn(positive, x)


def recomputed(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.recompute_grad(positive)(x) ** 2
    return tape.gradient(y, x)


def gradient_of_a_loop(x):
    """The gradient of a root is infinite at 0, where the root is finite."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.maximum(x, 0.0)
        for _ in tf.range(2):
            y = tf.sqrt(tf.debugging.check_numerics(y, "y"))
    return tape.gradient(y, x)


def inner(x):
    return mw.function(positive, MESH)(x)


CHECKS = {
    "here": (positive, "assert_positive.*/Assert", "x must be positive"),
    "without a text": (raw, "Assert.*/Assert", "its condition is false"),
    "numerics": (numerics, "head/CheckNumerics", "logits: a tensor .* has a NaN or an"),
    "function": (called, "assert_positive.*/Assert", "x must be positive"),
    "loop": (in_a_loop, "while/assert_greater.*/Assert", "too small"),
    "branch": (in_a_branch, "cond/assert_positive.*/Assert", "x must be positive"),
    "map": (mapped, "map/while/assert_positive.*/Assert", "x must be positive"),
    "recomputed": (recomputed, "assert_positive.*/Assert", "x must be positive"),
    "gradient": (gradient_of_a_loop, ".*_grad/CheckNumerics", ".*gradient"),
    "inner": (inner, "assert_positive.*/Assert", "x must be positive"),
}


@pytest.mark.parametrize("partitioner", mw.Partitioner)
@pytest.mark.parametrize("place", CHECKS)
def test_a_check_that_does_not_hold(place, partitioner):
    fn, op, message = CHECKS[place]
    calls = tf.Variable([0, 0])

    def step(x):
        calls.assign_add([1, 2])
        return fn(split(x))

    step = mw.function(step, MESH, name="step", partitioner=partitioner, strict=True)
    for _ in range(2):
        want = tf.function(fn if fn is not inner else positive)(GOOD)
        np.testing.assert_allclose(step(GOOD), want, rtol=1e-6)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=rf"(?s)step: op '{op}' \(.*{HERE}:\d+\) failed: {message}.*is there",
        ):
            step(BAD)
    np.testing.assert_array_equal(calls, [4, 8])


def test_the_first_that_does_not_hold_is_told():
    def both(x):
        tf.debugging.assert_less(x, 1.0, "first")
        return positive(x)

    step = mw.function(both, MESH)
    with pytest.raises(tf.errors.InvalidArgumentError, match="failed: first"):
        step(BAD)
    with pytest.raises(tf.errors.InvalidArgumentError, match="failed: x must be"):
        step(-GOOD)


def test_a_message_has_no_blanks_for_values():
    def fn(x):
        tf.debugging.assert_less(tf.reduce_sum(x), tf.reduce_max(x), "sums")
        return x

    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        mw.function(fn, MESH)(GOOD)
    assert "=" not in error.value.message.replace("x < y", "")
    assert re.search(r"sums Condition x < y .* x \(\S+\) y \(\S+\)\. The call has",
                     error.value.message)  # fmt: skip


def test_a_program_without_checks_has_nothing_for_them():
    spec = tf.TensorSpec([8, 4])
    plain = mw.function(lambda x: x * 2, MESH).program(spec)
    assert plain.outputs["violated"] == []
    checked = mw.function(positive, MESH).program(spec)
    assert [out.shape for out in checked.outputs["violated"]] == [[]]


def test_a_check_of_shapes():
    def fn(x):
        tf.debugging.assert_equal(tf.shape(x)[0], 8, "eight rows")
        return x

    step = mw.function(fn, MESH, strict=True)
    np.testing.assert_array_equal(step(GOOD), GOOD)
    with pytest.raises(tf.errors.InvalidArgumentError, match="eight rows"):
        step(GOOD[:4])


def test_a_keras_model_tells_in_fit():
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Lambda(lambda x: tf.debugging.check_numerics(x, "inputs")),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    mw.keras.distribute(model, MESH)
    targets = np.ones([8, 2], np.float32)
    model.fit(GOOD, targets, verbose=0)
    nan = np.where(BAD < 0, np.nan, BAD)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="train_step: op '.*' .* failed: inputs: a"
    ):
        model.fit(nan, targets, verbose=0)


def test_a_check_in_a_manual_region_is_refused():
    region = mw.manual_partition(
        positive, mesh=MESH, in_dims=[["data", None]], out_dims=["data", None]
    )
    with pytest.raises(mw.LoweringError, match="Assert.* is in a manual region, and"):
        mw.function(region, MESH)(GOOD)


def test_checks_of_all_tensors_are_refused():
    tf.debugging.enable_check_numerics()
    try:
        with pytest.raises(mw.LoweringError, match="Leave out tf.debugging.enable_che"):
            mw.function(lambda x: tf.math.log(x), MESH)(GOOD)
    finally:
        tf.debugging.disable_check_numerics()
