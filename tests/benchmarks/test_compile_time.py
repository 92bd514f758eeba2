"""The compile-time benchmark: its program, its table, its errors."""

import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks import compile_time
from benchmarks.compile_time import Compile
from tests import needs

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "compile_time.py"


def shards(side):
    """The shapes that a device holds of the layers' matrices and of the batch."""
    programs = compile_time.programs_for(side)
    pairs = zip(
        programs.weights.items_by_path(),
        programs.plan_layout.shardings.theta.leaves(),
        strict=True,
    )
    shard_shapes = {
        path: sharding.shard_shape(spec.shape)
        for (path, spec), sharding in pairs
        if len(spec.shape) > 2  # [layers, ...]
    }
    batch = programs.experiment.task.batch_spec(programs.experiment.global_batch)
    shard_shapes["ids"] = programs.batch_shardings().ids.shard_shape(batch.ids.shape)
    assert programs.experiment.plan.mesh.size == 2 * side * side
    return shard_shapes


def test_what_a_device_holds_does_not_grow_with_the_mesh():
    few, many = shards(2), shards(32)
    assert len(few) > 6
    assert few == many


def test_table_row_has_medians():
    compiles = [
        Compile(trace=1.0, compile=20.0, peak=300 << 20),
        Compile(trace=3.0, compile=10.0, peak=300 << 20),
        Compile(trace=2.0, compile=14.0, peak=300 << 20),
    ]
    row = compile_time.table_row(2048, compiles)
    assert row.split() == ["2048", "32x64", "2.0", "14.0", "16.0", "300"]
    assert len(compile_time.HEADER.splitlines()) == 3


def test_sizes_are_those_of_whole_pods():
    assert compile_time.sizes(["2048", "8"]) == [8, 2048]
    with pytest.raises(ValueError, match=r"'64' is none of \[8, 32, 128, 512, 2048\]"):
        compile_time.sizes(["8", "64"])


@pytest.mark.slow
@needs.libtpu
def test_compiles_for_two_sizes():
    command = [sys.executable, SCRIPT, "--partitions=8,32", "--rounds=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines[4:-1]]
    assert [(row[0], row[1]) for row in rows] == [("8", "2x4"), ("32", "4x8")]
    for _, _, trace, compiling, total, peak in rows:
        assert float(trace) > 0 and float(compiling) > 0 and float(peak) > 0
        assert float(total) == pytest.approx(float(trace) + float(compiling), abs=0.2)
    assert re.fullmatch(r"longest / shortest: \d\.\d\d", lines[-1])
