"""The papers' tables beside ours: compiled for the pods that they ran on, and priced.

    python benchmarks/paper_tables.py --table=2 [--rows=64b_128,1t] [--json_out=FILE]

Tables 2 and 3 of GSPMD: dense Transformers on 64 to 2048 cores of TPU v3. Each row is a
shipped gin file, `paper/table<table>_<row>.gin`; the program is the trainer's, compiled
for the pod by libtpu (pip install 'meshwright[plan]'), the memory what that compiler
says, the step time our estimate (docs/planning.md). GB are 2**30 bytes.

One constant of the estimate was calibrated, on all rows of both tables. Below the
tables: its best value on the rows at hand, and the errors when the row that is
estimated is left out of the calibration.

A row takes 30 to 60 CPU seconds; found ones are kept and read again (--cache_dir).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from meshwright.framework.compiler.step_time import LINK_EFFICIENCY
from meshwright.trainers import plan_cache
from meshwright.trainers.mains import build_experiment
from meshwright.trainers.planning import plan


def define_flags() -> None:
    """Only where this is the program: `meshwright-plan` has flags of these names."""
    flags.DEFINE_multi_enum("table", ["2", "3"], ["2", "3"], "Which; may repeat.")
    flags.DEFINE_list("rows", [], "Names of rows; default: all.")
    flags.DEFINE_string(
        "cache_dir",
        str(plan_cache.default_folder()),
        "Folder of what was found before.",
    )
    flags.DEFINE_string("json_out", None, "File for the rows, as JSON.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table, as the paper has it.

    Args:
      table: its number.
      name: ours; the gin file is `paper/table<table>_<name>.gin`.
      topology: the TPU slice of so many cores.
      peak_gb: peak memory of a core.
      step_s: seconds of a step.
      util: FLOPS utilization, of 1.
    """

    table: str
    name: str
    topology: str
    peak_gb: float
    step_s: float
    util: float

    @property
    def gin_file(self) -> str:
        """Below params/."""
        return f"paper/table{self.table}_{self.name}.gin"


def _row(table, name, topology, peak_gb, step_s, util) -> Row:
    return Row(
        table=table,
        name=name,
        topology=topology,
        peak_gb=peak_gb,
        step_s=step_s,
        util=util / 100,
    )


ROWS = (
    _row("2", "64b_128", "v3:8x8", 15.3, 5.74, 62.7),
    _row("2", "64b_512", "v3:16x16", 13.3, 6.25, 57.1),
    _row("2", "64b_2048", "v3:32x32", 15.56, 6.30, 56.9),
    _row("2", "128b", "v3:32x32", 14.0, 6.31, 56.5),
    _row("2", "256b", "v3:32x32", 12.9, 6.71, 54.1),
    _row("2", "512b", "v3:32x32", 13.6, 7.64, 47.5),
    _row("2", "1t", "v3:32x32", 15.8, 12.66, 55.6),
    _row("3", "4x16", "v3:4x8", 12.4, 3.56, 39.4),
    _row("3", "8x16", "v3:8x8", 14.6, 3.43, 40.5),
    _row("3", "8x32", "v3:8x16", 14.8, 5.71, 27.1),
    _row("3", "16x4", "v3:4x8", 13.8, 3.10, 45.7),
    _row("3", "16x8", "v3:8x8", 12.7, 3.37, 41.7),
    _row("3", "32x8", "v3:8x16", 14.1, 3.36, 41.3),
)
"""GSPMD's Tables 2 and 3, set straight."""


def chosen_rows(tables: Sequence[str], names: Sequence[str]) -> list[Row]:
    """The rows of `tables` that `names` names, all of them if there are none.

    Raises:
      ValueError: a name that no row has; lists those that there are.
    """
    rows = [row for row in ROWS if row.table in tables]
    known = [row.name for row in rows]
    for name in names:
        if name not in known:
            raise ValueError(f"--rows: {name!r} is none of {', '.join(known)}")
    return [row for row in rows if not names or row.name in names]


def ours(row: Row, cache: plan_cache.PlanCache) -> dict[str, Any]:
    """Compiles and prices a row, or takes it from the cache.

    Returns:
      peak_gb, limit_gb, step_s, util, compile_s; the parts of step_s, and its seconds
      of ops and of links at their full bandwidth: ops_s, link_s.
    """
    experiment, config = build_experiment([row.gin_file], [])
    key = {"what": "paper table", **plan_cache.key_parts(config, row.topology)}
    if (found := cache.cached(key)) is None:
        report = plan(experiment, topology=row.topology)
        link_s = sum(one.exposed for one in report.time.collectives) * LINK_EFFICIENCY
        found = {
            "peak_gb": report.peak_bytes / 2**30,
            "limit_gb": report.memory_limit / 2**30,
            "recompute": str(experiment.task.stack.recompute),
            "ops_s": report.time.seconds - link_s / LINK_EFFICIENCY,
            "link_s": link_s,
            "full_speed_s": report.flops_utilization * report.step_seconds,
            "compile_s": report.compile_seconds,
            "parts": report.time.parts(),
        }
        cache.store(key, found)
    step_s = found["ops_s"] + found["link_s"] / LINK_EFFICIENCY
    return {**found, "step_s": step_s, "util": found["full_speed_s"] / step_s}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The efficiency of links that explains step times best, and how well.

    Args:
      efficiency: of 1; least squares of relative errors.
      left_out: the relative error of each row, if calibrated on the others.
    """

    efficiency: float
    left_out: tuple[float, ...]


def calibrate(rows: Sequence[tuple[Row, Mapping[str, float]]]) -> Calibration:
    """Fits seconds = ops + link / efficiency to two rows or more."""
    paper = np.array([row.step_s for row, _ in rows])
    ops = np.array([found["ops_s"] for _, found in rows]) / paper
    link = np.array([found["link_s"] for _, found in rows]) / paper

    def slowness(chosen) -> float:
        return float(link[chosen] @ (1 - ops[chosen]) / (link[chosen] @ link[chosen]))

    everything = np.arange(len(rows))
    left_out = [
        ops[i] + slowness(np.delete(everything, i)) * link[i] - 1 for i in everything
    ]
    return Calibration(
        efficiency=1 / slowness(everything), left_out=tuple(map(float, left_out))
    )


HEADER = f"""\
{"":15}{"peak GB":^13}{"seconds a step":^21}{"utilization":^16}  compile
{"table row":15}{"paper":>6}{"ours":>7}{"paper":>7}{"ours":>7}{"error":>7}\
{"paper":>8}{"ours":>8}  seconds
{"-" * 76}"""


def table_row(row: Row, found: Mapping[str, float]) -> str:
    """The line below `HEADER`."""
    error = found["step_s"] / row.step_s - 1
    return (
        f"{row.table:>2}  {row.name:11}{row.peak_gb:6.1f}{found['peak_gb']:7.1f}"
        f"{row.step_s:7.2f}{found['step_s']:7.2f}{error:+7.1%}"
        f"{row.util:8.1%}{found['util']:8.1%}{found['compile_s']:9.0f}"
    )


def summary(rows: Sequence[tuple[Row, Mapping[str, float]]]) -> list[str]:
    """The lines below the table."""
    errors = [found["step_s"] / row.step_s - 1 for row, found in rows]
    lines = [
        f"step time: mean error {np.mean(np.abs(errors)):.1%}, "
        f"largest {max(errors, key=abs):+.1%}; links at {LINK_EFFICIENCY:.2f}"
    ]
    if len(rows) > 1:
        found = calibrate(rows)
        lines.append(
            f"calibrated on these rows: links at {found.efficiency:.2f}; each row left "
            f"out:\n  mean error {np.mean(np.abs(found.left_out)):.1%}, largest "
            f"{max(found.left_out, key=abs):+.1%}"
        )
    return lines


def json_row(row: Row, found: Mapping[str, float]) -> dict:
    """`{row, table, paper: {peak_gb, step_s, util}, ours: {...}}`."""
    paper = {name: getattr(row, name) for name in ("peak_gb", "step_s", "util")}
    return {"row": row.name, "table": row.table, "paper": paper, "ours": dict(found)}


def main(argv: Sequence[str]) -> None:
    """Plans the rows and prints them."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        rows = chosen_rows(flags.FLAGS.table, flags.FLAGS.rows)
        print(HEADER)
        found, cache = (
            [],
            plan_cache.PlanCache(folder=pathlib.Path(flags.FLAGS.cache_dir)),
        )
        for row in rows:
            found.append((row, ours(row, cache)))
            print(table_row(*found[-1]), flush=True)
    except (ValueError, ImportError) as error:
        sys.exit(f"paper_tables.py: {error}")
    print(*summary(found), sep="\n")
    if flags.FLAGS.json_out:
        text = json.dumps([json_row(*pair) for pair in found], indent=2)
        pathlib.Path(flags.FLAGS.json_out).write_text(text + "\n")


if __name__ == "__main__":
    define_flags()
    app.run(main)
