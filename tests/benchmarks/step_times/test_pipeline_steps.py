"""The benchmark of pipelines' measured steps, at its smallest."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = (
    pathlib.Path(__file__).parents[3]
    / "benchmarks"
    / "step_times"
    / "pipeline_steps.py"
)
SMALLEST = [
    *("MODEL_DIMS = 16", "HIDDEN_DIMS = 32", "HEAD_DIM = 4", "SEQUENCE_LENGTH = 16"),
    "Experiment.global_batch = 8",
]


def pipeline_steps(*arguments):
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_pipelines_train_as_layers_in_a_row():
    bindings = [f"--bindings={binding}" for binding in SMALLEST]
    done = pipeline_steps("--programs=none,gpipe,circular_after", *bindings)
    assert done.returncode == 0, done.stderr[-3000:]
    _, _, *rows = done.stdout.splitlines()
    assert [row[:26].strip() for row in rows] == [
        *("no pipeline", "GPipe", "circular, gradients after")
    ]
    assert [row[26:60].split() for row in rows[1:]] == [
        ["2x2x2", "4", "20.0%"],
        ["2x2x2", "4", "11.1%"],
    ]
    assert rows[0].split()[-2:] == ["1.00", "1.00"]


def test_an_unknown_program_is_named():
    done = pipeline_steps("--programs=1f1b")
    assert done.returncode != 0
    assert "--programs: unknown '1f1b': one of ['none', 'gpipe', 'g" in done.stderr
