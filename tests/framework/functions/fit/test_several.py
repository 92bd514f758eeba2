"""Several processes train a Keras model as one device does."""

import contextlib
import functools
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.framework.functions.fit import several

ROOT = pathlib.Path(__file__).parents[4]
PATIENCE = 600
# As in docs/reference/keras/files.md, around the command of one process.
LOOP = ["sh", "-c", 'until "$@"; do sleep 1; done', "loop"]
# By JAX: a process that is silent, or that was started anew.
NAMED = r"unhealthy \(stopped sending heartbeats\):\n1|: 1 unexpectedly tried"


def end(process):
    """Ends a process, and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(count, what, folder, wrapper=()):
    """Starts the processes, and waits for them; what they said is in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(count):
            log = stack.enter_context(open(folder / f"{number}.log", "w"))
            words = ["-m", several.__name__, *map(str, (number, count, port))]
            process = subprocess.Popen(
                [*wrapper, sys.executable, *words, what, folder],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
            stack.callback(end, process)
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
    assert read.startswith(f"reading variable 'split': {missing}")
    assert save.startswith(f"save of sequential: {missing}")
    assert call.startswith(f"the first call of alone with such arguments: {missing}")


def test_files_are_written_once_and_trainings_go_on(tmp_path, tmp_path_factory):
    one = tmp_path_factory.mktemp("one")
    want = several.files(one)
    run(2, "files", tmp_path)
    for number in range(2):
        got = [*np.load(tmp_path / f"{number}.npz").values()]
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    served = [
        tf.saved_model.load(str(folder / "exported")) for folder in (one, tmp_path)
    ]
    ours, theirs = (model.serve(several.X).numpy() for model in served)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_where_one_process_fails_the_others_say_so(tmp_path):
    run(2, "refused", tmp_path)
    first, second = ((tmp_path / f"{n}.txt").read_text().splitlines() for n in (0, 1))
    saved, exported, loaded, *refused = second
    assert "Not a directory" in first[0] and "is not a directory" in first[1]
    assert saved == (
        "save of sequential failed in process 0: NotADirectoryError: [Errno 20] Not a "
        f"directory: '{tmp_path}/a_file/saved.keras'"
    )
    assert exported.startswith("export of sequential failed in process 0: Failed")
    assert "of_1.weights.h5" in loaded
    assert first[2].startswith("load_weights of sequential failed in process 1: File")
    assert refused == first[3:]
    save_model, callback = refused
    assert "as model.save(path), not keras.saving.save_model" in save_model
    assert "pass mw.keras.backup(folder)" in callback


@pytest.mark.slow
def test_a_killed_process_is_named_and_started_again_by_a_loop(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in whole, killed:
        folder.mkdir()
    (whole / "killed").write_text("")  # Nobody kills itself.
    run(2, "restarts", whole)
    run(2, "restarts", killed, wrapper=LOOP)
    for number in range(2):
        epochs, *state = np.load(killed / f"{number}.npz").values()
        assert list(epochs) in ([2, 3, 4, 5], [3, 4, 5])  # Whether the save was whole.
        begun, *want = np.load(whole / f"{number}.npz").values()
        assert list(begun) == [*range(6)]
        for ours, theirs in zip(state, want, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert re.search(NAMED, (killed / "0.log").read_text())
