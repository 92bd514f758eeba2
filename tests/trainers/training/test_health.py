"""Numbers that are not finite: skipped, or rolled back; steps that take too long."""

import functools
import json
import time

import numpy as np
import pytest

from meshwright.trainers.experiment.not_finite import NotFinite
from meshwright.trainers.training import health, loop, watchdog
from meshwright.trainers.training.health import History
from meshwright.trainers.training.watchdog import Watchdog
from tests.trainers.small_run import (
    at,
    points,
    saved_state,
    saved_steps,
    small_programs,
    train,
)


@functools.cache
def skipping():
    """The small programs, with a main program that skips."""
    other = at(small_programs(), not_finite=NotFinite.SKIP, checkpoint_interval=1)
    del other.main, other.traced_main
    return other


@functools.cache
def rolling_back():
    return at(small_programs(), not_finite=NotFinite.ROLL_BACK)


def poison(*bad_steps):
    """Makes the batch infinite that the steps read first."""
    left = set(bad_steps)

    def change(first, batches):
        if first in left:
            batches.weights[0] = np.inf

    return change


def without_step(state):
    return {path: leaf for path, leaf in state.items() if path != "step"}


def test_skipped_steps_change_no_weight(change_batches, tmp_path, caplog):
    change_batches(poison(3, 4))
    result = train(skipping(), tmp_path, num_steps=6, summary_interval=1)
    losses = list(result.losses.values())
    assert [step for step in result.losses if np.isnan(result.losses[step])] == [3, 4]
    assert np.isfinite(losses[4:]).all()
    before, skipped, after = (
        saved_state(skipping(), tmp_path, step) for step in (2, 4, 5)
    )
    assert (before["step"], skipped["step"]) == (2, 4)
    for path, leaf in without_step(skipped).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)
    moved = {p for p, leaf in after.items() if not np.array_equal(leaf, skipped[p])}
    assert "theta.final_norm.scale" in moved
    assert "loss is nan at step 3: skipped" in caplog.text
    curve = points(tmp_path, "train")["run/skipped_steps"]
    assert curve == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 2), (6, 2)]


def test_skipping_still_shards_weight_updates():
    """The select between old and new weights is elementwise too."""
    plain = small_programs().traced_main.updates
    assert skipping().traced_main.updates.summary() == plain.summary()


def test_too_many_skipped_in_a_row_stop(change_batches, tmp_path):
    change_batches(poison(*range(3, 20)))
    with pytest.raises(loop.TrainingError, match="at step 6, the 4th step skipped in"):
        train(skipping(), tmp_path, not_finite_limit=3)
    assert saved_steps(tmp_path)[-1] <= 6


def test_rolls_back_and_on_with_later_batches(
    straight, change_batches, tmp_path, caplog
):
    """Steps 6 and on read the batches of step 9 and on; again so after a restart."""
    plain = straight()[0].losses
    change_batches(poison(8))
    straight_run = train(rolling_back(), tmp_path / "whole", num_steps=20)
    assert straight_run.step == 20
    assert "loss is nan at step 8: rolled back to step 5" in caplog.text
    first = train(rolling_back(), tmp_path / "parts", num_steps=10)
    second = train(rolling_back(), tmp_path / "parts", num_steps=20)
    assert first.losses | second.losses == straight_run.losses
    same = [step for step in plain if straight_run.losses[step] == plain[step]]
    assert same == [1, 2, 3, 4, 5]
    curve = points(tmp_path / "whole", "train")["run/roll_backs"]
    assert curve == [(5, 0), (10, 1), (15, 1), (20, 1)]


def test_rolled_back_state_is_the_saved_one(change_batches, tmp_path):
    """What follows is what a run gets that starts there with those batches."""
    at_five = train(rolling_back(), tmp_path / "other", num_steps=5)
    assert at_five.step == 5
    change_batches(poison(8))
    got = train(rolling_back(), tmp_path / "got", num_steps=10)

    original = loop.CallBatches
    with pytest.MonkeyPatch.context() as patch:
        later = lambda given, start, *args: original(given, start + 3, *args)  # noqa: E731
        patch.setattr(loop, "CallBatches", later)
        want = train(rolling_back(), tmp_path / "other", num_steps=10)
    assert {step: got.losses[step] for step in range(6, 11)} == want.losses


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((2,), "at step 2 too early; nothing was saved before"),
        (
            range(8, 20),
            "at step 6 after too many roll backs; checkpoint 5 is kept",
        ),
    ],
)
def test_roll_backs_end(change_batches, tmp_path, bad, message):
    change_batches(poison(*bad))
    with pytest.raises(loop.TrainingError, match=message):
        train(rolling_back(), tmp_path, not_finite_limit=2)


@pytest.mark.parametrize(
    "saved",
    [
        [],
        None,
        {**History().metadata()["history"], "productive": "x"},
        {**History().metadata()["history"], "productive": float("nan")},
        {**History().metadata()["history"], "roll_backs": -1},
    ],
)
def test_history_that_is_none_is_refused(saved):
    with pytest.raises(ValueError, match="the checkpoint's history is .* must have"):
        History.of({"history": saved})


def test_history_is_kept():
    history = History(began=5.0, productive=2.0, skipped_steps=3, batches_passed=4)
    again = History.of(json.loads(json.dumps(history.metadata())))
    assert again == history
    assert History.of({}).productive == 0
    # Of another version of the trainer, which knows of more or of less.
    other = {"began": 5.0, "more": 1.0}
    assert History.of({"history": other}) == History(began=5.0)


def test_goodput_with_a_clock_set_back(monkeypatch):
    history = History(began=1000.0, productive=30.0)
    monkeypatch.setattr(health.time, "time", lambda: 1100.0)
    assert history.goodput() == pytest.approx(0.3)
    monkeypatch.setattr(health.time, "time", lambda: 10.0)
    assert history.goodput() == 1


def test_watchdog_writes_stacks_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(watchdog, "_LEAST_SECONDS", 0.0)
    with Watchdog(str(tmp_path / "stacks"), 2) as dog:
        for step in range(1, 7):
            dog.ended(step, 0.1)
        file = tmp_path / "stacks" / "after_step_6_process_0.txt"
        deadline = time.monotonic() + 60
        while "usually 0.10 s" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "test_watchdog_writes_stacks_once" in file.read_text()
        file.unlink()
        time.sleep(2.5)
        assert not file.exists()
    assert f"all threads are doing: {file}" in caplog.text


def test_watchdog_leaves_pauses_and_beginnings_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "_LEAST_SECONDS", 0.0)
    with Watchdog(str(tmp_path / "stacks"), 2) as dog:
        for step in range(1, 4):
            dog.ended(step, 0.1)
        time.sleep(1.5)
        for step in range(4, 10):
            dog.ended(step, 0.1)
        dog.rest()
        time.sleep(1.5)
    assert not (tmp_path / "stacks").exists()
