"""A few of the kills of benchmarks/chaos.py; `--kills=50` is for a quieter hour."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.parametrize(
    ("training", "processes", "kills"),
    [
        ("lm", 1, 3),
        ("keras", 1, 2),
        pytest.param("lm", 2, 4, marks=pytest.mark.slow),
        pytest.param("keras", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost(training, processes, kills):
    how = [f"--training={training}", f"--kills={kills}", f"--processes={processes}"]
    call = [sys.executable, SCRIPT, *how]
    process = subprocess.run(call, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"\n{kills} kills, " in process.stdout
    assert "all final states are bit-equal to the undisturbed run's" in process.stdout


def test_a_wrong_flag_is_told_before_tensorflow_is_imported():
    call = [sys.executable, "-X", "importtime", SCRIPT, "--kils=50"]
    process = subprocess.run(call, capture_output=True, text=True)
    assert process.returncode == 1
    assert "Did you mean: kills" in process.stderr
    assert "| tensorflow" not in process.stderr
