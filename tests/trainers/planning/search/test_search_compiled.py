"""Whole searches, with libtpu: cut short and gone on with, and what they promise."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from meshwright.trainers.cli import DOES_NOT_FIT, INTERRUPTED
from meshwright.trainers.planning.search import search, search_screen
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search_space import built
from tests import needs
from tests.trainers.planning.search.search_cases import PLANS, space
from tests.trainers.planning.test_plan_main import call_main
from tests.trainers.small_run import GIN_FILES

pytestmark = [
    pytest.mark.slow,  # A dozen compilations.
    needs.libtpu,
]
BUDGET = 3
MESH = "MESH_SHAPE = (2, 4)"


def command(folder: pathlib.Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "meshwright.trainers.plan",
        *(f"--gin_file={file}" for file in GIN_FILES),
        f"--gin_param={MESH}",
        "--search",
        "--topology=v3:2x2",
        f"--search_budget={BUDGET}",
        "--search_jobs=1",
        "--search_propagated=0",
        f"--search_plans={','.join(PLANS)}",
        f"--search_output={folder / 'winner.gin'}",
        f"--cache_dir={folder / 'cache'}",
    ]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """(folder, exit status, stderr) of a search stopped when it had one result."""
    folder = tmp_path_factory.mktemp("search")
    process = subprocess.Popen(command(folder), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(folder.glob("cache/*.json")):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    return folder, process.wait(), process.stderr.read()


@pytest.fixture(scope="module")
def finished(interrupted):
    """The rows of the same search, gone on with."""
    where = space()
    cache = PlanCache(folder=interrupted[0] / "cache")
    screened = search_screen.screen(where)
    return list(search._compiled(screened.promising, cache, BUDGET, 1))


def test_an_interrupted_search_says_how_to_go_on(interrupted):
    folder, status, stderr = interrupted
    assert status == INTERRUPTED
    kept = list(folder.glob("cache/*"))
    assert 1 <= len(kept) < BUDGET and all(file.suffix == ".json" for file in kept)
    assert f"kept in {folder / 'cache'}: the same command goes on" in stderr
    assert (folder / "winner.gin").read_text().startswith("# Of an interrupted search")


def test_it_goes_on_from_there(interrupted, finished, monkeypatch):
    """What it has is not compiled again: neither the first results nor, now, any."""
    folder, _, _ = interrupted
    assert len(finished) == len(list(folder.glob("cache/*.json"))) == BUDGET

    def no_process(*args, **kwargs):
        raise AssertionError("compiled again")

    where, cache = space(), PlanCache(folder=folder / "cache")
    monkeypatch.setattr(subprocess, "Popen", no_process)
    result = search.search(where, cache=cache, budget=BUDGET, jobs=1)
    assert {row.result for row in result.ranked} == {row.result for row in finished}
    times = [row.seconds_per_example for row in result.ranked]
    assert times == sorted(times) and any(r.promising.configured for r in result.ranked)


def test_no_program_takes_less_than_its_bound(finished):
    for row in finished:
        assert row.result.refusal is None
        assert 0 < row.promising.bound <= row.result.peak


def test_the_same_command_writes_the_winner(finished, interrupted):
    folder, _, _ = interrupted
    ran = subprocess.run(command(folder), capture_output=True, text=True, check=True)
    winner = folder / "winner.gin"
    assert f"wrote {winner}" in ran.stdout
    assert all(len(line) <= 80 for line in ran.stdout.splitlines()[:-1])
    best = min(finished, key=search._rank).promising.candidate
    made = built([str(winner)], [])
    assert made.plan == best.plan.on(best.mesh)
    again = subprocess.run(command(folder), capture_output=True, text=True)
    assert again.returncode == 1 and "--overwrite" in again.stderr
    text = winner.read_text()
    assert subprocess.run([*command(folder), "--overwrite"]).returncode == 0
    assert winner.read_text() == text


def test_exit_status_if_nothing_fits(capsys):
    large = ["VOCAB_SIZE = 4194304", "MODEL_DIMS = 65536"]
    assert call_main(*large, search="true", topology="v3:2x2") == DOES_NOT_FIT
    assert "meshwright-plan: no candidate fits" in capsys.readouterr().err


def test_what_the_compiler_refuses_is_too_large(tmp_path):
    """The bound of this one is below memory: its logits alone are 64 GiB."""
    large = ["VOCAB_SIZE = 2097152", "SEQUENCE_LENGTH = 8192", "MODEL_DIMS = 8"]
    where = space(*large)
    scored = next(
        scored for scored in search_screen.screen(where).promising if scored.configured
    )
    assert scored.bound < where.torus.kind.memory
    cache = PlanCache(folder=tmp_path)
    result = search.Compile(where, scored.candidate, cache).result()
    assert result.too_large and result.seconds is None
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text())["result"]["too_large"]
