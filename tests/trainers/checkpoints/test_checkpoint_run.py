"""Training and evaluation go on from checkpoints that are whole, or other models'."""

import logging
import shutil

import numpy as np
import pytest

from meshwright.trainers.checkpoints.checkpoint_rules import InitializeFrom
from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from meshwright.trainers.training import loop
from tests.trainers.checkpoints.checkpoint_states import files_of, flip_a_bit
from tests.trainers.small_run import (
    at,
    five_steps_a_loop,
    saved_state,
    saved_steps,
    train,
)


@pytest.fixture
def damaged(straight, tmp_path):
    """A model_dir with steps 5 and 10, of which 10 is damaged."""
    _, folder = straight(5)
    for step in ("5", "10"):
        shutil.copytree(
            folder / "checkpoints" / step, tmp_path / "run" / "checkpoints" / step
        )
    flip_a_bit(tmp_path / "run" / "checkpoints" / "10" / "state" / "_METADATA")
    return tmp_path / "run"


def test_training_goes_on_from_the_step_before_a_damaged_one(straight, damaged, caplog):
    want, folder = straight(5)
    programs = five_steps_a_loop()
    result = train(programs, damaged)
    assert "checkpoints/10 is damaged: state/_METADATA" in caplog.text
    assert result.losses == {s: want.losses[s] for s in range(6, 21)}
    assert saved_steps(damaged) == [5, 10, 15, 20]
    assert (damaged / "checkpoints" / "10.damaged").is_dir()
    expected = saved_state(programs, folder, 20)
    for path, leaf in saved_state(programs, damaged, 20).items():
        np.testing.assert_array_equal(leaf, expected[path])


def test_the_last_step_is_made_again_if_it_is_damaged(straight, damaged):
    want, _ = straight(5)
    result = train(five_steps_a_loop(), damaged, num_steps=10)
    assert result.losses == {s: want.losses[s] for s in range(6, 11)}


def test_evaluation_of_the_step_before_a_damaged_one(damaged, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    before = files_of(damaged / "checkpoints")
    loop.evaluate_latest(five_steps_a_loop(), loop.Run(model_dir=str(damaged)))
    assert "evaluating step 5" in caplog.messages
    assert files_of(damaged / "checkpoints") == before


def test_training_begins_with_weights_of_another_run(
    straight, tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.INFO, logger="absl")
    want, folder = straight(5)
    source = InitializeFrom(checkpoint=str(folder))
    programs = at(five_steps_a_loop(), initialize_from=source)
    result = train(programs, tmp_path, num_steps=5, initialize_from=source)
    assert list(result.losses) == [1, 2, 3, 4, 5]
    assert result.losses[1] < want.losses[10] < want.losses[1]
    assert any(line.startswith("took ") for line in caplog.messages)
    # From now on it has checkpoints of its own.
    caplog.clear()
    gone = InitializeFrom(checkpoint=str(tmp_path / "gone"))
    train(programs, tmp_path, num_steps=10, initialize_from=gone)
    assert not any(line.startswith("took ") for line in caplog.messages)
    with pytest.raises(CheckpointError, match="there is no checkpoint in .*gone"):
        train(programs, tmp_path / "new", num_steps=5, initialize_from=gone)
    # What does not fit is refused before anything is traced.
    monkeypatch.setattr(loop, "trace", None)
    other = InitializeFrom(checkpoint=str(folder), only=("nothing",))
    with pytest.raises(CheckpointError, match="'nothing', which matches no weight"):
        train(programs, tmp_path / "new", num_steps=5, initialize_from=other)
