"""The benchmark of what pipelines leave idle: its formulas, its rows, its command."""

import dataclasses
import pathlib
import subprocess
import sys
import types

import pytest

from benchmarks.papers import pipeline_schedules
from meshwright.framework.compiler.hlo.step_time import Loop
from meshwright.layers.stacks.pipelines.pipeline_schedule import (
    PipelineOrder,
    PipelineSchedule,
)
from meshwright.trainers.planning.plan_pipelines import PlannedPipeline
from tests import needs

SCRIPT = pathlib.Path(pipeline_schedules.__file__)


def schedule(stages, microbatches, repeats=1, order=PipelineOrder.FORWARD_FIRST):
    return PipelineSchedule(
        num_stages=stages,
        num_microbatches=microbatches,
        num_repeats=repeats,
        order=order,
    )


def test_formulas():
    """Without deferred gradients the idle part is the bubbles'; else they cost less."""
    for repeats in (1, 2, 4):
        made = schedule(8, 16, repeats)
        in_loop = pipeline_schedules.formula(made, deferred=False)
        assert in_loop == pytest.approx(made.bubble_fraction)
        # Seven bubbles of two of the three parts of a layer's work.
        assert pipeline_schedules.alive(made, deferred=False) == 16 + 7 / repeats
        after = pipeline_schedules.formula(made, deferred=True)
        assert after == pytest.approx(7 * 2 / (7 * 2 + 16 * repeats * 3))
    others = pipeline_schedules.formulas_of_others(8, 16)
    want = {"1F1B": 21 / 69, "ZB-H1": 7 / 55, "ZBV": 0, "DualPipe": 6 / 54}
    assert {name: idle for name, (idle, _) in others.items()} == pytest.approx(want)
    assert [kept for _, kept in others.values()] == [8, 8, 8, 9]


@pytest.mark.parametrize(("repeats", "alive"), [(1, 15), (2, 11.5), (4, 9.75)])
def test_1f1b_keeps_less_than_twice_as_many_microbatches_as_stages(repeats, alive):
    made = schedule(8, 32, repeats, PipelineOrder.ONE_F_ONE_B)
    assert pipeline_schedules.alive(made, deferred=False) == alive
    assert made.bubble_fraction == schedule(8, 32, repeats).bubble_fraction


def op(seconds, layer, *loops):
    return types.SimpleNamespace(
        exposed=seconds,
        op_name=layer,
        loops=[Loop(name=name, trips=1) for name in loops],
    )


def report(**changes):
    """A call of two steps, of a pipeline whose forward loop has one over its layers."""
    ops = [
        op(1.0, "embedding", "steps"),
        op(2.0, "stack.norm", "steps"),  # Of the pipeline, and in no loop of it.
        op(4.0, "stack", "steps", "forward"),
        op(8.0, "stack.attention", "steps", "forward", "layers"),
        op(16.0, None, "steps", "backward"),
        op(32.0, "stack", "steps", "backward"),
        op(64.0, "stack.attention", "steps", "weights"),
        op(128.0, "stack_of_others", "steps", "other"),
    ]
    find = lambda name: name and types.SimpleNamespace(layer=name)  # noqa: E731
    pipeline = PlannedPipeline(
        path="stack",
        schedule=schedule(2, 3, 1),
        loops=frozenset({"forward", "backward"}),
        loop_seconds=60.0,
    )
    parts = {
        "program": types.SimpleNamespace(sources=types.SimpleNamespace(find=find)),
        "time": types.SimpleNamespace(all=lambda: ops),
        "pipelines": (pipeline,),
        "experiment": types.SimpleNamespace(
            steps_per_loop=2, gradient_accumulation_steps=1
        ),
        "step_seconds": 127.5,
        "peak_bytes": 3 * 2**30,
    }
    return types.SimpleNamespace(**parts | changes)


def test_a_pipelines_time_is_that_of_its_loops_and_of_deferred_gradients():
    made = report()
    (pipeline,) = made.pipelines
    assert pipeline_schedules.stack_seconds(made, pipeline) == 4 + 8 + 16 + 32 + 64


def test_a_row():
    row = pipeline_schedules.row(report(), "w_.*")
    # A quarter of the loops is bubbles: 15 of 124 s; 7.5 of a step.
    want = "GPipe after: w_.* 4 3.0 12.1% 18.2% 7.500 127.500 3.0"
    assert " ".join(row.split()) == want


def test_a_row_of_1f1b():
    """Its layers take the seconds of the loops; these have the loss, too."""
    (gpipe,) = report().pipelines
    order = PipelineOrder.ONE_F_ONE_B
    pipeline = dataclasses.replace(gpipe, schedule=schedule(2, 3, 1, order))
    row = pipeline_schedules.row(report(pipelines=(pipeline,)), "")
    want = "1F1B in the loop 4 3.0 25.0% 25.0% 7.500 127.500 3.0"
    assert " ".join(row.split()) == want


def test_a_row_of_what_does_not_fit():
    row = pipeline_schedules.row(report(time=None), "")
    want = "GPipe in the loop 4 4.0 needs 3.0 GiB, does not fit"
    assert " ".join(row.split()) == want


@pytest.mark.slow
@needs.libtpu
def test_prints_its_table(tmp_path):
    job = tmp_path / "job.gin"
    job.write_text(
        "include 'lm/stdlib_pipeline.gin'\n"
        "Experiment.global_batch = %GLOBAL_BATCH\nGLOBAL_BATCH = 16\n"
    )
    command = [sys.executable, SCRIPT, f"--job={job}"]
    options = ["--topology=v3:2x2", "--microbatches=4", "--repeats=1", "--deferred=.*"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    head, row, *others = (line.split() for line in done.stdout.splitlines())
    assert head[:2] == ["schedule", "weights"]
    assert row[:4] == ["GPipe", "after:", ".*", "5"]
    idle, formula = (float(cell.rstrip("%")) for cell in row[5:7])
    assert 0 < idle < 100 and formula == pytest.approx(100 * 2 / (2 + 4 * 3), abs=0.1)
    assert [other[0] for other in others] == ["1F1B", "ZB-H1", "ZBV", "DualPipe"]
