"""The papers' tables: rows, calibration, and one small row of each, compiled."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import pytest

from benchmarks import paper_tables
from benchmarks.paper_tables import CALIBRATED, GSPMD_ROWS, ROWS, Row
from meshwright.framework.compiler import step_time
from meshwright.framework.compiler.topology import topology
from meshwright.trainers.mains import build_experiment
from tests import needs

SCRIPT = pathlib.Path(paper_tables.__file__)
# All rows, by --json_out: to be written anew when the compiler or a layer changes.
KEPT = SCRIPT.parents[1] / "tests" / "data" / "paper_rows.json"


def flops_off(row):
    """How far our FLOPs may be from the paper's step time times utilization."""
    if row.name == "8x32":
        # It disagrees with the paper's other rows: at 27.1% it would take 5.1 s.
        return 0.12
    if row.table == "6":
        # The paper's own four differ by as much: 30.9 to 35.1 TFLOPs a core for one
        # model on 32 to 512 cores.
        return 0.17
    if row.table == "4":
        # By its utilization, less bubbles and recomputation, the model of Table 3 has
        # 7% to 13% more FLOPs here than there.
        return 0.13
    if row.name == "256_2x32":
        # 8% fewer a volume than its neighbour, and 7% than the mean of 128^3.
        return 0.12
    if row.table == "5":
        # How long the paper's utterances are follows from nothing else.
        return 0.09
    # Of Table 7 neither slots nor model dims are known; see paper/hybrid.gin.
    return 0.31 if row.table == "7" else 0.05


def kept_rows():
    return {(one["table"], one["row"]): one for one in json.loads(KEPT.read_text())}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.table}-{row.name}")
def test_each_row_has_a_file_for_its_pod(row):
    experiment, _ = build_experiment([row.gin_file], row.gin_params)
    whole = topology(row.topology).size
    # One of a chip's two cores, where one device is planned for.
    assert experiment.plan.mesh.size == (1 if row.name.endswith("_1x1") else whole)


@pytest.mark.parametrize(
    "row",
    [row for row in GSPMD_ROWS if not math.isnan(row.util)],
    ids=lambda row: f"{row.table}-{row.name}",
)
def test_flops_are_the_papers(row):
    """The paper's utilization comes from about as many FLOPs as we count."""
    experiment, _ = build_experiment([row.gin_file], [])
    flops = experiment.task.train_flops(experiment.global_batch)
    kind, devices = topology(row.topology).kind, experiment.plan.mesh.size
    full_speed = flops / (kind.peak_flops * devices)
    assert full_speed / row.step_s == pytest.approx(row.util, rel=flops_off(row))


def test_the_docs_have_the_kept_rows():
    """Tables 6, 7 and GShard's: what a cell says is what was found."""
    text = (SCRIPT.parents[1] / "docs" / "planning.md").read_text()
    cells = {cell.strip() for line in text.splitlines() for cell in line.split("|")}
    for (table, name), kept in kept_rows().items():
        if table in CALIBRATED:
            continue
        ours = kept["ours"]
        assert f"{ours['peak_gb']:.1f}" in cells, (table, name)
        if ours["fits"]:
            assert f"{ours['step_s']:.2f}" in cells, (table, name)


def test_chosen_rows():
    assert [r.name for r in paper_tables.chosen_rows(["3"], ["32x8", "4x16"])] == [
        "4x16",
        "32x8",
    ]
    assert len(paper_tables.chosen_rows(["2", "3"], [])) == 13
    with pytest.raises(ValueError, match="'2t' is none of 64b_128, .*1t$"):
        paper_tables.chosen_rows(["2"], ["2t"])


def test_a_row_that_does_not_fit_is_told_and_counts_nowhere():
    row = dataclasses.replace(ROWS[0], step_s=2.0)
    refused = {"fits": False, "peak_gb": 18.04, "limit_gb": 15.48}
    text = paper_tables.table_row(row, refused)
    assert text.endswith("does not fit: 18.0 GB of 15.5")
    times = {"step_s": 2.2, "ops_s": 2.0, "link_s": 0.16}
    fitting = {"fits": True, "parts": {}, "of_which": {}, **times}
    lines = paper_tables.summary([(row, refused), (row, fitting)])
    assert lines == ["step time: mean error 10.0%, largest +10.0%; links at 0.80"]


def test_utilization_of_pipelines_is_of_useful_work():
    (row,) = paper_tables.chosen_rows(["4"], ["8x8x4"])
    assert row.util == pytest.approx(0.548 * (1 - 0.165 - 0.222))
    found = {
        "fits": True,
        "step_s": 20.0,
        "ops_s": 19.0,
        "link_s": 0.8,
        "parts": {"matrix": 20.0},
        "of_which": {"in bubbles": 4.0, "recomputed": 3.0},
    }
    told = paper_tables.summary([(row, found)])[:2]
    assert told == [
        "bubbles of 8x8x4: 16.5% of the step in the paper, 20.0% ours",
        "recomputation of 8x8x4: 22.2% of the step in the paper, 15.0% ours",
    ]


def test_calibration_finds_what_made_the_times():
    def pair(ops, link):
        row = Row(
            table="3",
            name="r",
            topology="v3:2x2",
            gin_file="none.gin",
            peak_gb=1,
            step_s=ops + link / 0.5,
            util=0.5,
        )
        return row, {"ops_s": ops, "link_s": link}

    exact = [pair(2, 1), pair(3, 0.5), pair(1, 4)]
    found = paper_tables.calibrate(exact)
    assert found.efficiency == pytest.approx(0.5)
    assert found.left_out == pytest.approx([0, 0, 0], abs=1e-12)
    # One row that is not like the others is off when they alone are calibrated on.
    odd = (exact[0][0], {"ops_s": 2, "link_s": 2})
    found = paper_tables.calibrate([odd, *exact[1:]])
    assert found.left_out[0] == pytest.approx((2 + 2 / 0.5) / 4 - 1)


def test_the_error_bar_is_that_of_rows_left_out():
    kept = kept_rows()
    rows = [row for row in ROWS if row.table in CALIBRATED]
    pairs = [(row, kept[row.table, row.name]["ours"]) for row in rows]
    found = paper_tables.calibrate(pairs)
    assert found.efficiency == pytest.approx(step_time.LINK_EFFICIENCY, abs=0.005)
    errors = [abs(error) for error in found.left_out]
    assert sum(errors) / len(errors) == pytest.approx(step_time.MEAN_ERROR, abs=5e-4)
    assert max(errors) == pytest.approx(step_time.WORST_ERROR, abs=5e-4)
    assert {topology(row.topology).kind.name for row in rows} == {
        step_time.CALIBRATED_KIND
    }


# How far a row's step time may be from the paper's: see docs/planning.md.
STEP_OFF = {"2": 0.1, "3": 0.1, "4": 0.1, "6": 0.35, "7": 0.15, "8": 0.1}


@needs.libtpu
@pytest.mark.parametrize(
    "table,name",
    [
        pytest.param("2", "64b_128", marks=pytest.mark.slow),
        ("3", "4x16"),
        pytest.param("4", "8x8x4", marks=pytest.mark.slow),
        pytest.param("6", "32e", marks=pytest.mark.slow),
        pytest.param("7", "8e", marks=pytest.mark.slow),
        pytest.param("8", "128_1x16", marks=pytest.mark.slow),
    ],
)
def test_a_row(tmp_path, table, name):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), f"--table={table}", f"--rows={name}"]
    command += [f"--json_out={out}", f"--cache_dir={tmp_path}"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(len(line) <= 80 for line in first.stdout.splitlines())
    (row,) = json.loads(out.read_text())
    assert row["row"] == name
    ours, paper = row["ours"], row["paper"]
    off = STEP_OFF[table]
    assert ours["step_s"] == pytest.approx(paper["step_s"], rel=off)
    if table in CALIBRATED:
        assert ours["util"] == pytest.approx(paper["util"], rel=0.12)
    assert ours["peak_gb"] < ours["limit_gb"] < 16
    assert ours["step_s"] == pytest.approx(
        kept_rows()[table, name]["ours"]["step_s"], rel=0.01
    )
    if table == "3":
        # Found again in the cache: the same text, seconds of compiling included.
        again = subprocess.run(command, capture_output=True, text=True, check=True)
        assert again.stdout == first.stdout
