"""The search without its compiles: order, refusals, table, winner."""

import dataclasses
import json
import sys

import pytest

from meshwright.trainers.planning.search import search, search_screen, search_text
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search import Compile
from meshwright.trainers.planning.search.search_result import Result
from meshwright.trainers.planning.search.search_space import built
from tests.trainers.parity import DATA
from tests.trainers.planning.search.search_cases import (
    ALL,
    EVERYTHING,
    NAMED,
    NAMES,
    candidate,
    promising,
    searched,
    space,
)
from tests.trainers.planning.test_plan_main import call_main

OF_TPUS = "Times are of TPU v3: on CPUs and GPUs another plan may be fastest."


@pytest.fixture(scope="module")
def small():
    return space(*NAMED)


class Answers:
    """Stands for `Compile`: results by rough seconds, with a note of the order."""

    def __init__(self, monkeypatch, results):
        self.results, self.order = results, []
        monkeypatch.setattr(search, "Compile", self)

    def __call__(self, space, candidate, cache):
        self.order.append(candidate.batch)
        self.now = candidate.batch
        return _Answer(self.results.get(candidate.batch, Result(seconds=1.0, peak=1)))


@dataclasses.dataclass
class _Answer:
    known: Result
    was_cached: bool = False

    def is_done(self, *, within):
        return True

    def result(self):
        return self.known

    def stop(self):
        pass


def compiled(where, ones, *, budget=9, jobs=1):
    return list(search._compiled(ones, None, budget, jobs))


def test_what_seems_fast_is_compiled_first_within_the_budget(small, monkeypatch):
    answers = Answers(monkeypatch, {})
    ones = [
        promising(small, mesh=(4, 2), batch=batch, seconds=batch * each)
        for batch, each in ((8, 3.0), (16, 1.0), (32, 2.0))
    ]
    rows = compiled(small, ones, budget=2)
    assert answers.order == [16, 32] == [r.promising.candidate.batch for r in rows]


@pytest.mark.parametrize(("jobs", "order"), [(1, [8, 32, 16]), (2, [8, 16, 32])])
def test_what_needs_more_than_something_refused_waits(small, monkeypatch, jobs, order):
    too_large = Result(refusal="too large", too_large=True)
    answers = Answers(monkeypatch, {8: too_large})
    ones = [
        promising(small, mesh=(4, 2), batch=8, seconds=8.0, bound=5e9),
        promising(small, mesh=(4, 2), batch=16, seconds=16.1, bound=6e9),
        promising(small, mesh=(4, 2), batch=32, seconds=32.5, bound=4e9),
    ]
    compiled(small, ones, jobs=jobs)
    assert answers.order == order
    answers = Answers(monkeypatch, {8: Result(refusal="an op it does not know")})
    compiled(small, ones)
    assert answers.order == [8, 16, 32]


def test_bounds_by_propagation_do_not_wait_for_others(small, monkeypatch):
    """They are estimates, and bounds of files are from below."""
    answers = Answers(monkeypatch, {8: Result(refusal="large", too_large=True)})
    ones = [
        promising(small, mesh=(4, 2), batch=8, seconds=8.0, bound=5e9),
        promising(
            small, mesh=(4, 2), batch=16, seconds=16.1, bound=6e9, propagated=True
        ),
        promising(small, mesh=(4, 2), batch=32, seconds=32.5, bound=4e9),
    ]
    compiled(small, ones)
    assert answers.order == [8, 16, 32]


def test_what_is_configured_comes_first(small):
    as_is = built(small.gin_files, small.gin_params)
    assert as_is == small.experiment
    configured = promising(small, policy=ALL, seconds=99.0)
    other = promising(small, mesh=(4, 2), seconds=1.0)
    assert configured.configured and not other.configured
    assert sorted([other, configured], key=search_screen.promise) == [configured, other]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo out of luck >&2; exit 7",
            "its process ended with status 7: out of luck",
        ),
        ("kill -ABRT $$", "its process ended by signal SIGABRT"),
    ],
)
def test_a_process_that_dies_is_a_refusal_and_not_kept(
    small, monkeypatch, tmp_path, script, reason
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    cache = PlanCache(folder=tmp_path / "cache")
    result = Compile(small, candidate(small), cache).result()
    assert result.refusal == reason and not result.too_large
    assert not cache.folder.exists()


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        (Result(refusal="the TPU is in use by another process"), False),
        (Result(refusal="1.00 GiB more than fit", too_large=True), True),
        (Result(seconds=1.0, peak=3, utilization=0.5), True),
    ],
)
def test_what_may_come_out_otherwise_is_not_kept(
    small, monkeypatch, tmp_path, result, kept
):
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(dataclasses.asdict(result)))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncp {answer} "$3/result.json"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    cache = PlanCache(folder=tmp_path / "cache")
    assert Compile(small, candidate(small), cache).result() == result
    assert cache.folder.exists() == kept


def test_a_candidate_that_cannot_be_built_is_a_refusal(tmp_path):
    """A stack of its own scope keeps its policy, whatever is bound for all."""
    scoped = ["LanguageModel.stack = @deep/Repeat()", *(f"deep/{b}" for b in NAMED)]
    where = space(*scoped)
    case = candidate(where, policy=EVERYTHING)
    result = Compile(where, case, PlanCache(folder=tmp_path)).result()
    assert "every Repeat got its recompute from" in result.refusal


def test_the_winner_names_the_modules_that_it_needs(small, monkeypatch):
    monkeypatch.setattr(search_text, "imported", lambda: ())  # By other tests.
    assert "Nothing must be set." in search_text.winner(small, searched(small))
    monkeypatch.setattr(search_text, "imported", lambda: ("my_input", "my_models"))
    text = search_text.winner(small, searched(small)).replace("\n# ", " ")
    flags = search_text.import_flags()
    assert flags == " --import=my_input --import=my_models"
    assert f"Must be given:{flags}; nothing else must be set." in text


def test_the_winner_is_a_gin_file_to_train_with(small, tmp_path):
    text = search_text.winner(small, searched(small))
    assert text == search_text.winner(small, searched(small))
    path = tmp_path / "winner.gin"
    path.write_text(text)
    made = built([str(path)], [])
    best = searched(small).ranked[0].promising.candidate
    assert made.plan == best.plan.on(best.mesh) and made.global_batch == best.batch
    assert tuple(made.task.stack.saved_names) == NAMES
    assert all(len(line) <= 80 for line in text.splitlines() if line[:1] == "#")
    assert text.startswith(
        "# Found by meshwright-plan --search for TPU topology v3:2x2: 62.5 ms an"
    )
    flat = " ".join(text.replace("#", " ").split())
    assert "60 candidates of plans attempt1, attempt2, finalized; batches 8" in flat
    assert "4 could fit, 3 were compiled, 2 did fit" in flat
    assert OF_TPUS in flat
    # Shipped files by their names, others from wherever it is read.
    assert "include 'plans/finalized.gin'" in text
    assert f"include '{DATA.resolve() / 'small_lm.gin'}'" in text


def test_the_table_fits_a_terminal(small):
    text = search_text.table(small, searched(small))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "62.5" in lines[1] and "4x2" in lines[1] and "attempt2" in lines[1]
    assert lines[2].startswith("*") and "* as configured" in lines
    assert "  all but 6: query, key, value, context, hidden, feed_forward_out" in lines
    assert any(line.split()[:2] == ["refused", "8x1"] for line in lines)
    assert "RESOURCE_EXHAUSTED: so much" in text
    assert "     1 more might fit: raise --search_budget" in lines
    assert f"  {OF_TPUS}" in lines
    assert lines[-1].startswith("     3 left out: state and saved")
    lines = search_text.reasons(["dense: slower " + "by much " * 10, "data: as fast"])
    assert [line[:15] for line in lines.splitlines()] == [
        *("why not dense: ", "    much by muc", "why not data: a")
    ]
    assert all(len(line) <= 80 for line in lines.splitlines())


def test_a_winner_that_leaves_a_mesh_axis_idle_says_so(small):
    found = searched(small)
    assert "splits nothing" not in search_text.table(small, found)
    row, *others = found.ranked
    plan = row.promising.candidate.plan
    tables = dataclasses.replace(plan.tables, weights={}, activations={"batch": "X"})
    plan = dataclasses.replace(plan, tables=tables)
    of_plan = dataclasses.replace(row.promising.candidate, plan=plan)
    scored = dataclasses.replace(row.promising, candidate=of_plan)
    row = dataclasses.replace(row, promising=scored)
    changed = dataclasses.replace(found, ranked=(row, *others))
    text = " ".join(search_text.table(small, changed).split())
    assert "splits nothing over Y (2) of the mesh, where devices repeat" in text


@pytest.mark.parametrize(("seconds", "is_near"), [(0.52, True), (0.53, False)])
def test_a_winner_that_is_hardly_faster_says_so(small, seconds, is_near):
    searched_for = searched(small)
    row, other = searched_for.ranked
    other = dataclasses.replace(
        other, result=dataclasses.replace(other.result, seconds=seconds)
    )
    as_file = dataclasses.replace(searched_for, ranked=(row, other))
    assert "does not tell" not in search_text.table(small, as_file)
    plan = dataclasses.replace(
        row.promising.candidate.plan, name="found 1", gin_file=None
    )
    of_plan = dataclasses.replace(row.promising.candidate, plan=plan)
    scored = dataclasses.replace(row.promising, candidate=of_plan)
    row = dataclasses.replace(row, promising=scored)
    found = dataclasses.replace(searched_for, ranked=(row, other))
    text = search_text.table(small, found)
    assert all(len(line) <= 80 for line in text.splitlines())
    says = "than the plan finalized. The estimate does not tell 4.0% apart: of the"
    assert (says in " ".join(text.split())) == is_near


@pytest.mark.parametrize("changed", ["off", "g256", "g256 auto"])
@pytest.mark.parametrize("batch", [8, 4096])
def test_a_variant_fits_a_terminal(small, changed, batch):
    found = searched(small)
    other = dataclasses.replace(small, changes=("a = 1",), changed=changed)
    row = dataclasses.replace(
        found.ranked[0],
        promising=promising(other, plan="finalized", batch=batch),
    )
    text = search_text.table(small, dataclasses.replace(found, ranked=(row,)))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    shown = " ".join(lines[1:3])
    assert changed in shown and " fina" in shown and str(batch) in shown
    assert ("gN after a plan's name" in text) == ("g" in changed)


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "-"), (0.304, "30%"), (0.0007, "0.07%"), (0.00003, "<0.01%"), (0, "0.0%")],
)
def test_the_share_of_peak_flops_says_something(small, share, text):
    found = searched(small)
    ranked = [
        dataclasses.replace(
            row, result=dataclasses.replace(row.result, utilization=share)
        )
        for row in found.ranked
    ]
    outcome = dataclasses.replace(found, ranked=ranked)
    assert search_text.table(small, outcome).splitlines()[1].split()[4] == text
    winner = search_text.winner(small, outcome).replace("\n# ", " ")
    assert f"{text} of peak FLOPs" in winner


def test_the_smallest_of_what_cannot_fit_is_named(tmp_path):
    """16e9 weights over 8 cores: 8.7 GiB of weights and as much of gradients."""
    where = space("NUM_LAYERS = 64", files=["paper/table3_8x32.gin"], batches=(64,))
    with pytest.raises(search.NothingFitsError) as info:
        search.search(where, cache=PlanCache(folder=tmp_path), budget=1, jobs=1)
    message = str(info.value)
    bytes_, over = _numbers(message)
    assert over == pytest.approx(bytes_ - 15.48, abs=0.02) and over > 0
    assert "the smallest, " in message and "--search_batch" in message
    assert search_screen.TOO_LARGE in message


def _numbers(message):
    words = message.split()
    units = {"GiB": 1.0, "MiB": 2**-10}
    return [
        float(words[i - 1]) * units[word]
        for i, word in enumerate(words)
        if word in units
    ]


def test_all_refused_says_how_to_go_on(small):
    row = searched(small).refused[0]
    message = search._all_refused([row], searched(small).screened, 1)
    assert "3 were not compiled: raise --search_budget above 1" in message
    assert "RESOURCE_EXHAUSTED" in message and "8x1 finalized" in message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "name one, as in --topology=v3:8x16"),
        ({"topology": "cpu"}, "name one, as in --topology=v3:8x16"),
        ({"topology": "v3:99x99"}, "go up to 'v3:32x32'"),
        ({"topology": "v3:2x2", "search_batch": "8,x"}, "whole numbers >= 1"),
        ({"topology": "v3:2x2", "search_batch": "0"}, "whole numbers >= 1"),
        (
            {"topology": "v3:2x2", "search_plans": "plans/atempt1.gin"},
            "Did you mean plans/attempt1.gin",
        ),
        (
            {"topology": "v3:2x2", "search_plans": "lm/stdlib_tiny.gin"},
            "--search_plans: lm/stdlib_tiny.gin binds nothing of ShardingPlan",
        ),
        ({"topology": "v3:2x2", "search_output": __file__}, "--overwrite"),
        (
            {"topology": "v3:2x2", "search_output": str(DATA)},
            "cannot be written (it is a folder): name another file",
        ),
        (
            {"topology": "v3:2x2", "search_output": "/proc/winner.gin"},
            "--search_output=/proc/winner.gin cannot be written (",
        ),
        (
            {"topology": "v3:2x2", "cache_dir": __file__},
            "(file exists): name another folder with --cache_dir",
        ),
        ({"topology": "v3:2x2", "json_out": "x.json"}, "without --search"),
    ],
)
def test_wrong_input_is_told(more, message):
    with pytest.raises(SystemExit) as info:
        call_main(search="true", **more)
    assert message in str(info.value.code)


def test_results_survive_json():
    for ids in (None, (1, 0, 2)):
        result = Result(seconds=1.5, peak=3, utilization=0.5, device_ids=ids)
        assert Result.of(json.loads(json.dumps(dataclasses.asdict(result)))) == result
