"""What libtpu estimates for a program's ops, beside what it schedules and memory takes.

    python benchmarks/papers/scheduled_ops.py [--table=3] [--rows=16x4]

For each kind of op, in seconds of a step: `estimated` are the cycles that step times
are made of (docs/reference/planning.md); `scheduled` the instruction bundles of the
op's code, a cycle each, times the windows that it goes through; `memory` the bytes of
its operands and results, padded, at the bandwidth that libtpu counts for a sum in
float32. Windows are loaded and stored while others are computed, so an op takes the
longer of the last two, `overlapped`, or more where code waits.

Equal ops share code, and only ops whose own code was found are counted. The compiler
writes some 100 MB of code as text, which takes twice the time of a compilation.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import paper_tables
from absl import app, flags

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    elements,
)
from meshwright.framework.compiler.hlo.memory import padded_bytes
from meshwright.framework.compiler.hlo.roofline import moved_bytes
from meshwright.framework.compiler.hlo.step_time import OpTime, TimePart
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.planning.planning import plan

MEMORY_SHARE = 0.89
"""Of the published bandwidth of v3: libtpu's cycles of a sum of 32M float32 numbers."""

_BUNDLES = re.compile(r"total scheduled bundles:\s+(?P<bundles>\d+)")
_OP = re.compile(r"bundles \(100\.00%\): %(?P<name>[\w.-]+) = ")
_WINDOWS = re.compile(r'"iteration_bounds":\[(?P<bounds>[^]]*)\]')


def scheduled_bundles(folder: pathlib.Path) -> dict[str, int]:
    """Bundles of the code of each op, by its name, from libtpu's dumps."""
    bundles = {}
    for file in folder.glob("*schedule-analysis_final_bundles.txt"):
        text = file.read_text()
        if op := _OP.search(text):
            bundles[op["name"]] = int(_BUNDLES.search(text)["bundles"])
    return bundles


def windows(op: Instruction) -> int:
    """How often an op's code runs: once for each window of its result."""
    found = _WINDOWS.search(op.backend_config)
    return math.prod(map(int, re.findall(r"\d+", found["bounds"]))) if found else 1


def columns(
    ops: Sequence[OpTime],
    module: HloModule,
    bundles: Mapping[str, int],
    *,
    clock: float,
    bandwidth: float,
) -> Iterator[tuple[str, int, float, float, float, float]]:
    """For ops with products and for others: count, and seconds as in the table."""
    for label in ("with a product", "others"):
        chosen = [
            op
            for op in ops
            if op.name in bundles
            and (op.part is TimePart.MATRIX) == (label == "with a product")
        ]
        scheduled, memory = [], []
        for op in chosen:
            instruction = module.by_name[op.name]
            cycles = bundles[op.name] * windows(instruction)
            moved = moved_bytes(module, instruction, size=padded)
            scheduled.append(op.count * cycles / clock)
            memory.append(op.count * moved / bandwidth)
        yield (
            label,
            len(chosen),
            sum(op.seconds for op in chosen),
            sum(scheduled),
            sum(memory),
            sum(map(max, scheduled, memory)),
        )


def padded(type_: str) -> int:
    """Bytes of the arrays of a type's text, with the padding of their tiles."""
    if parts := elements(type_):
        return sum(map(padded, parts))
    return 0 if type_ == "()" else padded_bytes(type_)


def main(argv: Sequence[str]) -> None:
    """Compiles a row and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    (row,) = paper_tables.chosen_rows(flags.FLAGS.table, flags.FLAGS.rows)
    with tempfile.TemporaryDirectory() as name:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={name} --xla_jf_dump_llo_text=true "
            "--xla_jf_emit_annotations=true "
            "--xla_jf_dump_llo_pass_label_regex=schedule-analysis_final_bundles"
        )
        experiment, _ = build_experiment([row.gin_file], row.gin_params)
        report = plan(experiment, topology=row.topology)
        bundles = scheduled_bundles(pathlib.Path(name))
    if report.time is None:
        sys.exit(f"scheduled_ops.py: {row.name} does not fit")
    kind = report.pod.kind
    print(
        f"{'':16}{'ops':>6}{'estimated':>11}{'scheduled':>11}{'memory':>9}"
        f"{'overlapped':>12}"
    )
    for label, count, *seconds in columns(
        report.time.ops,
        report.module,
        bundles,
        clock=kind.clock,
        bandwidth=MEMORY_SHARE * kind.memory_bandwidth,
    ):
        estimated, scheduled, memory, longer = (
            took / experiment.steps_per_loop for took in seconds
        )
        print(
            f"{label:16}{count:6}{estimated:11.3f}{scheduled:11.3f}{memory:9.3f}"
            f"{longer:12.3f}"
        )


if __name__ == "__main__":
    paper_tables.define_flags()
    flags.FLAGS.set_default("table", ["3"])
    flags.FLAGS.set_default("rows", ["16x4"])
    app.run(main)
