"""What the progress bar says of a training."""

import dataclasses
import os

import jax.numpy as jnp
import pytest
import tqdm

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.startup import messages
from meshwright.trainers.training import progress
from meshwright.trainers.training.health import History
from meshwright.trainers.training.watchdog import Watchdog
from tests.trainers.small_run import small_programs

STEPS = 100_000


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Follows a long training with label smoothing, on a terminal of 80 columns."""
    size = os.terminal_size((80, 24))
    monkeypatch.setattr(messages, "is_live", lambda: True)
    monkeypatch.setattr(messages.os, "get_terminal_size", lambda _: size)
    monkeypatch.setattr(tqdm.std, "_screen_shape_wrapper", lambda: lambda _: size)
    smoothed = small_programs("LanguageModel.label_smoothing = 0.1").experiment
    experiment = dataclasses.replace(
        smoothed, num_steps=STEPS, summary_interval=STEPS + 1
    )
    watchdog = Watchdog(str(tmp_path), None)
    shared = {"losses": {}, "history": History(), "watchdog": watchdog}
    with progress.Progress(experiment, None, 0, **shared) as followed:
        yield followed


def test_all_numbers_of_a_long_training_fit_on_a_screen(follow, monkeypatch):
    bar, numbers = follow._bar, jnp.array([1.022])
    bar.n = STEPS - 1
    bar.start_t -= 3600.0
    after = follow._clock + 0.01
    monkeypatch.setattr(progress.time, "perf_counter", lambda: after)
    follow.add(STEPS, NestedMap(loss=numbers, grad_norm=numbers))
    follow.wait()
    shown = str(bar)
    assert len(shown) <= 80 and "[1:00:0" in shown
    assert "training loss=1.022, " in shown and shown.endswith("k tokens/s]")


def test_the_time_to_go_is_without_pauses(follow, monkeypatch):
    now, bar = [1000.0], follow._bar
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    before = bar.last_print_t
    with follow.pause("saving"):
        now[0] += 100.0
    assert bar.last_print_t - before == pytest.approx(100.0, abs=0.1)
