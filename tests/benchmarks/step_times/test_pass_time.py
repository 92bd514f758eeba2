"""The benchmark of the way to XLA: its table, its command."""

import pathlib
import subprocess
import sys

import pytest

from benchmarks.step_times import pass_time
from benchmarks.step_times.pass_time import Compile
from meshwright.trainers.cli import build_experiment

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "pass_time.py"


def test_table_row_has_counts_and_medians():
    compiles = [
        Compile(parsed=2, completed=1, lowered=1, before=seconds, all=10 * seconds)
        for seconds in (1.0, 4.0, 2.0)
    ]
    row = pass_time.table_row("plain", compiles).split()
    assert row == ["plain", "2", "1", "1", "2.00", "20.0"]


@pytest.mark.parametrize("name", pass_time.PROGRAMS)
def test_its_experiments_can_be_built(name):
    experiment, _ = build_experiment(*pass_time.PROGRAMS[name])
    assert experiment.plan.mesh.size == 8


@pytest.mark.slow
def test_counts_parses_and_lowerings():
    command = [sys.executable, SCRIPT, "--programs=updates,typed", "--rounds=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    updates, typed = (line.split() for line in done.stdout.splitlines()[2:])
    assert updates[:4] == ["updates", "2", "2", "1"]
    assert typed[:4] == ["typed", "2", "2", "1"]
    assert all(0 < float(row[4]) < float(row[5]) for row in (updates, typed))
