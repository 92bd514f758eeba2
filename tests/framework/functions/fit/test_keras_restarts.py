"""A training by `fit` that is killed goes on, bit by bit, when it is started again."""

import os
import pathlib

import numpy as np
import pytest

from tests.framework.functions.fit import restarted
from tests.house import snippets

_CODE = """
import os
os.environ["KERAS_BACKEND"] = "tensorflow"
from tests.framework.functions.fit import restarted
restarted.main({folder!r}, *{callbacks})
"""


def run(folder, callbacks="[]"):
    """The exit status of a process that trains, and what it said of errors."""
    code = _CODE.format(folder=str(folder), callbacks=callbacks)
    status, _, errors = snippets.run(code, folder)
    return status, errors


def result(folder):
    return [*np.load(folder / "state.npz").values()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder)[0] == 0
    epochs, *state = result(folder)
    assert list(epochs) == [*range(restarted.EPOCHS)]
    return state


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02])
def test_a_training_that_is_killed_as_it_saves_goes_on(seconds, whole, tmp_path):
    kill = f"[restarted.kills_itself(epoch={{}}, seconds={seconds})]"
    for epoch in (0, 3):
        status, errors = run(tmp_path, kill.format(epoch))
        assert status == -9, errors
    status, errors = run(tmp_path)
    assert status == 0, errors
    epochs, *state = result(tmp_path)
    assert list(epochs) in ([3, 4, 5], [4, 5], [5])
    for ours, theirs in zip(state, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_ended_has_nothing_left_to_train(tmp_path, caplog):
    _, state = restarted.trained(tmp_path)
    epochs, again = restarted.trained(tmp_path, seed=2)
    assert epochs == []
    assert "has a training of 6 epochs, and fit is to end after 6: noth" in caplog.text
    assert "; to train on, pass more epochs, such as epochs=7; for a n" in caplog.text
    for ours, theirs in zip(again, state, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_later_fit_begins_where_it_is_asked_to(tmp_path):
    model = restarted.network()
    backups = [restarted.mw.keras.backup(tmp_path / name) for name in ("a", "b")]

    def epochs(count, *callbacks):
        how = {"batch_size": 8, "verbose": 0, "epochs": count}
        return model.fit(restarted.X, restarted.Y, **how, callbacks=callbacks).epoch

    assert epochs(2, backups[0]) == [0, 1]
    assert epochs(3, backups[0]) == [2]
    assert epochs(2) == [0, 1]
    assert epochs(1, backups[1]) == [0]


def test_the_learning_rate_is_the_backups(tmp_path, caplog):
    restarted.trained(tmp_path)
    model = restarted.network()
    model.optimizer.learning_rate = 1e-4
    backup = restarted.mw.keras.backup(tmp_path / "backup")
    model.fit(restarted.X, restarted.Y, verbose=0, epochs=6, callbacks=[backup])
    assert "the learning rate is 0.01, that of the backup" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.truncate(next(folder.glob("*.data*")), 100), "is damaged"),
        (lambda folder: (folder / "checkpoint").unlink(), "has backups, .* lacks the"),
    ],
)
def test_a_damaged_backup_is_refused(tmp_path, damage, message):
    restarted.trained(tmp_path)
    damage(tmp_path / "backup")
    with pytest.raises(ValueError, match=message):
        restarted.trained(tmp_path)


def test_a_backup_of_another_model_is_refused(tmp_path, monkeypatch):
    restarted.trained(tmp_path)
    others = {
        (8,): r"dense.*/kernel is float32 \[6, 8\], and float32 \[6, 16\] in it\)$",
        (16, 16): r"it has 23 variables, not 29; .*/kernel is float32 \[16, 16\], and",
    }
    for units, difference in others.items():
        monkeypatch.setattr(restarted, "UNITS", units)
        no_backup = "ckpt-6 is no backup of sequential.* as they are now: pass anothe"
        with pytest.raises(ValueError, match=f"{no_backup}.*{difference}"):
            restarted.trained(tmp_path)


def test_a_model_without_variables_is_refused():
    model = restarted.keras.Sequential([restarted.LAYERS.Dense(3)])
    model.compile("sgd", "mse")
    backup = restarted.mw.keras.backup(pathlib.Path("nowhere"))
    with pytest.raises(ValueError, match="has no variables yet, which nowhere may"):
        model.fit(restarted.X, restarted.X[:, :3], verbose=0, callbacks=[backup])
