"""What `fit` copies between the host and the mesh, and what memory the host keeps."""

import ctypes
import functools
import gc
import pathlib
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.functions import function as function_module
from meshwright.framework.functions import mesh_variable
from meshwright.framework.functions.mesh_variable import value_of
from tests.framework.functions.moves import watched

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
X = np.random.default_rng(0).standard_normal((80, 6)).astype(np.float32)
Y = np.arange(80) % 3


def network(units, mesh, optimizer="adam"):
    layers = [keras.layers.Input((units[0],)), *map(keras.layers.Dense, units[1:])]
    model = mw.keras.distribute(keras.Sequential(layers), mesh, "fsdp")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=True)
    return model


def resident():
    """Bytes of memory that this process holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def test_a_hundred_steps_move_batches_and_metrics_alone(monkeypatch):
    model = network((6, 16, 3), MESH)
    fit = {"batch_size": 8, "verbose": 0, "validation_data": (X[:16], Y[:16])}
    model.fit(X, Y, **fit)
    metrics = {v.shape for m in model.metrics for v in m.variables}
    assert metrics == {()}
    placed, fetched = watched(monkeypatch, mesh_variable, function_module)
    before = resident()
    model.fit(X, Y, **fit, epochs=10)
    assert model.optimizer.iterations.numpy() == 110
    assert set(placed) == {(8, 6), (8,), ()}
    assert placed.count((8, 6)) == 10 * (10 + 2)
    assert set(fetched) == {()}
    assert resident() - before < 2**24
    model.layers[0].kernel.numpy()  # The watch sees what moves.
    assert (6, 16) in fetched


def test_a_model_that_was_used_before_it_is_on_a_mesh_has_no_other_readers(caplog):
    layers = [keras.layers.Input((6,)), *map(keras.layers.Dense, (16, 3))]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)  # The loss has a custom gradient, which TF registers.
    model.fit(X, Y, batch_size=40, verbose=0)
    model.predict(X, verbose=0)
    step = model.predict_function
    mw.keras.distribute(model, MESH, "fsdp")
    model.fit(X, Y, batch_size=40, verbose=0)
    assert "drop what still holds it, such as a name for model" in caplog.text
    caplog.clear()
    del step
    model.fit(X, Y, batch_size=80, verbose=0)
    assert not any(value_of(v._value).on_host for v in model.variables[:4])
    assert "reads variable" not in caplog.text


def test_what_still_runs_elsewhere_reads_what_the_mesh_wrote(tmp_path):
    """Functions that only a list, a data set, a tape or a file's signatures hold."""
    v = tf.Variable(tf.range(8.0), name="shared")

    def total():
        return tf.reduce_sum(v)

    held = [tf.function(total).get_concrete_function()]
    data = iter(tf.data.Dataset.from_tensors(0).map(lambda _: total()))
    root = tf.Module()
    root.v = v
    tf.saved_model.save(root, tmp_path, signatures=held[0])
    loaded = tf.saved_model.load(tmp_path)
    signature, other = loaded.signatures["serving_default"], loaded.v
    del loaded, root
    x = tf.ones([8])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(tf.recompute_grad(lambda a: a * a * v))(x)
    gone = type("Gone", (), {})()
    proxies = [weakref.proxy(gone)]  # Python's collector lists them too.
    del gone

    @functools.partial(mw.function, mesh=MESH, layout={".*": ["data"]})
    def add():
        v.assign_add(tf.ones([8]))
        other.assign_add(tf.ones([8]))

    add()
    assert proxies
    assert held[0]().numpy() == next(data).numpy() == 36
    assert [t.numpy() for t in signature().values()] == [36]
    np.testing.assert_array_equal(tape.gradient(y, x), 2 * np.arange(1.0, 9))


def test_a_model_that_only_predicts_leaves_no_copy_on_the_host():
    model = network((6, 16, 3), MESH)
    want = model(X).numpy()
    got = model.predict(X, verbose=0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not any(value_of(v._value).on_host for v in model.variables[:4])
    np.testing.assert_allclose(model(X).numpy(), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(model.predict(X, verbose=0), got)


@pytest.fixture(scope="module")
def large():
    """A model of some 200 MB, on one device, after two steps."""
    one = mw.DeviceMesh(("data",), (1,))
    model = network((4096,) * 4, one, "sgd")
    data = np.ones([4, 4096], np.float32), np.arange(4)
    model.fit(*data, batch_size=2, verbose=0)
    return model, data


def test_copies_of_tf_are_freed(large):
    model, data = large
    weights = sum(v.value.numpy().nbytes for v in model.weights)
    assert weights > 200e6
    for variable in model.weights:
        variable.numpy()  # The second read since a step: TF's copy stays.
    read = resident()
    model.fit(*data, batch_size=2, verbose=0)
    assert read - resident() > 0.9 * weights


def test_saving_has_one_variable_after_another_on_the_host(large, tmp_path):
    model, data = large
    model.fit(*data, batch_size=2, verbose=0)
    before = resident()
    model.save_weights(tmp_path / "large.weights.h5")
    assert resident() - before < 20e6
    kernels = [layer.kernel._value for layer in model.layers]
    assert not any(value_of(kernel).on_host for kernel in kernels)
    assert (tmp_path / "large.weights.h5").stat().st_size > 200e6


def test_a_value_that_was_read_outlives_the_next_step():
    """Though programs take over the memory that the first read may look at."""
    variable = tf.Variable(tf.range(1000.0), name="kept")
    one = mw.DeviceMesh(("data",), (1,))
    add = mw.function(lambda: variable.assign_add(tf.ones([1000])), one)
    for number in range(1, 4):
        add()
        first, second = variable.read_value(), variable.read_value()
        add()
        add()
        want = np.arange(1000.0) + 3 * number - 2
        np.testing.assert_array_equal(first, want)
        np.testing.assert_array_equal(second, want)


def test_a_tape_sees_the_first_read():
    variable = tf.Variable(tf.ones([4]), name="watched")
    mw.function(lambda: variable.assign_add(tf.ones([4])), MESH)()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**2)
    np.testing.assert_array_equal(tape.gradient(loss, variable), np.full(4, 4.0))
