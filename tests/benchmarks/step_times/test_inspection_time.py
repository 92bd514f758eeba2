"""The benchmark of what inspecting a program takes: its table, its command."""

import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.repair import check
from tests.framework.compiler.programs import MESH

BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks"
SCRIPT = BENCHMARKS / "step_times" / "inspection_time.py"


def test_repairs_inspect_where_the_benchmark_takes_the_time(monkeypatch):
    inspections, decided = [], check.decided
    monkeypatch.setattr(
        check, "decided", lambda *args: inspections.append(args) or decided(*args)
    )
    compile_program(lambda x, w: x @ w, [tf.TensorSpec([8, 8])] * 2, MESH)
    assert len(inspections) == 1


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_the_inspection_is_a_part_of_the_whole(partitioner):
    """Of whose seconds only the order is known."""
    options = ["--settings=smallest", "--meshes=2x1", "--rounds=1"]
    command = [sys.executable, SCRIPT, *options, f"--partitioner={partitioner}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    *head, row = done.stdout.splitlines()
    assert "inspection s" in head[0]
    match = re.fullmatch(r"smallest 2x1 +([\d.]+) +([\d.]+) +([\d.]+)% +0", row)
    everything, inspection, share = map(float, match.groups())
    assert 0 < inspection < everything
    assert share == pytest.approx(100 * inspection / everything, abs=1)
