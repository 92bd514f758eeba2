"""The papers' tables beside ours: compiled for their pods, with estimated step times.

    python benchmarks/papers/paper_tables.py --table=2 [--rows=64b_128,1t]
      [--json_out=FILE]

On TPU v3, from 8 to 2048 cores, unless another kind is named:
  2, 3    GSPMD 5.1, dense Transformers
  4       GSPMD 5.2, the same in pipelines
  5       GSPMD 5.3, pipelined Conformers
  6       GSPMD 5.4, sparse mixtures of experts
  7       GSPMD 5.5, hybrid sparse and dense mixtures
  8       GSPMD 5.6, 3D U-Nets, partitioned spatially
  gshard  GShard's translation Transformers: its Table 3, and the same number of rows a
          core for all depths and numbers of experts
  maxtext language models that MaxText measured on v5e, v5p and v6e (maxtext_rows.py)
  wus     weight-update sharding's models, with it and without (paper_updates.py)

Each row is a shipped gin file; the program is the trainer's, compiled for the pod by
libtpu (pip install 'meshwright[plan]'). The memory is what that compiler reports, the
step time our estimate (docs/reference/planning/step_times.md). GB are 2**30 bytes.

One constant of the estimate was calibrated, on all rows of Tables 2 and 3. Below them
are its best value on the rows at hand, and the errors when the estimated row is left
out of the calibration.

A row takes 30 to 100 CPU seconds; results are kept and read again (--cache_dir).
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import like_papers
import maxtext_rows
import numpy as np
import paper_updates
from absl import app, flags
from paper_rows import Row, RowKind
from paper_updates import UpdateRow

from meshwright.framework.devices.network import LINK_EFFICIENCY
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.planning.planning import plan
from meshwright.trainers.planning.search import plan_cache


def define_flags() -> None:
    """Called only by this program: `meshwright-plan` has flags of the same names."""
    flags.DEFINE_multi_enum("table", CALIBRATED, TABLES, "Tables; may repeat.")
    flags.DEFINE_list("rows", [], "Names of rows; default: all.")
    flags.DEFINE_string(
        "cache_dir",
        str(plan_cache.default_folder()),
        "Folder of earlier results.",
    )
    flags.DEFINE_string("json_out", None, "File for the rows, as JSON.")


TABLES = (*"2345678", "gshard", maxtext_rows.TABLE, paper_updates.TABLE)
CALIBRATED = ("2", "3")
"""The tables whose rows the estimate's constant is calibrated on."""


def _row(table, name, topology, peak_gb, step_s, util, all_to_all=math.nan) -> Row:
    return Row(
        table=table,
        name=name,
        topology=topology,
        gin_file=f"paper/table{table}_{name}.gin",
        peak_gb=peak_gb,
        step_s=step_s,
        util=util / 100,
        all_to_all=all_to_all / 100,
    )


def _pipelined_row(
    table, name, topology, peak_gb, step_s, raw_util, bubbles, recompute
) -> Row:
    """A row of Tables 4 and 5, whose utilization counts bubbles and recomputation.

    The share of recomputation does not depend on that of bubbles, so it is of all that
    stages do, in bubbles too. Read so, five of Table 5's six rows have the same FLOPs
    for a stage's microbatch, to 2.6%.
    """
    util = raw_util * (1 - bubbles / 100) * (1 - recompute / 100)
    return dataclasses.replace(
        _row(table, name, topology, peak_gb, step_s, util),
        bubbles=bubbles / 100,
        recompute=recompute / 100,
    )


GSPMD_ROWS = (
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
    _pipelined_row("4", "2x16x8", "v3:8x16", 14.9, 24.0, 46.2, 5.6, 22.3),
    _pipelined_row("4", "4x16x4_16", "v3:8x16", 13.3, 22.3, 58.0, 14.8, 21.3),
    _pipelined_row("4", "4x16x4_32", "v3:8x16", 13.1, 22.2, 51.8, 8.0, 21.7),
    _pipelined_row("4", "8x16x2", "v3:8x16", 11.5, 23.7, 55.5, 16.1, 20.6),
    _pipelined_row("4", "8x8x4", "v3:8x16", 15.0, 23.4, 54.8, 16.5, 22.2),
    _pipelined_row("5", "32l_64", "v3:2x2", 13.8, 8.40, 59.4, 10.0, 22.9),
    _pipelined_row("5", "32l_16", "v3:2x2", 12.2, 2.80, 57.9, 29.9, 22.3),
    _pipelined_row("5", "32l_16_circular", "v3:2x2", 14.1, 2.30, 53.9, 9.0, 21.3),
    _pipelined_row("5", "64l_128", "v3:2x4", 15.4, 18.37, 60.5, 10.4, 29.9),
    _pipelined_row("5", "64l_32", "v3:2x4", 12.8, 5.58, 59.0, 31.0, 22.8),
    _pipelined_row("5", "64l_32_circular", "v3:2x4", 14.8, 4.42, 50.6, 9.6, 22.4),
    _row("6", "32e", "v3:4x4", 10.8, 0.98, 58.2, 2),
    _row("6", "128e", "v3:8x8", 11.2, 1.01, 49.8, 6),
    _row("6", "512e", "v3:16x16", 11.2, 1.10, 49.8, 9),
    _row("6", "2048e", "v3:32x32", 11.6, 1.51, 46.8, 11),
    _row("7", "8e", "v3:4x4", 12.3, 2.12, 55.3),
    _row("7", "16e", "v3:8x8", 12.9, 2.19, 50.2),
    _row("7", "32e", "v3:16x16", 11.9, 2.08, 50.8),
    _row("7", "64e", "v3:32x32", 8.5, 1.92, 53.8),
    _row("8", "128_1x1", "v3:1x1", 14.3, 2.99, 47.9),
    _row("8", "128_1x2", "v3:1x1", 14.8, 1.56, 43.7),
    _row("8", "128_1x4", "v3:1x2", 7.9, 0.79, 43.5),
    _row("8", "128_1x8", "v3:2x2", 4.5, 0.39, 43.5),
    _row("8", "128_1x16", "v3:2x4", 2.7, 0.19, 43.8),
    _row("8", "256_4x16", "v3:4x8", 14.9, 1.66, 20.5),
    _row("8", "256_2x32", "v3:4x8", 8.52, 0.76, 41.2),
    # "does not fit in a single device even with per-device batch size 1"
    Row(
        table="8",
        name="256_1x1",
        topology="v3:1x1",
        gin_file="paper/unet3d.gin",
        gin_params=(
            "PATCH = (256, 256, 256)",
            "MESH_SHAPE = (1, 1)",
            "GLOBAL_BATCH = 1",
        ),
    ),
)
"""GSPMD's Tables 2 to 8, corrected."""


def _gshard_row(experts: int, layers: int, rows_a_core: int, steps_a_second) -> Row:
    """A model of GShard's Table 1, with an expert per core."""
    side = {128: "8x8", 512: "16x16", 2048: "32x32"}[experts]
    return Row(
        table="gshard",
        name=f"{experts}e_{layers}l_{rows_a_core}",
        topology=f"v3:{side}",
        gin_file="paper/gshard.gin",
        gin_params=(
            f"NUM_EXPERTS = {experts}",
            f"MESH_SHAPE = ({experts},)",
            f"NUM_LAYERS = {layers // 2}",  # Of the encoder, and of the decoder.
            f"GLOBAL_BATCH = {experts * rows_a_core}",
        ),
        step_s=1 / steps_a_second,
    )


GSHARD_ROWS = (
    *(
        _gshard_row(experts, layers, 1, steps)
        for experts, layers, steps in [
            (128, 12, math.nan),
            (128, 36, math.nan),
            (128, 60, math.nan),
            (512, 12, 3.28),
            (512, 36, 1.05),
            (512, 60, math.nan),
            (2048, 12, 2.15),
            (2048, 36, 0.72),
            (2048, 60, math.nan),
        ]
    ),
    _gshard_row(128, 12, 4, 2.16),
    _gshard_row(128, 36, 4, 0.67),
)
"""GShard's Table 3: batches of 4M tokens (of both sides) for 2048 experts, else 1M."""

ROWS = GSPMD_ROWS + GSHARD_ROWS + maxtext_rows.ROWS


def chosen_rows(tables: Sequence[str], names: Sequence[str]) -> list[Row | UpdateRow]:
    """The rows of `tables` with these names; all rows if there are no names.

    Raises:
      ValueError: no row has one of the names; the message lists the rows' names.
    """
    rows = [row for row in (*ROWS, *paper_updates.ROWS) if row.table in tables]
    known = [row.name for row in rows]
    for name in names:
        if name not in known:
            raise ValueError(f"--rows: {name!r} is none of {', '.join(known)}")
    return [row for row in rows if not names or row.name in names]


def ours(row: Row, cache: plan_cache.PlanCache) -> dict[str, Any]:
    """Compiles a row and estimates its step time, or takes it from the cache.

    Returns:
      fits, peak_gb, limit_gb, compile_s; weights, their number; and if it fits step_s,
      util, the parts of step_s, how much of them is in bubbles or recomputed
      (of_which), the seconds of links at full bandwidth, link_s, and those of all else,
      ops_s: of ops, and of collectives that are bound by latency.
    """
    experiment, config = build_experiment([row.gin_file], row.gin_params)
    key = {"what": "paper table", **plan_cache.key_parts(config, row.topology)}
    if (result := cache.cached(key)) is None:
        result = _planned(experiment, row.topology)
        cache.store(key, result)
    if not result["fits"]:
        return {**result, "step_s": math.nan, "util": math.nan}
    step_s = result["ops_s"] + result["link_s"] / LINK_EFFICIENCY
    return {**result, "step_s": step_s, "util": result["full_speed_s"] / step_s}


def _planned(experiment: Experiment, topology: str) -> dict[str, Any]:
    report = plan(experiment, topology=topology)
    result = {
        "fits": report.fits,
        "peak_gb": report.peak_bytes / 2**30,
        "limit_gb": report.memory_limit / 2**30,
        "weights": sum(s.size for s in experiment.task.weights().leaves()),
        "compile_s": report.compile_seconds,
    }
    if not report.fits:
        return result
    link_s = LINK_EFFICIENCY * sum(
        max(0.0, collective.exposed - collective.waiting)
        for collective in report.time.collectives
    )
    return {
        **result,
        "ops_s": report.time.seconds - link_s / LINK_EFFICIENCY,
        "link_s": link_s,
        "full_speed_s": report.flops_utilization * report.step_seconds,
        "parts": report.time.parts(),
        "of_which": report.of_which(),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The efficiency of links that explains step times best, and the errors.

    Args:
      efficiency: a share of 1, by least squares of relative errors.
      left_out: the relative error of each row, when calibrated on the other rows.
      table_left_out: likewise, on the rows of other tables; empty if there are none.
    """

    efficiency: float
    left_out: tuple[float, ...]
    table_left_out: tuple[float, ...]


def calibrate(rows: Sequence[tuple[Row, Mapping[str, float]]]) -> Calibration:
    """Fits seconds = ops + link / efficiency to two rows or more."""
    paper = np.array([row.step_s for row, _ in rows])
    ops = np.array([result["ops_s"] for _, result in rows]) / paper
    link = np.array([result["link_s"] for _, result in rows]) / paper

    def slowness(chosen) -> float:
        return float(link[chosen] @ (1 - ops[chosen]) / (link[chosen] @ link[chosen]))

    def errors(left_out: np.ndarray) -> tuple[float, ...]:
        """Of each row, without the rows that its row of `left_out` marks."""
        slow = np.array([slowness(~without) for without in left_out])
        return tuple(map(float, ops + slow * link - 1))

    tables = np.array([row.table for row, _ in rows])
    same_table = tables[:, None] == tables
    return Calibration(
        efficiency=1 / slowness(np.full(len(rows), True)),
        left_out=errors(np.eye(len(rows), dtype=bool)),
        table_left_out=() if same_table.all() else errors(same_table),
    )


HEADER = f"""\
{"":18}{"peak GB":^13}{"seconds a step":^21}{"utilization":^16} compile
{"table row":18}{"paper":>6}{"ours":>7}{"paper":>7}{"ours":>7}{"error":>7}\
{"paper":>8}{"ours":>8} seconds
{"-" * 78}"""


def _number(value: float, spec: str) -> str:
    """`value` in a format, or a dash of its width if it is NaN."""
    text = format(value, spec)
    return "-".rjust(len(text)) if math.isnan(value) else text


def table_row(row: Row, result: Mapping[str, float]) -> str:
    """The row's line below `HEADER`."""
    if not result["fits"]:
        peak, limit = result["peak_gb"], result["limit_gb"]
        text = f"does not fit: {peak:.1f} GB of {limit:.1f}"
        return f"{row.table} {row.name:{16 - len(row.table)}} {text}"
    error = result["step_s"] / row.step_s - 1
    return (
        f"{row.table} {row.name:{16 - len(row.table)}} "
        f"{_number(row.peak_gb, '5.1f')}{result['peak_gb']:7.1f}"
        f"{_number(row.step_s, '7.2f')}{result['step_s']:7.2f}{_number(error, '+7.1%')}"
        f"{_number(row.util, '8.1%')}{result['util']:8.1%}{result['compile_s']:8.0f}"
    )


def summary(rows: Sequence[tuple[Row, Mapping[str, float]]]) -> list[str]:
    """The lines below the table."""
    lines = []
    for row, result in rows:
        if not result["fits"]:
            continue
        known = result["parts"] | result["of_which"]
        for what, name, paper in (
            ("AllToAll", "all-to-all", row.all_to_all),
            ("bubbles", "in bubbles", row.bubbles),
            ("recomputation", "recomputed", row.recompute),
        ):
            if not math.isnan(paper):
                whole = result["step_s"]
                if name == "recomputed":  # Bubbles recompute as much as the rest.
                    whole -= known.get("in bubbles", 0.0)
                share = known.get(name, 0.0) / whole
                lines.append(
                    f"{what} of {row.name}: {paper:.1%} of the step in the paper, "
                    f"{share:.1%} ours"
                )
    rows = [pair for pair in rows if pair[1]["fits"]]
    known = [pair for pair in rows if not math.isnan(pair[0].step_s)]
    if known:
        text = _errors(known, lambda row, ours: ours["step_s"])
        lines.append(f"step time: {text}; links at {LINK_EFFICIENCY:.2f}")
        for what, like_paper in like_papers.DIFFERENCES.items():
            comparable = [pair for pair in known if not math.isnan(like_paper(*pair))]
            if comparable:
                lines.append(f"with {what}: {_errors(comparable, like_paper)}")
        text = _errors(known, like_papers.program)
        lines.append(f"step time of programs like the paper's: {text}")
    calibrated = [pair for pair in rows if pair[0].table in CALIBRATED]
    if len(calibrated) > 1:
        lines += [
            "calibrated on rows of Tables 2 and 3:",
            *_fit(calibrated),
            "calibrated on the same with those reduce-scatters:",
            *_fit(
                [
                    (row, like_papers.scattered(row, result))
                    for row, result in calibrated
                ]
            ),
        ]
    return lines


def _fit(rows: Sequence[tuple[Row, Mapping[str, float]]]) -> list[str]:
    fit = calibrate(rows)
    lines = [
        f"  links at {fit.efficiency:.2f}",
        f"  each row left out: {_text(fit.left_out)}",
    ]
    if fit.table_left_out:
        lines.append(f"  each table left out: {_text(fit.table_left_out)}")
    return lines


def _errors(
    rows: Sequence[tuple[Row, Mapping[str, Any]]],
    seconds: Callable[[Row, Mapping[str, Any]], float],
) -> str:
    return _text([seconds(row, result) / row.step_s - 1 for row, result in rows])


def _text(errors: Sequence[float]) -> str:
    largest = max(errors, key=abs)
    return f"mean error {np.mean(np.abs(errors)):.1%}, largest {largest:+.1%}"


KIND = RowKind(
    paper=("peak_gb", "step_s", "util", "all_to_all", "bubbles", "recompute"),
    ours=ours,
    header=HEADER,
    table_row=table_row,
    summary=summary,
)
"""The kind of rows of all tables but weight-update sharding's."""


def main(argv: Sequence[str]) -> None:
    """Plans the rows and prints them."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    cache = plan_cache.PlanCache(folder=pathlib.Path(flags.FLAGS.cache_dir))
    try:
        rows = chosen_rows(flags.FLAGS.table, flags.FLAGS.rows)
        results = KIND.show([row for row in rows if isinstance(row, Row)], cache)
        results += paper_updates.KIND.show(
            [row for row in rows if isinstance(row, UpdateRow)], cache
        )
    except (ValueError, ImportError) as error:
        sys.exit(f"paper_tables.py: {error}")
    if flags.FLAGS.json_out:
        text = json.dumps(results, indent=2)
        pathlib.Path(flags.FLAGS.json_out).write_text(text + "\n")


if __name__ == "__main__":
    define_flags()
    app.run(main)
