"""Table 1's weight updates: rows, what is kept of them, and what is printed."""

import pytest
import tensorflow as tf

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.step_time import OpTime, TimePart
from meshwright.framework.devices.topology import topology
from meshwright.layers.stacks.repeat import Unroll
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.search.plan_cache import PlanCache
from tests.benchmarks.test_paper_tables import (
    SCRIPT,
    cells_of,
    kept_rows,
    paper_tables,
)

paper_updates = paper_tables.paper_updates

# Of the weight-update-sharding paper: Table 1.
BATCHES = {
    "resnet_32": ("LARS", 4096),
    "resnet_2048": ("LARS", 32768),
    "transformer_32": ("Adam", 512),
    "transformer_2048": ("Adam", 2048),
    "ncf_32": ("Adam", 98304),
}


@pytest.mark.parametrize("row", paper_updates.ROWS, ids=lambda row: row.name)
def test_each_row_of_weight_updates_is_table_1s(row):
    experiment, _ = build_experiment([row.gin_file], row.gin_params)
    optimizer = type(experiment.optimizer).__name__
    batch = BATCHES[row.model or row.name]
    assert (optimizer, experiment.global_batch) == batch
    assert experiment.plan.mesh.size == topology(row.topology).size
    assert StepPrograms(experiment).data_axes == ("rows", "columns")


def test_chosen_rows_of_weight_updates():
    (row,) = paper_tables.chosen_rows(["2", "wus"], ["ncf_32"])
    assert row.gin_file == "paper/wus_ncf_32.gin"
    assert len(paper_tables.chosen_rows(["wus"], [])) == len(BATCHES) + 3
    with pytest.raises(ValueError, match="'ncf_2048' is none of resnet_32, .*ncf_32,"):
        paper_tables.chosen_rows(["wus"], ["ncf_2048"])


@pytest.mark.parametrize(
    "name,tokens,unroll",
    [
        ("transformer_2048", 256, "UNROLLED"),
        ("loop", 256, "LOOP"),
        ("short", 64, "UNROLLED"),
        ("short_loop", 64, "LOOP"),
    ],
)
def test_variants_of_the_transformer(name, tokens, unroll):
    """Tokens are those of a side of a row."""
    row = update_row(name)
    task = build_experiment([row.gin_file], row.gin_params)[0].task
    assert task.tokens(2048) == 2048 * 2 * tokens
    assert task.encoder.unroll is task.decoder.unroll is Unroll[unroll]


def test_gradients_of_the_transformer_are_reduced_as_its_scripts_say():
    wus = {row.name: row.gin_file for row in paper_updates.ROWS}
    for name, dtype in (("transformer_32", None), ("transformer_2048", tf.float32)):
        experiment, _ = build_experiment([wus[name]], [])
        assert experiment.gradient_dtype == dtype
        assert experiment.activation_dtype == tf.bfloat16


def update_rows_of_docs(kept):
    """(name, step off, on, speedup, further numbers), as the page has.

    docs/explanations/weight_updates.md has the models of Table 1, and the variants that
    are kept.
    """
    text = (SCRIPT.parents[2] / "docs/explanations/weight_updates.md").read_text()
    text = text[text.index("--table=wus") :]
    rows = []
    for line in text[: text.index("step_times/weight_update.py")].splitlines():
        cells = cells_of(line)
        is_row = line.startswith("|") and set(line) != set("|-")
        if is_row and cells[0] not in ("", "the paper's"):
            rows.append(cells[1:])
    rows = [cells for cells in rows if len(cells) > 2]  # Off and on.
    shown = [r for r in paper_updates.ROWS if r.name in kept or not r.gin_params]
    for row, cells in zip(shown, rows, strict=True):
        yield row.name, cells


def test_the_docs_have_the_kept_rows_of_weight_updates():
    kept = {name: row for (table, name), row in kept_rows().items() if table == "wus"}
    assert {"transformer_32", "transformer_2048", "loop"} <= kept.keys()
    for name, cells in update_rows_of_docs(kept):
        if name not in kept:
            continue
        ours = kept[name]["ours"]
        off, on = ours["off"], ours["on"]
        step = [f"{1e3 * mode['step_s']:.1f}" for mode in (off, on)]
        assert cells[:3] == [*step, f"{off['step_s'] / on['step_s']:.2f}"], name
        if len(cells) == 3:
            continue
        assert cells[4:] == [
            *(f"{mode['peak_gb']:.2f}" for mode in (off, on)),
            *(f"{1e3 * mode['optimizer_s']:.2f}" for mode in (off, on)),
            *(f"{1e3 * mode['collective_s']:.2f}" for mode in (off, on)),
        ], name


def update_row(name):
    return next(row for row in paper_updates.ROWS if row.name == name)


def made_up(step_s, peak_gb, optimizer_s, collective_s):
    return {
        "fits": True,
        "peak_gb": peak_gb,
        "limit_gb": 15.48,
        "compile_s": 60.0,
        "updates": "",
        "step_s": step_s,
        "optimizer_s": optimizer_s,
        "collective_s": collective_s,
    }


DECIDED = "weight-update sharding (auto): 61 of 90 updates, 1.57 GiB less"
OFF = made_up(0.05, 4.0, 0.02, 0.0084)
ON = made_up(0.025, 3.0, 0.00999, 0.0104) | {"updates": DECIDED}
REFUSED = {"fits": False, "peak_gb": 18.04, "limit_gb": 15.48, "updates": ""}


@pytest.mark.parametrize(
    ("name", "off", "line"),
    [
        (
            "transformer_2048",
            OFF,
            "transformer_2048  50.0  25.0  1.82  2.00 4.00 3.00   25%  20.0  9.99  8.40"
            "  10.4",
        ),
        (
            "ncf_32",
            REFUSED,
            "ncf_32               -  25.0     -     - 18.0 3.00   83%     -  9.99     -"
            "  10.4",
        ),
    ],
)
def test_a_row_of_weight_updates(name, off, line):
    text = paper_updates.table_row(update_row(name), {"off": off, "on": ON})
    assert text == line
    assert {len(head) for head in paper_updates.HEADER.splitlines()} == {len(line)}


def test_what_is_told_below_weight_updates():
    rows = [
        (update_row("transformer_2048"), {"off": OFF, "on": ON}),
        (update_row("ncf_32"), {"off": OFF, "on": REFUSED}),
    ]
    assert paper_updates.summary(rows) == [
        "transformer_2048: 46.5 ms off and 25.6 ms on in the paper",
        "transformer_2048: weight-update sharding (auto): 61 of 90 updates,",
        "  1.57 GiB less",
        "ncf_32, on: does not fit: 18.0 GB of 15.5",
        "ncf_32: nothing was decided",
    ]


def test_weight_updates_are_planned_off_and_on_and_kept(tmp_path, monkeypatch, capsys):
    plans = []

    def planned(experiment, name):
        plans.append((experiment.weight_update_sharding.value, name))
        return OFF if plans[-1][0] == "off" else ON

    monkeypatch.setattr(paper_updates, "_planned", planned)
    rows, cache = [update_row("ncf_32")], PlanCache(folder=tmp_path)
    (shown,) = paper_updates.KIND.show(rows, cache)
    assert plans == [("off", "v3:4x4"), ("auto", "v3:4x4")]
    ours = {"off": OFF, "on": ON}
    assert shown == {"row": "ncf_32", "table": "wus", "paper": {}, "ours": ours}
    first = capsys.readouterr().out
    assert f"\n{paper_updates.table_row(rows[0], ours)}\n" in first
    assert paper_updates.KIND.show(rows, cache) == [shown] and len(plans) == 2
    assert capsys.readouterr().out == first
    assert paper_updates.KIND.show([], cache) == [] and not capsys.readouterr().out


OPTIMIZER_OPS = """HloModule train

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %sub = f32[8]{0} subtract(%p, %p), metadata={op_name="jit(train)/optimizer/sub"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %other = f32[8]{0} multiply(%a, %a), metadata={op_name="jit(train)/optimizers/mul"}
  %own = f32[8]{0} add(%other, %a), metadata={op_name="jit(train)/optimizer/optimizer/w/add"}
  %merged = f32[8]{0} add(%own, %a), metadata={op_name="loss/mul;jit(train)/optimizer/mul"}
  %fusion = f32[8]{0} fusion(%merged), kind=kLoop, calls=%fused
  ROOT %copy = f32[8]{0} copy(%fusion)
}
"""  # noqa: E501


def test_the_optimizers_seconds():
    module = HloModule(OPTIMIZER_OPS)
    names = ("other", "own", "merged", "fusion", "copy")
    ops = [
        OpTime(
            name=name,
            op_name=module.by_name[name].op_name,
            part=TimePart.VECTOR,
            loops=(),
            count=1,
            seconds=10.0**number,
        )
        for number, name in enumerate(names)
    ]
    assert paper_updates.optimizer_seconds(ops, module) == 1110
