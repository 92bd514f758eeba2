"""The benchmark of bundles, from end to end at its smallest, on the CPU."""

import functools
import pathlib
import re
import subprocess
import sys
import types

import pytest

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving.bundle import BundleOptions, export_bundle

SCRIPT = (
    pathlib.Path(__file__).parents[3]
    / "benchmarks"
    / "step_times"
    / "bundle_step_time.py"
)
# Where a script finds its neighbours.
sys.path.append(str(SCRIPT.parent))

from benchmarks.step_times import bundle_step_time, interleave  # noqa: E402

SMALLEST = (
    "MODEL_DIMS = 32",
    "HIDDEN_DIMS = 64",
    "NUM_HEADS = 2",
    "HEAD_DIM = 16",
    "NUM_LAYERS = 2",
    "VOCAB_SIZE = 300",
    "SEQUENCE_LENGTH = 16",
)


def compared(folder, *params):
    experiment, config = build_experiment(
        ["lm/transformer_1b.gin"], [*SMALLEST, *params]
    )
    options = BundleOptions(calls=1, config=config, expected=False)
    export_bundle(StepPrograms(experiment), None, folder, options)
    flags = ["--platform=cpu", "--rounds=1", "--steps=1", "--peak_flops=1e11"]
    command = [sys.executable, SCRIPT, folder, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_programs_that_train_alike_take_turns(tmp_path):
    done = compared(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(
        r"^\| (.+?) \| [\d.]+ \| [\d.]+% \| [\d.]+ \|$", done.stdout, re.M
    )
    assert rows == ["Bundle", "JAX, scan", "JAX, unrolled"]
    assert re.search(
        r"^Losses of the first 3 steps agree within \de-\d\d", done.stdout, re.M
    )


@pytest.mark.slow
def test_what_is_no_such_model_is_told(tmp_path):
    done = compared(
        tmp_path,
        "Adam.learning_rate = @ConstantSchedule()",
        "ConstantSchedule.value = 0.1",
    )
    assert done.returncode == 1
    assert "the bundle's configuration has no LinearWarmup.steps" in done.stderr


def test_what_the_configuration_lacks_is_told():
    step = {"config": "Adam.learning_rate = @LinearWarmup()", "activation_dtype": "x"}
    runner = types.SimpleNamespace(mesh=None, manifest={"step": step})
    with pytest.raises(ValueError, match=r"configuration has no LinearWarmup\.steps"):
        bundle_step_time._reference(runner, {}, "scan")


def test_losses_that_differ_are_not_compared():
    compare = functools.partial(
        interleave.loss_difference, tolerance=bundle_step_time.LOSS_TOLERANCE
    )
    assert compare({"a": [10.0, 9.0], "b": [10.01, 9.0]}) < 2e-3
    for other in ([10.0, 8.9], [10.0, float("nan")]):
        with pytest.raises(ValueError, match="the programs do not train alike"):
            compare({"a": [10.0, 9.0], "b": other})
