"""Several processes train a Keras model as one device does."""

import contextlib
import functools
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.framework.functions.fit import several

PATIENCE = 600


def run(count, what, folder):
    """Starts the processes, and waits for them; what they said is in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(count):
            log = stack.enter_context(open(folder / f"{number}.log", "w"))
            words = [several.__file__, str(number), str(count), port, what, folder]
            process = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.kill)
            started.append(process)
        statuses = [process.wait(PATIENCE) for process in started]
    logs = [(folder / f"{number}.log").read_text() for number in range(count)]
    assert statuses == [0] * count, logs


@functools.cache
def by_keras(folder):
    return several.trained(folder)


@pytest.mark.parametrize(
    ("count", "layout"),
    [(2, "data"), (2, "tensor"), pytest.param(4, "fsdp", marks=pytest.mark.slow)],
)
def test_processes_train_as_one_device(count, layout, tmp_path, tmp_path_factory):
    want = by_keras(tmp_path_factory.getbasetemp())
    run(count, layout, tmp_path)
    for number in range(count):
        got = np.load(tmp_path / f"{number}.npz")
        assert set(got) == {*map(str, want), "moved"}
        for name, value in want.items():
            np.testing.assert_allclose(
                got[str(name)], value, rtol=1e-5, atol=1e-5, err_msg=name
            )
        eight, six = (1 / 3 + 3 * np.arange(n) for n in (8, 6))
        moved = np.concatenate([eight, six] * 2)
        np.testing.assert_allclose(got["moved"], moved, rtol=1e-15)
    # One process has written each file, and all has arrived in it.
    saved = keras.models.load_model(tmp_path / "saved.keras")
    weights = several.network()
    weights.load_weights(tmp_path / "checkpoint.weights.h5")
    for model in saved, weights:
        trained = [w for w in model.get_weights() if w.dtype.kind == "f"]
        for i, value in enumerate(trained):
            np.testing.assert_allclose(value, want[i], rtol=1e-5, atol=1e-5)


def test_what_processes_do_not_do_alike_is_told(tmp_path):
    run(2, "misuses", tmp_path)
    *both, read, save, call = (tmp_path / "0.txt").read_text().splitlines()
    assert both == (tmp_path / "1.txt").read_text().splitlines()
    shape, value, variable, name = both
    assert shape.startswith(
        "the first call of total with such arguments: argument 0 is float32(8, 4) in "
        "process 0, and float32(9, 4) in process 1: each process passes the same whole"
    )
    assert "tensor 0 of the arguments is float32[8, 4] with the checksum" in value
    assert "call 1 of read: variable 'start' is float32[4] with the" in variable
    assert "seeds its random numbers alike (keras.utils.set_random_seed)" in variable
    assert "process 1 is at the first call of fn_1 with such arguments, " in name
    assert "process 0 at the first call of fn_0 with such arguments: all proc" in name
    missing = "process 1 of 2 has not come within 3 s: all processes run the same"
    assert read.startswith(f"reading variable 'split:0': {missing}")
    assert save.startswith(f"save of sequential: {missing}")
    assert call.startswith(f"the first call of alone with such arguments: {missing}")
