"""The papers' tables: rows, calibration, and one small row of each, compiled."""

import dataclasses
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

# Where a script finds its neighbours.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "papers"))

from benchmarks.papers import (  # noqa: E402
    like_papers,
    maxtext_rows,
    paper_tables,
)
from benchmarks.papers.paper_tables import (  # noqa: E402
    CALIBRATED,
    GSPMD_ROWS,
    ROWS,
    Row,
)
from meshwright.framework.compiler.hlo.step_errors import (  # noqa: E402
    ALL_STEPS,
    MEASURED_KIND,
    RATIO_ERROR,
    SEEN_ERRORS,
    STEP_ERRORS,
    ModelKind,
)
from meshwright.framework.devices.network import LINK_EFFICIENCY  # noqa: E402
from meshwright.framework.devices.topology import topology  # noqa: E402
from meshwright.trainers.cli import build_experiment  # noqa: E402
from meshwright.trainers.experiment.stacks import model_kind  # noqa: E402
from meshwright.trainers.experiment.step_programs import StepPrograms  # noqa: E402
from tests import needs  # noqa: E402

SCRIPT = pathlib.Path(paper_tables.__file__)
# All rows, by --json_out: to be written anew when the compiler or a layer changes.
KEPT = SCRIPT.parents[2] / "tests" / "data" / "paper_rows.json"
KINDS = {
    "2": ModelKind.DENSE,
    "3": ModelKind.DENSE,
    "4": ModelKind.PIPELINED,
    "5": ModelKind.CONFORMER,
    "6": ModelKind.EXPERTS,
    "7": ModelKind.EXPERTS,
    "8": ModelKind.UNET,
    "gshard": ModelKind.EXPERTS,
    "maxtext": ModelKind.DENSE,
}


def flops_off(row):
    """How far our FLOPs may be from the paper's step time times utilization."""
    if row.name == "8x32":
        # It disagrees with the paper's other rows: at 27.1% it would take 5.1 s.
        return 0.12
    if row.table == "6":
        # The paper's own four differ by as much: 30.9 to 35.1 TFLOPs a core for one
        # model on 32 to 512 cores.
        return 0.14
    if row.table == "4":
        # By its utilization, less bubbles and recomputation, the model of Table 3 has
        # 11% to 19% more FLOPs here than there.
        return 0.17
    if row.name == "256_2x32":
        # 8% fewer a volume than its neighbour, and 7% than the mean of 128^3.
        return 0.12
    if row.table == "5":
        # How long the paper's utterances are follows from nothing else.
        return 0.09
    # Of Table 7 neither slots nor model dims are known; see paper/hybrid.gin.
    return 0.31 if row.table == "7" else 0.05


def kept_rows():
    return {(row["table"], row["row"]): row for row in json.loads(KEPT.read_text())}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.table}-{row.name}")
def test_each_row_has_a_file_for_its_pod(row):
    experiment, _ = build_experiment([row.gin_file], row.gin_params)
    size = topology(row.topology).size
    # One of a chip's two cores, where one device is planned for.
    assert experiment.plan.mesh.size == (1 if row.name.endswith("_1x1") else size)
    assert model_kind(experiment.task) is KINDS[row.table]


@pytest.mark.parametrize(
    "row",
    [row for row in (*GSPMD_ROWS, *maxtext_rows.ROWS) if not math.isnan(row.util)],
    ids=lambda row: f"{row.table}-{row.name}",
)
def test_flops_are_the_papers(row):
    """The paper's utilization comes from about as many FLOPs as we count."""
    experiment, _ = build_experiment([row.gin_file], [])
    flops = experiment.task.train_flops(experiment.global_batch)
    kind, devices = topology(row.topology).kind, experiment.plan.mesh.size
    full_speed = flops / (kind.peak_flops * devices)
    assert full_speed / row.step_s == pytest.approx(row.util, rel=flops_off(row))


def numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


COLUMNS = ("peak GB", "step s", "error", "as the paper's program", "off")


def rows_of_docs():
    """Of each row of planning/papers.md its key and cells, by `COLUMNS`."""
    text = (SCRIPT.parents[2] / "docs/reference/planning/papers.md").read_text()
    tables = ("2", "3", "4", "5", "8", "6", "7")
    keys = [(r.table, r.name) for table in tables for r in ROWS if r.table == table]
    # By rows a core, layers and experts.
    gshard = [(r.table, r.name) for r in ROWS if r.table == "gshard"]
    keys += sorted(gshard, key=lambda key: numbers(key[1])[::-1])
    # Those that were compiled.
    newer = [(r.table, r.name) for r in ROWS if r.table == maxtext_rows.TABLE]
    keys += [key for key in newer if key in kept_rows()]
    rows = []
    for line in text[text.index("## Dense Transformers") :].splitlines():
        cells = cells_of(line)
        if "peak GB" in line:
            # Beside the paper's is ours.
            place = {
                what: n + cell.endswith("paper")
                for n, cell in enumerate(cells)
                for what in COLUMNS
                if cell.startswith(what)
            }
        elif line.startswith("|") and set(line) != set("|-"):
            rows.append(
                [cells[place[what]] if what in place else "" for what in COLUMNS]
            )
    yield from zip(keys, rows, strict=True)


def test_the_docs_have_the_kept_rows():
    """Each number in a cell of its own row."""
    kept = kept_rows()
    by_key = {(row.table, row.name): row for row in ROWS}
    for key, (peak, step, error, like, off) in rows_of_docs():
        ours, paper = kept[key]["ours"], kept[key]["paper"]
        assert peak == f"{ours['peak_gb']:.1f}", key
        if not ours["fits"]:
            assert step == "does not fit", key
            continue
        assert step == f"{ours['step_s']:.2f}", key
        if error:
            ratio = ours["step_s"] / paper["step_s"] - 1
            assert error in (f"{ratio:+.1%}", f"{ratio:+.0%}"), key
        if key[0] not in ("8", "gshard"):
            seconds = like_papers.program(by_key[key], {"of_which": {}, **ours})
            differs = abs(seconds - ours["step_s"]) >= 0.005
            assert like == (f"{seconds:.2f}" if differs else ""), key
            ratio = seconds / paper["step_s"] - 1
            assert off == (f"{ratio:+.1%}" if differs else ""), key


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_page_has_the_errors_of_the_kept_rows(page):
    text = " ".join((SCRIPT.parents[2] / page).read_text().split())
    kept = kept_rows()
    errors = {
        (row.table, row.name): abs(kept[key]["ours"]["step_s"] / row.step_s - 1)
        for row in GSPMD_ROWS
        if kept[key := (row.table, row.name)]["ours"]["fits"]
    }
    fitted = [error for (table, _), error in errors.items() if table in CALIBRATED]
    assert (len(errors), len(fitted)) == (39, 13)
    mean, worst = statistics.mean(errors.values()), max(errors.values())
    all_rows = f"{mean:.1%} on average and {worst:.0%} at worst"
    assert f"are off by {all_rows}" in text
    assert worst == pytest.approx(ALL_STEPS.worst, abs=5e-4)
    fit = f"by {statistics.mean(fitted):.1%} and {max(fitted):.1%}."
    assert f"of the 13 of Tables 2 and 3, to which a constant was fitted, {fit}" in text
    others = re.findall(r"([\d.]+% on average[^|;\]]*?at worst)", text)
    guide = SCRIPT.parents[2] / "docs/guides/5_plan_for_machines_you_do_not_have.md"
    others += re.findall(r"([\d.]+% on average, \d+% at worst)", guide.read_text())
    assert {one.replace(",", " and") for one in others} == {all_rows}


@pytest.mark.parametrize("row", GSPMD_ROWS, ids=lambda row: f"{row.table}-{row.name}")
def test_the_lines_of_a_kept_row_fit_a_terminal(row):
    ours = {"of_which": {}, **kept_rows()[row.table, row.name]["ours"]}
    lines = [paper_tables.table_row(row, ours), *paper_tables.summary([(row, ours)])]
    assert max(map(len, lines)) <= 80


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
    times = {
        "step_s": 2.2,
        "ops_s": 2.0,
        "link_s": 0.16,
        "full_speed_s": row.util,
    }
    parts = {"all-reduce": 0.2}
    fitting = {"fits": True, "parts": parts, "of_which": {}, **times}
    lines = paper_tables.summary([(row, refused), (row, fitting)])
    assert lines == [
        "step time: mean error 10.0%, largest +10.0%; links at 0.80",
        # At half of the paper's FLOPs; nothing is known of recomputation there.
        "with as many FLOPs as the paper's: mean error 120.0%, largest +120.0%",
        "with the reduce-scatters of the paper's Figure 7: mean error 5.0%, "
        "largest +5.0%",
        "step time of programs like the paper's: mean error 5.0%, largest +5.0%",
    ]


def test_utilization_of_pipelines_is_of_useful_work():
    (row,) = paper_tables.chosen_rows(["4"], ["8x8x4"])
    assert row.util == pytest.approx(0.548 * (1 - 0.165) * (1 - 0.222))
    estimate = {
        "fits": True,
        "step_s": 20.0,
        "ops_s": 19.0,
        "link_s": 0.8,
        "full_speed_s": row.util * row.step_s,
        "parts": {"matrix": 20.0},
        "of_which": {"in bubbles": 4.0, "recomputed": 3.0},
    }
    lines = paper_tables.summary([(row, estimate)])
    assert lines[3:] == [
        "with as many FLOPs as the paper's: mean error 14.5%, largest -14.5%",
        # 20 s, 3.75 of them recomputed, bubbles included; and 2.36 s for reductions.
        "with as much recomputed as in the paper: mean error 10.7%, largest -10.7%",
        "with that, and gradients reduced each iteration: mean error 2.2%, "
        "largest +2.2%",
        "step time of programs like the paper's: mean error 2.2%, largest +2.2%",
    ]
    assert lines[:2] == [
        "bubbles of 8x8x4: 16.5% of the step in the paper, 20.0% ours",
        "recomputation of 8x8x4: 22.2% of the step in the paper, 18.8% ours",
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
    fit = paper_tables.calibrate(exact)
    assert fit.efficiency == pytest.approx(0.5)
    assert fit.left_out == pytest.approx([0, 0, 0], abs=1e-12)
    assert fit.table_left_out == ()  # All are of one.
    # One row that is not like the others is off when they alone are calibrated on.
    odd = (exact[0][0], {"ops_s": 2, "link_s": 2})
    fit = paper_tables.calibrate([odd, *exact[1:]])
    assert fit.left_out[0] == pytest.approx((2 + 2 / 0.5) / 4 - 1)
    # A row beside two of another table: it is estimated by theirs, and they by its own.
    other = (dataclasses.replace(odd[0], table="2"), odd[1])
    fit = paper_tables.calibrate([other, *exact[1:]])
    assert fit.table_left_out[0] == pytest.approx(fit.left_out[0])
    assert fit.table_left_out[1:] == pytest.approx([(3 + 0.5) / 4 - 1, (1 + 4) / 9 - 1])


def test_the_error_bars_are_those_of_rows_left_out():
    kept = kept_rows()
    fitted = [row for row in ROWS if row.table in CALIBRATED]
    pairs = [(row, kept[row.table, row.name]["ours"]) for row in fitted]
    fit = paper_tables.calibrate(pairs)
    assert fit.efficiency == pytest.approx(LINK_EFFICIENCY, abs=0.005)
    errors = {ModelKind.DENSE: [abs(error) for error in fit.left_out]}
    for row in GSPMD_ROWS:
        ours = kept[row.table, row.name]["ours"]
        if row not in fitted and ours["fits"]:
            error = abs(ours["step_s"] / row.step_s - 1)
            errors.setdefault(KINDS[row.table], []).append(error)
    assert set(errors) == set(STEP_ERRORS)
    for kind, error in STEP_ERRORS.items():
        assert len(errors[kind]) == error.steps, kind
        assert statistics.mean(errors[kind]) == pytest.approx(error.mean, abs=5e-4)
        assert max(errors[kind]) == pytest.approx(error.worst, abs=5e-4), kind
    assert {topology(row.topology).kind.name for row in GSPMD_ROWS} == {MEASURED_KIND}


def test_the_error_of_a_ratio_is_that_of_table_3():
    """Its rows are of one model on several meshes."""
    rows = [row for (table, _), row in kept_rows().items() if table == "3"]
    assert len(rows) == 6
    off = [row["ours"]["step_s"] / row["paper"]["step_s"] for row in rows]
    assert max(off) / min(off) - 1 == pytest.approx(RATIO_ERROR, abs=5e-4)


def test_the_seen_errors_are_those_of_the_newer_rows():
    kept, errors = kept_rows(), {}
    for row in maxtext_rows.ROWS:
        ours = kept.get((row.table, row.name), {}).get("ours", {"fits": False})
        if ours["fits"]:
            tpu = topology(row.topology).kind.name
            errors.setdefault(tpu, []).append(abs(ours["step_s"] / row.step_s - 1))
    assert set(errors) == set(SEEN_ERRORS)
    for tpu, error in SEEN_ERRORS.items():
        assert len(errors[tpu]) == error.steps, tpu
        assert statistics.mean(errors[tpu]) == pytest.approx(error.mean, abs=5e-4)
        assert max(errors[tpu]) == pytest.approx(error.worst, abs=5e-4), tpu


# How far a row's step time may be from the paper's: see planning/papers.md.
# Ours of Table 4 reduces gradients once a step; in each iteration it was 0.12 off.
STEP_OFF = {"2": 0.1, "3": 0.1, "4": 0.23, "5": 0.17, "6": 0.15, "7": 0.15, "8": 0.1}


@pytest.mark.parametrize(
    "table,name",
    [
        ("2", "64b_128"),
        ("3", "4x16"),
        ("4", "8x8x4"),
        ("5", "32l_64"),
        ("6", "32e"),
        ("7", "8e"),
        ("8", "128_1x16"),
    ],
)
def test_a_kept_row_is_of_its_file(table, name):
    """All of `test_a_row` that needs no compilation: FLOPs, state, step time."""
    (row,) = paper_tables.chosen_rows([table], [name])
    kept = kept_rows()[table, name]
    ours, paper = kept["ours"], kept["paper"]
    assert (paper["step_s"], paper["util"]) == (row.step_s, row.util)
    assert ours["step_s"] == pytest.approx(row.step_s, rel=STEP_OFF[table])
    experiment, _ = build_experiment([row.gin_file], row.gin_params)
    flops = experiment.task.train_flops(experiment.global_batch)
    peak_flops = topology(row.topology).kind.peak_flops * experiment.plan.mesh.size
    assert ours["full_speed_s"] == pytest.approx(flops / peak_flops)
    links_s = ours["link_s"] / LINK_EFFICIENCY
    assert ours["step_s"] == pytest.approx(ours["ops_s"] + links_s)
    # Of each tensor of the state a device has a shard, and nothing fits without them.
    programs = StepPrograms(experiment)
    forms = programs.plan_layout.forms.leaves()
    state = sum(
        math.prod(form.sharding.shard_shape(spec.shape)) * spec.dtype.size
        for form, spec in zip(forms, programs.state_specs.leaves(), strict=True)
    )
    assert 0 < state / 2**30 < ours["peak_gb"] < ours["limit_gb"] < 16


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
