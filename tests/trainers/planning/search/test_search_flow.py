"""A search from command to training, with a stand-in for the TPU compiler.

What libtpu would say is in `test_search_compiled.py`.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.trainers import plan, train
from meshwright.trainers.cli import DOES_NOT_FIT, INTERRUPTED
from meshwright.trainers.experiment import config
from meshwright.trainers.planning.search import (
    search,
    search_main,
    search_text,
    search_worker,
)
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search_screen import Screened
from meshwright.trainers.planning.search.search_space import built
from tests.trainers.planning.search import pipelined
from tests.trainers.planning.search.search_cases import promising, space
from tests.trainers.planning.test_plan_main import call_main

DOCS = pathlib.Path(__file__).parents[4] / "docs/reference/planning/search.md"
IDS = (0, 2, 4, 6, 1, 3, 5, 7)

# (4, 2) is fastest in another device order, (8, 1) does not fit; with STOP the third
# one sends the search that signal, as Ctrl-C does, and goes on.
COMPILER = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1])
asked = json.loads((folder / "request.json").read_text())
with open(os.environ["STARTED"], "a") as log:
    log.write(repr(asked["gin_params"]) + chr(10))
if os.environ.get("STOP") and len(open(os.environ["STARTED"]).readlines()) == 3:
    os.kill(os.getppid(), int(os.environ["STOP"]))
    time.sleep(600)
result = dict(seconds=2.0, peak=2**30, utilization=0.3, device_ids=None)
if "ShardingPlan.mesh_shape = (4, 2)" in asked["gin_params"]:
    result |= dict(seconds=1.0, device_ids={IDS})
if 'Experiment.weight_update_sharding = "off"' in asked["gin_params"]:
    result["seconds"] /= 2
if "ShardingPlan.mesh_shape = (8, 1)" in asked["gin_params"]:
    result = dict(refusal="by 1 GiB", too_large=True, device_ids=None)
(folder / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """() -> what it was asked to compile, so far."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["meshwright-plan"])
    python, log = tmp_path / "python", tmp_path / "started"
    python.write_text(COMPILER)
    python.chmod(0o755)
    log.touch()
    monkeypatch.setattr(search.sys, "executable", str(python))
    monkeypatch.setenv("STARTED", str(log))
    monkeypatch.setattr(search_main.topologies, "topology_devices", lambda name: None)
    return lambda: log.read_text().splitlines()


def run(tmp_path, *params, **more):
    return call_main(
        *params,
        **{
            "search": "true",
            "topology": "v3:2x2",
            "search_plans": "plans/finalized.gin",
            "search_jobs": "1",
            "search_propagated": "0",
            "search_output": str(tmp_path / "made" / "winner.gin"),
            "cache_dir": str(tmp_path / "cache"),
            **more,
        },
    )


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    """Other tests import modules, which a search would name in its commands."""
    monkeypatch.setattr(search_text, "imported", lambda: ())


def test_from_a_search_to_training(tmp_path, compiler, capsys, caplog):
    caplog.set_level("INFO", logger="absl")
    assert run(tmp_path) is None
    out, _ = capsys.readouterr()
    winner = tmp_path / "made" / "winner.gin"
    assert f"wrote {winner}: meshwright-train --gin_file={winner}" in out
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines[:-1])
    assert lines[1].startswith(" +") and lines[1].split()[6] == "4x2"
    assert re.search("compiling: 6 of 6, .*, best 125 ms/example", caplog.text)
    assert built([str(winner)], []).plan.mesh.device_ids == IDS
    check_trains(winner, tmp_path / "model")


def test_the_fastest_is_compiled_without_sharded_updates_too(
    tmp_path, compiler, capsys
):
    assert run(tmp_path, search_plans="plans/data_2d.gin") is None
    assert sum("weight_update_sharding" in text for text in compiler()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[7:9] == ["data_2d", "off"]
    assert "  off after a plan's name: with weight-update sharding 'off'" in lines
    winner = built([str(tmp_path / "made" / "winner.gin")], [])
    assert winner.weight_update_sharding is WeightUpdateSharding.OFF


def check_trains(winner, folder):
    with flagsaver.as_parsed(
        gin_file=[str(winner)],
        gin_param=["Experiment.num_steps = 5", "Experiment.eval_interval = 5"],
        model_dir=str(folder),
        device_count="8",
    ):
        assert train.main(["meshwright-train"]) is None
    assert (folder / "checkpoints" / "5").is_dir()


@pytest.mark.slow  # Trains.
def test_from_a_search_to_training_of_a_pipeline(tmp_path, compiler):
    chosen = {"search_microbatches": "2,8", "search_plans": "plans/pipeline.gin"}
    files = {"gin_files": pipelined.GIN_FILES}
    assert run(tmp_path, *pipelined.PARAMS, **files, **chosen) is None
    started = compiler()
    assert any("LanguageModel.stack = @Repeat()" in text for text in started)
    assert any("Pipeline.num_stages = 4" in text for text in started)
    winner = tmp_path / "made" / "winner.gin"
    assert built([str(winner)], []).task.stack.num_microbatches in (2, 8)
    check_trains(winner, tmp_path / "model")


@pytest.fixture
def ctrl_c_interrupts():
    """Test processes of xdist ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow  # The step is traced for each choice of recomputation.
def test_plans_that_nobody_wrote_are_compiled(tmp_path, compiler, capsys):
    assert run(tmp_path, search_propagated="20") is None
    found = [line for line in compiler() if "ShardingPlan.weights" in line]
    assert found
    printed = capsys.readouterr().out
    assert "20 propagated" in printed and "why not finalized: " in printed
    winner = tmp_path / "made" / "winner.gin"
    assert built([str(winner)], []).plan.mesh.size == 8
    kept = [json.loads(p.read_text()) for p in (tmp_path / "cache").iterdir()]
    (costs,) = (entry for entry in kept if "propagated" in entry["key"])
    assert len(costs["result"]["plans"]) >= 20


def test_what_is_slow_is_compiled_if_nothing_else_fits(tmp_path, compiler, monkeypatch):
    where = space(plans=["plans/finalized.gin"])
    large, slow = (promising(where, mesh=mesh) for mesh in ((8, 1), (4, 2)))
    screened = Screened(promising=(large,), left_out={}, slow=(slow,))
    monkeypatch.setattr(search, "with_found", lambda *_: screened)
    cache = PlanCache(folder=tmp_path)
    options = {"cache": cache, "jobs": 1, "propagated": 1}
    found = search.search(where, budget=2, **options)
    assert [row.promising for row in found.ranked] == [slow]
    assert [row.promising for row in found.refused] == [large]
    assert len(compiler()) == 2 and found.not_compiled == 0
    with pytest.raises(search.NothingFitsError, match="1 were not compiled: raise"):
        search.search(where, budget=1, **options)


@pytest.mark.always
@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_loses_no_result(tmp_path, compiler, capsys, monkeypatch, sent):
    monkeypatch.setenv("STOP", str(int(sent)))
    assert run(tmp_path) == INTERRUPTED
    out, err = capsys.readouterr()
    assert "the same command goes on from there" in err
    assert len(compiler()) == 3 and len(list(tmp_path.glob("cache/*.json"))) == 2
    # The best so far is written, and again when the same command has gone on.
    winner = tmp_path / "made" / "winner.gin"
    assert f"wrote {winner}" in out and "more might fit: the search was inter" in out
    partial = winner.read_text()
    assert partial.startswith("# Of an interrupted search, which goes on by the same")
    assert built([str(winner)], []).plan.mesh.size == 8
    monkeypatch.delenv("STOP")
    assert run(tmp_path) is None
    assert not winner.read_text().startswith("# Of an interrupted")
    # The third is started again, the first two are not.
    started = compiler()
    assert len(started) == 7 and started[3] == started[2]
    assert len(set(started)) == 6
    assert run(tmp_path, overwrite="true") is None
    assert compiler() == started


def test_exit_status_if_all_are_refused(tmp_path, compiler, capsys):
    mesh = "MESH_SHAPE = (8, 1)"
    assert run(tmp_path, mesh, search_budget="1") == DOES_NOT_FIT
    err = capsys.readouterr().err
    assert "no candidate fits: all 1 that were compiled were refused" in err
    assert "was refused as by 1 GiB" in err and "raise --search_budget" in err
    assert not (tmp_path / "made" / "winner.gin").exists()


def test_a_worker_ends_with_its_search(tmp_path):
    """However that ended: what is asked never comes, and the pipe closes."""
    os.mkfifo(tmp_path / search_worker.REQUEST)
    worker = subprocess.Popen(
        [sys.executable, "-m", search_worker.__name__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        worker.stdin.close()
        assert worker.wait(120) == 1
    finally:
        worker.kill()


def documented():
    """Searches that the docs show."""
    text = re.sub(r"\\\n\s*", "", DOCS.read_text())
    return re.findall(r"^meshwright-plan .*--search\b.*$", text, re.MULTILINE)


def test_the_docs_show_a_search():
    assert documented()


@pytest.mark.slow  # The bounds of the model of 16B take minutes.
@pytest.mark.parametrize("line", documented())
def test_commands_of_the_docs_search(line, tmp_path, compiler, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = dict(re.findall(r"--(\w+)(?:=(\S+))?", line))
    files = [words.pop("gin_file")]
    more = {name: value or "true" for name, value in words.items()}
    for file in more["search_plans"].split(","):
        assert config.find_gin_file(file)
    # Of plans and batches one each: bounding all takes a minute.
    more |= {
        name: more[name].split(",")[0] for name in ("search_plans", "search_batch")
    }
    more |= {
        "search_budget": "1",
        "search_propagated": "0",
        "cache_dir": str(tmp_path / "cache"),
    }
    with flagsaver.as_parsed(gin_file=files, gin_param=[], **more):
        assert plan.main(["meshwright-plan"]) is None
    assert built(["winner.gin"], [])
    (kept,) = (tmp_path / "cache").iterdir()
    assert json.loads(kept.read_text())["key"]["topology"] == more["topology"]
