"""Weights of Keras models go to files and come back, on any mesh."""

import csv
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.functions.mesh_variable import value_of

distribute = mw.keras.distribute
MESH = mw.DeviceMesh(("data", "model"), (2, 4))
MESHES = {
    "one device": mw.DeviceMesh(("data",), (1,)),
    "4x2": mw.DeviceMesh(("data", "model"), (4, 2)),
}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 6)).astype(np.float32)
Y = np.arange(16) % 3
FIT = {"batch_size": 8, "verbose": 0, "shuffle": False}


def as_it_is(model):
    return model


def on(mesh):
    """What distributes a model over a mesh, if there is one."""
    return as_it_is if mesh is None else lambda m: distribute(m, mesh, "fsdp")


def network(change=as_it_is, optimizer=None, seed=1):
    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    layers = [keras.layers.Input((6,)), dense(16, "relu"), dense(3)]
    model = change(keras.Sequential(layers))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(1e-2), loss, jit_compile=True)
    return model


def assert_alike(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def state_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@pytest.fixture(scope="module")
def trained():
    """A model on a mesh after an epoch; its state, and Keras's after one more."""
    theirs = network()
    theirs.fit(X, Y, **FIT, epochs=2)
    ours = network(on(MESH))
    ours.fit(X, Y, **FIT)
    return ours, state_of(ours), state_of(theirs)


def keras_file(model, folder):
    model.save(folder / "saved.keras")
    return lambda change: change(keras.models.load_model(folder / "saved.keras"))


def _fresh(change, restore):
    """Another model of other weights, which has trained before it is restored."""
    model = network(change, seed=2)
    model.fit(X, Y, **FIT)
    restore(model)
    return model


def weights_file(model, folder):
    path = folder / "saved.weights.h5"
    model.save_weights(path)
    return lambda change: _fresh(change, lambda other: other.load_weights(path))


def checkpoint(model, folder):
    path = _checkpoint(model).save(folder / "saved")

    def restore(other):
        _checkpoint(other).restore(path).assert_consumed()

    return lambda change: _fresh(change, restore)


def _checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def checkpoint_manager(model, folder):
    def manager(model):
        return tf.train.CheckpointManager(_checkpoint(model), folder, max_to_keep=1)

    manager(model).save()
    return lambda change: _fresh(
        change, lambda other: manager(other).restore_or_initialize()
    )


@pytest.mark.parametrize(
    ("save", "mesh"),
    [
        (keras_file, None),
        (keras_file, "one device"),
        (keras_file, "4x2"),
        (weights_file, None),
        (weights_file, "4x2"),
        (checkpoint, None),
        (checkpoint, "4x2"),
        (checkpoint_manager, "4x2"),
    ],
)
def test_training_goes_on_from_a_file(trained, save, mesh, tmp_path):
    model, state, goal = trained
    load = save(model, tmp_path)
    loaded = load(on(MESHES.get(mesh)))
    for got, want in zip(state_of(loaded), state, strict=True):
        np.testing.assert_array_equal(got, want)
    loaded.fit(X, Y, **FIT)
    assert_alike(state_of(loaded), goal)
    # What was saved stays as it is.
    assert_alike(state_of(model), state)


def test_a_file_of_one_device_is_loaded_onto_a_mesh(tmp_path):
    theirs = network()
    theirs.fit(X, Y, **FIT)
    ours = keras_file(theirs, tmp_path)(on(MESH))
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
    assert_alike(state_of(ours), state_of(theirs))


_SERVE = """
import sys
import numpy as np
import tensorflow as tf
folder = sys.argv[1]
model = tf.saved_model.load(folder)
np.save(folder + "/y.npy", model.serve(np.load(folder + "/x.npy")).numpy())
assert "meshwright" not in sys.modules
"""


def test_an_exported_model_serves_without_meshwright(trained, tmp_path, caplog):
    model, _, _ = trained
    model.export(tmp_path, verbose=False)
    assert "does not run on the mesh" not in caplog.text
    assert not any(value_of(v._value).readers for v in model.variables)
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-c", _SERVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_alike([np.load(tmp_path / "y.npy")], [model.predict(X, verbose=0)])


def test_a_seed_is_exported_after_it_was_on_the_mesh(tmp_path):
    """Keras makes a graph of its own, in which the seed's value is read."""
    dense, drop = keras.layers.Dense, keras.layers.Dropout
    model = keras.Sequential([keras.Input((8,)), dense(16), drop(0.1), dense(4)])
    model = on(MESH)(model)
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    model.fit(x, x[:, :4], verbose=0)
    model.export(tmp_path, verbose=False)
    served = tf.saved_model.load(tmp_path)
    assert_alike([served.serve(x).numpy()], [model.predict(x, verbose=0)])


def test_weights_are_read_and_set(trained):
    model, state, _ = trained
    clone = on(MESHES["4x2"])(keras.models.clone_model(model))
    before = clone.predict(X, verbose=0)
    clone.set_weights(model.get_weights())
    assert_alike(clone.get_weights(), state[: len(model.weights)])
    after = clone.predict(X, verbose=0)
    assert_alike([after], [model.predict(X, verbose=0)])
    assert np.abs(after - before).max() > 0.1


class StoppedError(Exception):
    """A training that ends before its time."""


def _stop_at(epoch, batch):
    epochs = []

    def stop(number, logs):
        if epochs == [*range(epoch + 1)] and number == batch:
            raise StoppedError

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch), on_train_batch_end=stop
    )


def test_a_training_that_was_cut_off_resumes_bit_by_bit(tmp_path):
    whole = network(on(MESH))
    whole.fit(X, Y, **FIT, epochs=4)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(StoppedError):
        network(on(MESH)).fit(X, Y, **FIT, epochs=4, callbacks=[backup, _stop_at(2, 0)])
    resumed = network(on(MESH), seed=2)
    fit = resumed.fit(X, Y, **FIT, epochs=4, callbacks=[backup])
    assert fit.epoch == [2, 3]
    for got, want in zip(state_of(resumed), state_of(whole), strict=True):
        np.testing.assert_array_equal(got, want)


def callbacks(folder):
    made = keras.callbacks
    return [
        made.SwapEMAWeights(swap_on_epoch=True),
        made.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
        made.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=0.1),
        made.ModelCheckpoint(folder / "{epoch}.keras", "val_loss"),
        made.ModelCheckpoint(
            folder / "best.weights.h5",
            "val_loss",
            save_best_only=True,
            save_weights_only=True,
        ),
        made.TensorBoard(folder / "logs", histogram_freq=1, write_images=True),
        made.CSVLogger(folder / "log.csv"),
    ]


def test_callbacks_that_read_and_write_weights(tmp_path):
    def run(change, folder):
        folder.mkdir()
        adam = keras.optimizers.Adam(
            0.03, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
        )
        model = network(change, adam)
        fit = model.fit(
            X,
            Y,
            **FIT,
            epochs=6,
            validation_data=(X[::-1], Y),
            callbacks=callbacks(folder),
        )
        rows = csv.DictReader((folder / "log.csv").read_text().splitlines())
        values = [*fit.history.values(), *state_of(model)]
        values += [np.array([*map(float, row.values())]) for row in rows]
        values += state_of(keras.models.load_model(folder / "1.keras"))
        model.load_weights(folder / "best.weights.h5")
        histograms = [*(folder / "logs" / "train").iterdir()]
        return fit.history["val_loss"], len(histograms), [*values, *state_of(model)]

    losses, logs, ours = run(on(MESH), tmp_path / "ours")
    theirs = run(as_it_is, tmp_path / "theirs")
    assert (len(losses), logs) == (len(theirs[0]), theirs[1])
    assert_alike(ours, theirs[2])


def test_weights_of_another_shape_are_told_without_their_values(tmp_path):
    path = tmp_path / "narrow.weights.h5"
    keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)]).save_weights(path)
    wide = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16)])
    with pytest.raises(ValueError, match="shape") as error:
        distribute(wide, MESH).load_weights(path)
    assert "(6, 16)" in str(error.value) and "value=[" not in str(error.value)
