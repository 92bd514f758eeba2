"""Keras's layers on a mesh: results, gradients and state as by one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from tests.framework.functions.fit.library.keras_layers import (
    ABSTRACT,
    NO_JIT,
    REFUSED,
    SETTINGS,
    UNTESTED,
    exported,
)

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
ROWS_SPLIT = (("data", "model"), None)
"""Axes of the first and the last dim of each input."""
CHANNELS_SPLIT = ("data", "model")


def annotated(x, first, last):
    dims = [first] + [None] * (x.shape.rank - 1)
    if last is not None and x.shape.rank > 1:
        dims[-1] = last
    return mw.mesh_split(x, MESH, dims)


def ramp(x):
    """Numbers of which no two are alike, to weigh a result's elements by."""
    count = tf.cast(tf.size(x), tf.float32)
    return tf.reshape(tf.sin(tf.range(count) * 0.7), tf.shape(x))


def step(layer, setting, split, inputs):
    """Results, and gradients of a weighted sum of them."""
    if split is not None:
        inputs = [annotated(x, *split) for x in inputs]
    with tf.GradientTape() as tape:
        tape.watch([x for x in inputs if x.dtype.is_floating])
        given = [inputs] if setting.is_list else inputs
        out = layer(*given, training=True)
        results = [x for x in tf.nest.flatten(out) if tf.is_tensor(x)]
        sums = [tf.reduce_sum(x * ramp(x)) for x in results if x.dtype.is_floating]
        total = tf.add_n(sums) if sums else 0.0
    sources = [x for x in inputs if x.dtype.is_floating]
    sources += [v.value for v in layer.trainable_variables]
    gradients = tape.gradient(total, sources) if sums and setting.is_smooth else []
    return results, [tf.convert_to_tensor(g) for g in gradients if g is not None]


def computed(setting, compiled, split=None):
    """Results, gradients and state after two steps, of a layer made anew."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    layer, inputs = setting.make(), setting.inputs()
    layer(inputs) if setting.is_list else layer(*inputs)  # Variables are made.
    run = compiled(functools.partial(step, layer, setting, split))
    inputs = [tf.constant(x) for x in inputs]
    out = [run(inputs), run(inputs)]
    return [*tf.nest.flatten(out), *(v.numpy() for v in layer.variables)]


@functools.cache
def by_one_device(name):
    return computed(SETTINGS[name], lambda fn: tf.function(fn, jit_compile=True))


@pytest.mark.parametrize(
    ("split", "partitioner"),
    [
        (ROWS_SPLIT, mw.Partitioner.SHARDY),
        pytest.param(CHANNELS_SPLIT, mw.Partitioner.SHARDY, marks=pytest.mark.slow),
        (CHANNELS_SPLIT, mw.Partitioner.GSPMD),
    ],
    ids=["rows-shardy", "channels-shardy", "channels-gspmd"],
)
# A layer's cases are neighbours, so that a worker computes on one device only once.
@pytest.mark.parametrize(
    "name", sorted(SETTINGS.keys() - NO_JIT.keys() - REFUSED.keys())
)
def test_a_layer(name, split, partitioner):
    want = by_one_device(name)
    got = computed(
        SETTINGS[name],
        lambda fn: mw.function(fn, MESH, name=name, partitioner=partitioner),
        split,
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NO_JIT)
def test_a_layer_that_tf_does_not_compile(name):
    with pytest.raises(tf.errors.InvalidArgumentError, match=NO_JIT[name]):
        by_one_device(name)
    with pytest.raises(mw.LoweringError):
        computed(SETTINGS[name], lambda fn: mw.function(fn, MESH, name=name))


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_is_refused(name):
    with pytest.raises(mw.LoweringError, match=f"{name}: .*{REFUSED[name]}"):
        computed(SETTINGS[name], lambda fn: mw.function(fn, MESH, name=name))


def test_each_layer_of_keras_has_a_setting_or_a_reason():
    assert exported() == {*SETTINGS, *ABSTRACT, *UNTESTED}
    compiled = SETTINGS.keys() - NO_JIT.keys()
    assert len(compiled - REFUSED.keys()) >= 0.95 * len(compiled)
