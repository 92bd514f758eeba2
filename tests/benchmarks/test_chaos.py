"""A few of the kills of benchmarks/chaos.py; `--kills=50` is for a quieter hour."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.parametrize(
    ("processes", "kills"), [(1, 3), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_nothing_is_lost(processes, kills):
    found = subprocess.run(
        [sys.executable, SCRIPT, f"--kills={kills}", f"--processes={processes}"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"\n{kills} kills, " in found.stdout
    assert "all final states are bit-equal to the undisturbed run's" in found.stdout
