"""What a run says at its start: padding, schedules, and a changed configuration."""

import dataclasses
import logging
import re
import shutil

import pytest

from meshwright.framework.modeling.layer import Context
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.trainers.checkpoints.checkpoints import Access, Checkpoints
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.startup.gin_text import changed
from meshwright.trainers.training import loop
from meshwright.trainers.training.saved_config import (
    changes,
    hyperparameters,
    note_changes,
    warn_of_other_rows,
)
from meshwright.trainers.training.start_notes import (
    start_notes,
    trace,
    warn_of_no_plan,
)
from tests.trainers.small_run import at, small_programs

CONFIG = """
# Macros:
RATE = 0.004

Adam.learning_rate = @x/CosineSchedule()
x/CosineSchedule.start_value = %RATE
CosineSchedule.end_step = 600
Experiment.seed = 1
Experiment.strict = False
ShardingPlan.weights = \\
    {'heads': 'Y'}
TextFiles.root = '/data'
"""


def test_what_is_padded_is_said(caplog):
    (line,) = start_notes(small_programs("NUM_HEADS = 3"))
    assert line.startswith("padded, as the mesh axes do not divide them (devices ")
    assert line.endswith(": heads 3 to 4 over Y")
    assert start_notes(small_programs()) == []
    assert not caplog.records


def test_a_padded_batch_is_warned_of(caplog):
    assert start_notes(small_programs("Experiment.global_batch = 3")) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "divide it: batch 3 to 4 over X; devices compute on the padding" in message
    assert "25.0% of the rows: set Experiment.global_batch to 2 or 4, or" in message


def test_a_schedule_that_does_not_come_to_its_end_is_said():
    params = ["Adam.learning_rate = @CosineSchedule()", "CosineSchedule.end_step = 50"]
    params += ["CosineSchedule.start_value = 1.0", "CosineSchedule.end_value = 0.0"]
    assert start_notes(small_programs(*params)) == [
        "Experiment.num_steps = 20 ends the training before CosineSchedule.end_step = "
        "50: the schedule does not reach its end"
    ]


def test_a_job_without_a_plan_is_warned_of_devices_that_do_nothing(caplog):
    warn_of_no_plan(ShardingPlan(), 1)
    warn_of_no_plan(small_programs().experiment.plan, 8)
    assert not caplog.records
    warn_of_no_plan(ShardingPlan(), 8)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    remedy = "one of 8 devices is used: include a plan, such as plans/data_tensor.gin"
    assert remedy in record.getMessage()


def test_a_misspelt_dim_of_a_layer_is_refused(caplog, monkeypatch):
    small_programs().check_dims_of_plan()
    assert not caplog.records
    split = Context.split

    def misspelt(self, tensor, dims, *, name=None):
        dims = ["hiden" if dim == "hidden" else dim for dim in dims]
        return split(self, tensor, dims, name=name)

    monkeypatch.setattr(Context, "split", misspelt)
    message = (
        "'hidden', which no activation has; do you mean hiden. Write 'hiden': 'Y' in "
        "place of 'hidden': 'Y', for 'stack[.].*'. Or keep the entry"
    )
    with pytest.raises(ValueError, match=message):
        small_programs().check_dims_of_plan()


def test_a_misspelt_dim_of_a_weight_is_warned_of(caplog):
    programs = StepPrograms(small_programs().experiment)
    specs = programs.weights
    path, spec = next(item for item in specs.items_by_path() if "model" in item[1].dims)
    dims = ["modell" if dim == "model" else dim for dim in spec.dims]
    specs.set_path(path, dataclasses.replace(spec, dims=tuple(dims)))
    programs.check_dims_of_plan()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"dim 'modell' of '{path}' is in no table")
    assert "ShardingPlan.weights the entry 'modell': None" in record.getMessage()


def test_hyperparameters_are_numbers_and_texts():
    assert hyperparameters(CONFIG) == {
        "Adam.learning_rate": "@x/CosineSchedule()",
        "x/CosineSchedule.start_value": 0.004,
        "CosineSchedule.end_step": 600,
        "Experiment.seed": 1,
        "Experiment.strict": False,
        "ShardingPlan.weights": "{'heads': 'Y'}",
        "TextFiles.root": "/data",
    }


def test_changes_between_configurations():
    assert changes(CONFIG, CONFIG) == ""
    other = CONFIG.replace("0.004", "0.01").replace("Experiment.strict = False\n", "")
    assert changes(CONFIG, other) == (
        "Experiment.strict: False -> not used; x/CosineSchedule.start_value: 0.004 -> "
        "0.01"
    )
    with_macros = CONFIG.replace("0.004", "0.01").replace("seed = 1", "seed = 2")
    with_macros = with_macros.replace("600", "700")
    assert changed(CONFIG, with_macros) == [
        "RATE: 0.004 -> 0.01",
        "CosineSchedule.end_step: 600 -> 700",
        "Experiment.seed: 1 -> 2",
    ]
    assert changed("A.b = (1,", CONFIG) == []
    many = "".join(f"A.p{i} = 1\n" for i in range(13))
    assert changes("", many).endswith("; and 3 more")
    with pytest.raises(ValueError, match="no configuration"):
        changes("A.b = (1,", "")


def test_a_run_that_resumes_says_what_was_configured_otherwise(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    programs = at(small_programs(), num_steps=5)
    for config in (CONFIG, CONFIG, CONFIG.replace("0.004", "0.01")):
        run = loop.Run(model_dir=str(tmp_path), config=config, evaluate=False)
        loop.train_and_evaluate(programs, run)
    (line,) = [r.getMessage() for r in caplog.records if "changed" in r.getMessage()]
    assert line == (
        "changed since checkpoint step 5:\n  configuration "
        "(x/CosineSchedule.start_value: 0.004 -> 0.01)"
    )


def test_rows_of_other_lengths_than_in_training_are_said(tmp_path, caplog):
    programs = at(small_programs(), num_steps=5)
    run = loop.Run(model_dir=str(tmp_path), evaluate=False)
    loop.train_and_evaluate(programs, run)
    with Checkpoints(run.checkpoint_dir, access=Access.READ) as checkpoints:
        saved = checkpoints.metadata()
    task = programs.experiment.task
    warn_of_other_rows(task, saved)
    warn_of_other_rows(task, {})  # Of an earlier version.
    assert "other lengths" not in caplog.text
    saved["rows"] = dict.fromkeys(saved["rows"], [7])
    warn_of_other_rows(task, saved)
    rest = f"{len(saved['rows']) - 1} more"
    how = f"[7] -> [{task.text.sequence_length}]"
    assert f"(trained -> now: ids and {rest} {how}):\n  set" in caplog.text
    caplog.clear()
    note_changes(
        5, {**saved, "config": CONFIG}, {"A.seed": 1}, f"{CONFIG}A.b = 1", task
    )
    (text,) = caplog.messages  # One message for one change, whatever it shows in.
    assert re.fullmatch(
        r"changed since checkpoint step 5:\n  rows \(trained -> now: ids .*\n.*others"
        r"\n  training data \(A.seed\): .* another order\n  configuration \(A.b: .*\)",
        text,
    )


def test_an_evaluation_says_that_its_rows_have_other_lengths(
    straight, tmp_path, caplog
):
    run = loop.Run(model_dir=str(shutil.copytree(straight()[1], tmp_path / "run")))
    loop.evaluate_latest(small_programs(), run)
    assert "other lengths" not in caplog.text
    loop.evaluate_latest(small_programs("SEQUENCE_LENGTH = 16"), run)
    assert "trained on rows of other lengths" in caplog.text


def test_a_pipeline_of_other_rounds_does_not_go_on():
    saved = {"config": "lm/Pipeline.num_repeats = 2\n"}
    task = small_programs().experiment.task
    note_changes(5, saved, {}, saved["config"], task)
    message = "lm/Pipeline.num_repeats is 4, but checkpoint step 5 was saved with 2, by"
    with pytest.raises(ValueError, match=message):
        note_changes(5, saved, {}, "lm/Pipeline.num_repeats = 4\n", task)


def test_tracing_is_announced_and_timed(caplog):
    caplog.set_level(logging.INFO, logger="absl")
    trace(small_programs())
    first, last = caplog.messages
    assert first.startswith("tracing the training program: Python runs it")
    assert re.fullmatch(r"traced in \d+ s", last)


def test_what_only_the_training_loss_has_is_said():
    programs = small_programs()
    assert not any("training loss" in note for note in start_notes(programs))
    task = dataclasses.replace(
        programs.experiment.task, label_smoothing=0.1, z_loss=1e-4
    )
    experiment = dataclasses.replace(programs.experiment, task=task)
    (note,) = start_notes(StepPrograms(experiment))
    assert note == (
        "the training loss is with label smoothing (0.1) and z-loss (0.0001), the "
        "held-out loss without"
    )
