"""What one of several processes does with Keras models and functions on a mesh.

python -m tests.framework.functions.fit.several NUMBER COUNT PORT WHAT FOLDER
"""

import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"
import jax
import keras
import numpy as np
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.compiler.xla import processes
from tests.framework.functions.fit import restarted

HEARTBEAT = 20
LAYERS = keras.layers
MESH = mw.DeviceMesh(("data", "model"), (2, 4))
X = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
Y = np.arange(20) % 3


def network():
    return keras.Sequential(
        [
            LAYERS.Input((6,)),
            LAYERS.Dense(16, "relu"),
            LAYERS.BatchNormalization(),
            LAYERS.Dropout(0.1),
            LAYERS.Dense(3),
        ]
    )


def trained(folder, change=lambda model: model):
    """By name what six steps and an evaluation gave; saves the model twice."""
    keras.utils.set_random_seed(1)
    model = change(network())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(1e-2)
    model.compile(adam, loss, metrics=["accuracy"], jit_compile=True)
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
        keras.callbacks.ModelCheckpoint(
            folder / "checkpoint.weights.h5", save_weights_only=True
        ),
    ]
    how = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": callbacks}
    history = model.fit(X, Y, **how, validation_data=(X, Y)).history
    evaluation = model.evaluate(X, Y, verbose=0, return_dict=True)
    predicted = model.predict(X, verbose=0)
    model.save(folder / "saved.keras")
    named = {v.path: v.numpy() for v in [*model.variables, *model.optimizer.variables]}
    numbers = [v for v in named.values() if v.dtype.kind == "f"]
    return {**history, "predicted": predicted, **evaluation, **dict(enumerate(numbers))}


def moved():
    """Of float64s, of which each process has a part, and that change their form."""
    values = [tf.Variable(np.full([n], 1 / 3), name=f"wide_{n}") for n in (8, 6)]
    large = tf.range(1 << 19)  # An input of the program, not a constant in it.

    def add():
        return [v.assign_add(tf.cast(large[: v.shape[0]], v.dtype)) for v in values]

    for axis in ("data", "model", "data"):  # Six elements are padded for "model".
        returned = mw.function(add, MESH, layout={"wide": [axis]})()
    return np.concatenate([*returned, *values])


def error_of(call, *args):
    try:
        call(*args)
    except (OSError, RuntimeError, ValueError, tf.errors.OpError) as error:
        return str(error)
    raise AssertionError("nothing was told")


def files(folder, change=lambda model: model):
    """The states of two models that were written, read and trained in turns."""
    keras.utils.set_random_seed(1)
    model = change(network())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=True)
    each = keras.callbacks.ModelCheckpoint(folder / "new" / "{epoch}.keras")
    fit = {"batch_size": 8, "verbose": 0, "shuffle": False}
    model.fit(X, Y, **fit, epochs=2, callbacks=[each])
    model.export(folder / "exported", verbose=False)
    model.fit(X, Y, **fit)
    model.save_weights(folder / "new" / "three.weights.h5")
    model.fit(X, Y, **fit)
    model.load_weights(folder / "new" / "three.weights.h5")
    model.fit(X, Y, **fit)
    loaded = change(keras.models.load_model(folder / "new" / "2.keras"))
    loaded.fit(X, Y, **fit)
    return [
        v.numpy() for m in (model, loaded) for v in (*m.weights, m.optimizer.iterations)
    ]


def refused(number, folder):
    """The messages of files that cannot be written or read, in two processes."""
    model = mw.keras.distribute(restarted.network(), MESH, "fsdp")
    (folder / "a_file").write_text("")
    yield error_of(model.save, folder / "a_file" / "saved.keras")
    yield error_of(model.export, folder / "a_file" / "exported")
    model.save_weights(folder / "of_0.weights.h5")
    yield error_of(model.load_weights, folder / f"of_{number}.weights.h5")
    yield error_of(keras.saving.save_model, model, folder / f"{number}.keras")
    theirs = keras.callbacks.BackupAndRestore(folder / "theirs")
    yield error_of(lambda: model.fit(X, Y, callbacks=[theirs]))


def misuses(number):
    """The messages of what goes wrong in two processes."""
    x = tf.ones([8 + number, 4])
    total = mw.function(tf.reduce_sum, MESH, name="total")
    yield error_of(total, x)
    yield error_of(total, tf.ones([8, 4]) * number)
    variable = tf.Variable(tf.fill([4], float(number)), name="start")
    yield error_of(mw.function(lambda: variable + 1, MESH, name="read"))
    yield error_of(mw.function(lambda: x, MESH, name=f"fn_{number}"))
    split = tf.Variable(tf.zeros([8]), name="split")
    mw.function(lambda: split.assign(split + 1), MESH, layout={"": ["data"]})()
    processes._MEETING_SECONDS = 3
    if number == 0:
        yield error_of(split.numpy)
        yield error_of(mw.keras.distribute(network(), MESH).save, "alone.keras")
        yield error_of(mw.function(lambda: x, MESH, name="alone"))


def restarts(number, folder):
    """Trains by a backup; process 1 kills itself once, as long as it has not before."""
    callbacks = []
    if number == 1 and not (folder / "killed").exists():
        (folder / "killed").write_text("")
        callbacks = [restarted.kills_itself(epoch=2, seconds=0.02)]
    epochs, state = restarted.trained(folder, *callbacks)
    np.savez(folder / f"{number}.npz", np.array(epochs), *state)


def main():
    number, count, port = map(int, sys.argv[1:4])
    what, folder = sys.argv[4], pathlib.Path(sys.argv[5])
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, number, heartbeat_timeout_seconds=HEARTBEAT
    )
    mw.set_platform("cpu", 8 // count)
    if what == "restarts":
        restarts(number, folder)
        return
    if what in ("misuses", "refused"):
        told = misuses(number) if what == "misuses" else refused(number, folder)
        (folder / f"{number}.txt").write_text("\n".join(told))
        return
    how = {"layout": what, "weight_update_sharding": "all"}
    if what == "data":
        how["partitioner"] = mw.Partitioner.GSPMD

    def change(model):
        mw.keras.distribute(model, MESH)
        return mw.keras.distribute(model, MESH, **how)  # In place of that.

    if what == "files":
        how["layout"] = "fsdp"
        np.savez(folder / f"{number}.npz", *files(folder, change))
        return
    values = {str(name): value for name, value in trained(folder, change).items()}
    np.savez(folder / f"{number}.npz", **values, moved=moved())


if __name__ == "__main__":
    main()
