"""The benchmark of what repairs change in shipped programs: its table, its command."""

import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks import repaired_programs
from meshwright.framework.compiler.xla.partitioner import Partitioner
from tests.trainers.runs import test_recommendation_run

SCRIPT = pathlib.Path(repaired_programs.__file__)


def test_a_network_without_repairs_is_the_same():
    """Compiled in this process, from one line: the text tells lines of callers."""
    sizes = (*test_recommendation_run.SMALL, "MESH_SHAPE = (8,)")
    of_ncf = "rec/synthetic_ncf.gin", sizes, Partitioner.SHARDY
    on, off = (repaired_programs.compiled(*of_ncf, repair) for repair in (True, False))
    row = repaired_programs.table_row("c", Partitioner.SHARDY, on, off).split()
    assert row[:4] == ["c", "shardy", "0", "same"] and row[4] == row[5] != "0.0"
    off.lines.append("a copy")
    row = repaired_programs.table_row("c", Partitioner.SHARDY, on, off).split()
    assert row[3] == "differs"


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
