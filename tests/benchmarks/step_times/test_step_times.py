"""The step-time benchmark, from end to end at its smallest."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

SCRIPT = (
    pathlib.Path(__file__).parents[3] / "benchmarks" / "step_times" / "step_time.py"
)
ON_ONE_DEVICE = ["Meshwright", "JAX, scan", "JAX, unrolled", "TF jit_compile"]


def step_time(*arguments):
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.always
def test_the_jax_program_trains_as_ours(monkeypatch):
    """On two devices and in this process, layers in a loop."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import interleave
    import variants

    experiment, _ = build_experiment(
        ["lm/stdlib_tiny.gin"],
        [
            "MODEL_DIMS = 16",
            "HIDDEN_DIMS = 32",
            "HEAD_DIM = 4",
            "NUM_LAYERS = 2",
            "SEQUENCE_LENGTH = 16",
            "MESH_SHAPE = (2, 1)",
            "Experiment.global_batch = 4",
            "Experiment.steps_per_loop = 2",
        ],
    )
    programs = StepPrograms(experiment)
    batches = [variants.random_batches(programs, seed) for seed in range(2)]
    losses = {
        name: np.concatenate([train(batch) for batch in batches])
        for name in ("meshwright", "jax_scan")
        for train in [variants.VARIANTS[name](programs)]
    }
    assert len(losses["meshwright"]) == 4
    interleave.loss_difference(losses, tolerance=1e-4)


@pytest.mark.slow
def test_compares_programs_that_train_alike():
    done = step_time("--settings=smallest", "--rounds=1", "--meshes=1x1,2x1")
    assert done.returncode == 0, done.stderr[-3000:]
    versions, *table, losses = done.stdout.splitlines()
    assert re.fullmatch(
        r"Python .*, tensorflow .*, jax .*; \d+ cores; 1 rounds", versions
    )
    rows = table[3:]
    begins = [row[:21].split() for row in rows if row[:21].strip()]
    for mesh in ("1x1", "2x1"):
        assert begins.pop(0) == ["smallest", mesh, "small"]
        assert [begins.pop(0), begins.pop(0)] == [["huge"], ["ratio"]]
    programs = 3 * ON_ONE_DEVICE + 3 * ON_ONE_DEVICE[:3]
    assert [row[21:36].strip() for row in rows] == programs
    ratios = [*range(8, 12), *range(18, 21)]
    for place, row in enumerate(rows):
        numbers = [float(cell) for cell in row[36:].split()]
        assert all(number > 0 for number in numbers)
        alone = "Meshwright" in row or place in ratios
        assert len(numbers) == (2 if alone else 4)
    assert re.fullmatch(r"Losses of the first 4 steps agree within \de-\d\d\.", losses)


def test_an_unknown_setting_is_named():
    done = step_time("--settings=huge")
    assert done.returncode != 0
    assert "--settings: unknown 'huge': one of ['tiny', 'large', 'lo" in done.stderr
    done = step_time("--pages=giant")
    assert done.returncode != 0
    assert "--pages: unknown 'giant': one of ['small', 'huge']" in done.stderr
    done = step_time("--programs=jax_scan")
    assert done.returncode != 0
    assert "--programs: meshwright is not among them: add it" in done.stderr
