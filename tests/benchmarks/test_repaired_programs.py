"""The benchmark of what repairs change in shipped programs: its table, its command."""

import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "repaired_programs.py"


@pytest.mark.slow
def test_a_program_without_repairs_is_the_same():
    command = [sys.executable, SCRIPT, "--configs=rec/synthetic_ncf.gin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    *head, shardy, gspmd = done.stdout.splitlines()
    assert "without" in head[0]
    for row, partitioner in (shardy, "shardy"), (gspmd, "gspmd"):
        pattern = rf"rec/synthetic_ncf.gin +{partitioner} +0 +same +([\d,.]+) +\1"
        assert re.fullmatch(pattern, row)
