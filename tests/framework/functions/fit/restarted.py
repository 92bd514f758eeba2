"""A training by Keras's `fit` on a mesh, which is killed and goes on when run again."""

import os
import pathlib
import signal
import threading

import keras
import numpy as np

import meshwright.framework as mw

LAYERS = keras.layers
EPOCHS = 6
UNITS = (16,)
X = np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)
Y = np.arange(32) % 3


def network(dropout=0.2, seed=1):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            LAYERS.Input((6,)),
            *(LAYERS.Dense(units, "relu") for units in UNITS),
            LAYERS.BatchNormalization(),
            LAYERS.Dropout(dropout),
            LAYERS.Dense(3),
        ]
    )
    mw.keras.distribute(model, mw.DeviceMesh(("data", "model"), (2, 4)), "fsdp")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    return model


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    metrics = {id(variable) for variable in model.metrics_variables}
    return [v.numpy() for v in variables if id(v) not in metrics]


def kills_itself(epoch, seconds):
    """A callback that does so, some time after the end of an epoch, as in a save."""

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def begin(number, logs):
        if number == epoch:
            threading.Timer(seconds, kill).start()

    return keras.callbacks.LambdaCallback(on_epoch_end=begin)


def trained(folder, *callbacks, dropout=0.2, seed=1, backup=mw.keras.backup):
    """The epochs that this process has trained, and the state in the end."""
    model = network(dropout, seed)
    callbacks = [*callbacks, backup(pathlib.Path(folder) / "backup")]
    fit = {"batch_size": 8, "verbose": 0, "shuffle": False, "epochs": EPOCHS}
    return model.fit(X, Y, **fit, callbacks=callbacks).epoch, state_of(model)


def main(folder, *callbacks, **options):
    """Trains, and writes epochs and state to a file in the end."""
    mw.set_platform("cpu", 8)
    epochs, state = trained(folder, *callbacks, **options)
    np.savez(pathlib.Path(folder) / "state.npz", np.array(epochs), *state)
