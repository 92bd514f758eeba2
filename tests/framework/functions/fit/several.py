"""What one of several processes does with Keras models and functions on a mesh.

python several.py NUMBER COUNT PORT WHAT FOLDER
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
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was told")


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


def main():
    number, count, port = map(int, sys.argv[1:4])
    what, folder = sys.argv[4], pathlib.Path(sys.argv[5])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    mw.set_platform("cpu", 8 // count)
    if what == "misuses":
        (folder / f"{number}.txt").write_text("\n".join(misuses(number)))
        return
    how = {"layout": what, "weight_update_sharding": "all"}
    if what == "data":
        how["partitioner"] = mw.Partitioner.GSPMD

    def change(model):
        mw.keras.distribute(model, MESH)
        return mw.keras.distribute(model, MESH, **how)  # In place of that.

    values = {str(name): value for name, value in trained(folder, change).items()}
    np.savez(folder / f"{number}.npz", **values, moved=moved())


if __name__ == "__main__":
    main()
