"""meshwright-plan --topology: what it prints and writes, and wrong input."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from meshwright.framework.compiler.hlo.memory import memory_timeline
from meshwright.framework.compiler.hlo.out_of_memory import (
    REMEDY,
    OutOfMemoryError,
    Refusal,
    allocations_of,
)
from meshwright.framework.compiler.xla.mesh_program import MeshProgram
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.cli import DOES_NOT_FIT
from meshwright.trainers.plan import main
from meshwright.trainers.planning import planning
from meshwright.trainers.planning.plan_units import low_use_texts
from tests import needs
from tests.trainers.planning.test_plan_main import call_main

ROOT = pathlib.Path(__file__).parents[3]
KEYS = {
    "fits": bool,
    "peak_bytes": int,
    "argument_bytes": int,
    "saved_bytes": int,
    "temp_bytes": int,
    "compile_seconds": float,
}


def check_text(out):
    assert all(len(line) <= 80 for line in out.splitlines())


def check_memory(plan):
    parts = {row["part"]: row["bytes"] for row in plan["breakdown"]}
    assert sum(parts.values()) == plan["peak_bytes"] == max(plan["timeline"])
    # They are donated: where nobody needs them before they are written anew, they are
    # not alive.
    assert 0 < parts["weights"] <= plan["weights_bytes"]
    assert 0 < parts["slots"] <= plan["slots_bytes"] == 2 * plan["weights_bytes"]
    batches = plan["argument_bytes"] - parts["weights"] - parts["slots"]
    assert batches == parts["batches"] + parts["other arguments"]
    assert parts["batches"] == 5 * 4 * 4 * 8  # 5 arrays of [4, 8] on a device
    uses = ("argument_bytes", "output_bytes", "saved_bytes", "temp_bytes")
    assert sum(plan[use] for use in uses) == plan["peak_bytes"]
    assert parts["saved activations"] == plan["saved_bytes"] > 0
    buffers = plan["buffers"]
    assert [b["bytes"] for b in buffers] == sorted(
        (b["bytes"] for b in buffers), reverse=True
    )
    saved = [b for b in buffers if b["kind"] == "saved activation"]
    assert any(b["name"].startswith("stack") for b in saved)
    assert all(b["source"].startswith("layers/") for b in saved)
    table = {b["name"]: b for b in buffers}["theta.embedding.table"]
    assert (table["kind"], table["type"]) == ("argument", "f32[66,8]")
    assert (table["bytes"], table["count"]) == (66 * 8 * 4, 1)


def test_on_the_cpu_mesh(tmp_path, capsys):
    folder = tmp_path / "made"
    status, out, document = planned(folder, capsys, "NUM_LAYERS = 3", topology="cpu")
    assert status is None
    plan = "Plan of small_lm + finalized + small_adam on cpu as X=2, Y=4\n  fits: "
    assert out.startswith(plan) and "8, partitioned by shardy\n" in out
    assert {key: type(document[key]) for key in KEYS} == KEYS
    assert document["fits"] and document["step_seconds"] is None
    assert document["flops_utilization"] is None
    check_memory(document)
    assert "\nLargest buffers at the peak\n" in out
    by_axis = {(row["kind"], row["axis"]) for row in document["collectives"]}
    assert ("all-gather", "X") in by_axis
    # Each layer gathers: the loop over them counts.
    gathers = [
        row
        for row in document["collectives"]
        if row["kind"] == "all-gather" and row["layer"] == "stack.feed_forward"
    ]
    assert gathers and all(row["count"] % 3 == 0 for row in gathers)


def test_weight_updates_on_shards(tmp_path, capsys):
    all_ = "Experiment.weight_update_sharding = 'all'"
    _, out, document = planned(tmp_path, capsys, all_, topology="cpu")
    updates = document["weight_updates"]
    assert (updates["mode"], updates["data_axes"]) == ("all", ["X"])
    # The plan splits all weights but those of norms.
    lines = {line["names"][0]: line for line in updates["lines"]}
    assert set(lines) == {
        f"theta.{path}.scale"
        for path in ("final_norm", "stack.attention_norm", "stack.feed_forward_norm")
    }
    update = lines["theta.final_norm.scale"]
    assert update["names"][1:] == [f"slots.final_norm.scale.{slot}" for slot in "mv"]
    assert (update["shape"], update["format"], update["why"]) == ([16], "[16:X]", "")
    assert update["gathered_bytes"] == 16 * 4
    # Half of two slots.
    assert update["state_saved_bytes"] == 16 * 4
    saved = sum(line["state_saved_bytes"] for line in lines.values())
    assert document["slots_bytes"] == 2 * document["weights_bytes"] - saved
    assert f" {updates['summary']}. " in " ".join(out.split())
    assert "\n         64 B      64 B " in out


@needs.libtpu
def test_on_a_pod(tmp_path, capsys):
    status, out, document = planned(tmp_path, capsys, topology="v3:2x2")
    assert status is None
    assert "Device order on 2 x 2 chips of 2 cores, no ends linked" in out
    assert "step, estimated" in out
    assert document["step_seconds"] == pytest.approx(sum(document["parts"].values()))
    assert 0 < document["flops_utilization"] < 1
    assert document["parts"]["matrix"] > 0
    # The two cores of a chip need no link.
    along = {row["axis"]: row["load"] for row in document["device_order"]["axes"]}
    assert along["X"] == 0 < along["Y"]
    for row in document["collectives"]:
        assert (row["seconds"] > 0) == (row["axis"] != "X")
    took = [row["seconds"] for row in document["slowest"]]
    assert len(took) == 3 and took == sorted(took, reverse=True) and took[2] > 0
    of_step, parts = document["step_seconds"], document["parts"]
    assert sum(took) < of_step
    product = document["slowest_product"]
    assert 0 < product["seconds"] <= parts["matrix"] and len(product["types"]) == 2
    assert all(re.fullmatch(r"\w+\[[\d,]+\]", text) for text in product["types"])
    # A model so small uses little of the peak.
    shown = " ".join(out.split())
    assert "of ops and collectives of one layer: " in shown
    assert f"multiplies {' by '.join(product['types'])} on a device: " in shown


def test_what_keeps_utilization_low_is_named():
    slowest = [
        {"what": "all-gather along Y", "layer": "stack", "count": 8, "seconds": 0.4},
        {"what": "matrix products", "layer": "", "count": 2.5, "seconds": 0.3},
    ]
    product = {"types": ["bf16[8,64]", "bf16[64,16]"], "layer": "mlp", "op": "MatMul"}
    product |= {"count": 2, "seconds": 0.1}
    document = {"slowest": slowest, "slowest_product": product, "step_seconds": 1.0}
    most, worst = low_use_texts(document | {"flops_utilization": 0.19})
    assert most == (
        "The model's products would take 190 ms at the peak. What takes longest, of "
        "ops and collectives of one layer: 40.0% all-gather along Y in stack (400 ms, "
        "8 times); 30.0% matrix products (300 ms, 2.5 times)."
    )
    assert worst == (
        "The slowest product in mlp multiplies bf16[8,64] by bf16[64,16] on a device: "
        "100 ms, 2 times. Where a product contracts or keeps a dim below 128, or 256 "
        "on v6e and tpu7x, parts of the matrix units are idle."
    )
    product["types"] = ["bf16[1,512]", "bf16[512,128]"]
    _, worst = low_use_texts(document | {"flops_utilization": 0.19})
    assert worst.endswith("100 ms, 2 times.")
    document["slowest_product"] = None
    assert len([*low_use_texts(document | {"flops_utilization": 0.19})]) == 1
    for enough in 0.2, None:
        assert not [*low_use_texts(document | {"flops_utilization": enough})]


LIMIT = 2**14
GAPS = 3 * 2**10


@pytest.fixture
def small_devices(monkeypatch):
    monkeypatch.setattr(planning, "_memory_limit", lambda torus, mesh: LIMIT)


@pytest.fixture
def refusing_compiler(monkeypatch, small_devices):
    """One that says no like that for TPUs, and knows what would be alive when.

    What it lays out has gaps, and is larger than a device.
    """
    compile_ = MeshProgram.compile

    def refuse(self, options=None):
        text = compile_(self, options).as_text()
        timeline = memory_timeline(text, self.signature.sources)
        limit = planning._memory_limit(None, self.mesh)
        needed = max(timeline.peak, limit) + GAPS
        refusal = Refusal(needed=needed, available=limit)
        largest = allocations_of(timeline, self.signature)
        raise OutOfMemoryError(self.name, refusal, largest, timeline)

    monkeypatch.setattr(MeshProgram, "compile", refuse)


def planned(tmp_path, capsys, *params, **more_flags):
    """Exit status, text and document."""
    path = tmp_path / "plan.json"
    status = call_main(*params, json_out=str(path), **more_flags)
    out = capsys.readouterr().out
    check_text(out)
    return status, out, json.loads(path.read_text())


def test_what_the_compiler_refuses_is_told_with_what_takes_most(
    refusing_compiler, tmp_path, capsys
):
    status, out, document = planned(tmp_path, capsys, "NUM_LAYERS = 2", topology="cpu")
    assert status == DOES_NOT_FIT and not document["fits"]
    check_memory(document)
    assert document["over_bytes"] == document["peak_bytes"] + GAPS - LIMIT > GAPS
    start = r"train: [\d.]+ KiB more than fit: a device has 16\.0 KiB and would"
    assert re.match(start, document["refusal"])
    assert "\n  does not fit: " in out
    assert " more than the 16.0 KiB of a device\n" in out
    _, table = out.split("\nLargest buffers at the peak\n")
    table = " ".join(table.split("\n\n")[0].split())
    for buffer in document["buffers"][:3]:
        cells = (buffer[name] for name in ("kind", "type", "name", "source"))
        assert " ".join(cells) in table
    assert f"To make it fit: {REMEDY}." in " ".join(out.split())
    assert "There is no estimate: the program does not fit." in out


def test_what_gaps_alone_make_too_large(
    refusing_compiler, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(planning, "_memory_limit", lambda torus, mesh: 2**20)
    status, out, document = planned(tmp_path, capsys, "NUM_LAYERS = 2", topology="cpu")
    assert status == DOES_NOT_FIT and not document["fits"]
    assert document["peak_bytes"] < document["memory_limit"] == 2**20
    assert document["over_bytes"] == GAPS
    assert f"does not fit: {bytes_text(GAPS)} more than" in out
    (line,) = (line for line in out.splitlines() if "with gaps" in line)
    assert " 100.3%  " in line


def test_what_the_compiler_says_nothing_of_is_not_known(
    small_devices, monkeypatch, tmp_path, capsys
):
    refusal = Refusal(needed=2**20, available=LIMIT)

    def refuse(self, options=None):
        raise OutOfMemoryError(self.name, refusal)

    monkeypatch.setattr(MeshProgram, "compile", refuse)
    status, out, document = planned(tmp_path, capsys, topology="cpu")
    assert status == DOES_NOT_FIT and document["over_bytes"] == refusal.over
    assert document["breakdown"] == [{"part": "not known", "bytes": 2**20}]
    assert document["argument_bytes"] is None


def test_what_compiles_but_is_too_large_does_not_fit(small_devices, tmp_path, capsys):
    status, out, document = planned(tmp_path, capsys, "NUM_LAYERS = 2", topology="cpu")
    assert status == DOES_NOT_FIT and not document["fits"] and document["refusal"] == ""
    assert document["over_bytes"] == document["peak_bytes"] - LIMIT > 0
    check_memory(document)


@needs.libtpu
def test_arguments_that_do_not_fit_alone(tmp_path, capsys):
    too_large = ["VOCAB_SIZE = 4194304", "MODEL_DIMS = 4096"]
    status, out, document = planned(tmp_path, capsys, *too_large, topology="v3:2x2")
    assert status == DOES_NOT_FIT
    assert " more than the 15.5 GiB of a device" in out
    assert document["timeline"] is document["temp_bytes"] is None
    assert sum(row["bytes"] for row in document["breakdown"]) == document["peak_bytes"]
    names = [row["name"] for row in document["buffers"][:3]]
    assert sorted(names) == [
        "slots.embedding.table.m",
        "slots.embedding.table.v",
        "theta.embedding.table",
    ]


@needs.libtpu
def test_what_the_tpu_compiler_refuses(tmp_path, capsys):
    long = ["SEQUENCE_LENGTH = 8192", "Experiment.global_batch = 1024"]
    # In blocks, as so many tokens are by default, attention fits.
    long.append("transformer_layer.block_size = %Blocks.NONE")
    status, out, document = planned(tmp_path, capsys, *long, topology="v3:2x2")
    assert status == DOES_NOT_FIT
    # The compiler counts gaps, and tells of hundredths of a GiB.
    over = document["peak_bytes"] - document["memory_limit"]
    assert 0 < over <= document["over_bytes"] + 0.01 * 2**30
    assert document["over_bytes"] == pytest.approx(over, rel=0.01)
    assert document["buffers"][0]["source"].startswith("layers/")
    assert max(document["timeline"]) == document["peak_bytes"]


@needs.libtpu
@pytest.mark.slow  # The model of 64B: 13 s of one core.
def test_64b_that_saves_everything_does_not_fit(tmp_path, capsys):
    """As planning/papers.md has it; with what the file recomputes it fits."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["meshwright-plan"])
    path = tmp_path / "plan.json"
    with flagsaver.as_parsed(
        gin_file=["paper/table2_64b_128.gin"],
        gin_param=[
            "Repeat.recompute = %Recompute.NOTHING",
            "Repeat.saved_names = ()",
        ],
        topology="v3:8x8",
        json_out=str(path),
    ):
        assert main(["meshwright-plan"]) == DOES_NOT_FIT
    out, document = capsys.readouterr().out, json.loads(path.read_text())
    check_text(out)
    assert document["over_bytes"] == pytest.approx(10.7 * 2**30, abs=0.05 * 2**30)
    assert "\n  does not fit: " in out
    assert document["refusal"].startswith("train: 10.7")
    largest = document["buffers"][:3]
    assert all(row["kind"] == "saved activation" for row in largest)
    for row in largest:
        assert f"{row['name']} ({row['source']})" in document["refusal"]
    assert largest[0]["name"] == "stack.attention"
    assert largest[0]["bytes"] == 8 * 2**30


@pytest.mark.parametrize(
    ("more_flags", "message"),
    [
        ({"topology": "v9:2x2"}, "topology 'v9:2x2' is of an unknown kind: one of v2"),
        ({"topology": "v3:64x64"}, "v3 pods have 2 dims and go up to 'v3:32x32'"),
        (
            {"topology": "v3:8x8"},
            "has 128 devices, but the device mesh (X=2, Y=4) has 8: set .* to a "
            "shape whose product is 128, or choose a topology of 8 devices, such as "
            "'v2:2x2', 'v3:2x2'",
        ),
        ({"json_out": "plan.json"}, "--json_out needs --topology"),
        (
            {"topology": "cpu", "json_out": f"{__file__}/plan.json"},
            "--json_out=.* cannot be written (file exists): name another file",
        ),
        (
            {"topology": "cpu", "html_out": str(ROOT)},
            "--html_out=.* cannot be written (it is a folder): name another file",
        ),
        ({"topology": ""}, "--topology= is no topology: give cpu, or a kind of TPU"),
        ({"topology": "cpu", "explain": "true"}, "give it without --topology"),
        ({"topology": "cpu", "device_count": "8"}, "--device_count is for virtual cpu"),
        ({"topology": "cpu", "search_budget": "3"}, "--search_budget needs --search"),
        ({"search_plans": "plans/finalized.gin"}, "--search_plans needs --search"),
        ({"overwrite": "true"}, "--overwrite needs --search"),
        ({"cache_dir": "kept"}, "--cache_dir needs --search"),
    ],
)
def test_wrong_input(more_flags, message):
    with pytest.raises(
        SystemExit, match=message.replace("(", r"\(").replace(")", r"\)")
    ):
        call_main(**more_flags)


WITHOUT_LIBTPU = """
import os, sys
sys.modules["libtpu"] = None  # As if it were not installed, nor found by a test before.
os.environ.pop("TPU_LIBRARY_PATH", None)
import tests.conftest
from tests.trainers.planning.test_plan_main import call_main
call_main(topology="v3:2x2")
"""


def test_without_libtpu_it_says_how_to_install_it():
    command = [sys.executable, "-c", WITHOUT_LIBTPU]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "'v3:2x2' needs libtpu" in ran.stderr
    assert "pip install 'meshwright[plan]'" in ran.stderr
