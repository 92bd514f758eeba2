"""The search without its compiles: candidates, bounds, order, table, winner."""

import dataclasses
import json
import math
import sys

import pytest

from meshwright.framework.compiler.topology import topology
from meshwright.framework.modeling.recompute import Recompute
from meshwright.trainers import search, search_text
from meshwright.trainers.plan_cache import PlanCache
from meshwright.trainers.search import Compile, Found, Promising, Row, Screened, Space
from meshwright.trainers.search_memory import MemoryBound
from meshwright.trainers.search_result import Result
from meshwright.trainers.search_space import (
    Candidate,
    Policy,
    built,
    candidates,
    factorizations,
    is_configured,
    misfit,
    named_plans,
    policies,
)
from tests.trainers.parity import DATA
from tests.trainers.small_run import GIN_FILES
from tests.trainers.test_plan_main import call_main

NAMES = ("query", "key", "value", "context", "hidden", "feed_forward_out")
NAMED = (
    "Repeat.recompute = %Recompute.ALL_BUT_NAMED",
    f"Repeat.saved_names = {NAMES}",
)
ALL = Policy(recompute=Recompute.ALL_BUT_NAMED, saved_names=NAMES)
EVERYTHING = Policy(recompute=Recompute.EVERYTHING)
NOTHING = Policy(recompute=Recompute.NOTHING)


PLANS = ("plans/attempt1.gin", "plans/attempt2.gin", "plans/finalized.gin")


def space(*params, name="v3:2x2", batches=(8,), files=GIN_FILES, plans=PLANS):
    params = ("MESH_SHAPE = (2, 4)", *params)
    experiment = built(files, params)
    return Space(
        experiment=experiment,
        gin_files=tuple(files),
        gin_params=params,
        torus=topology(name),
        plans=tuple(named_plans(experiment, files, params, plans)),
        batches=tuple(batches),
    )


@pytest.fixture(scope="module")
def small():
    return space(*NAMED)


def candidate(where, mesh=(2, 4), plan="finalized", policy=EVERYTHING, batch=8):
    (found,) = (one for one in where.plans if one.name == plan)
    return Candidate(mesh=mesh, plan=found, policy=policy, batch=batch)


def promising(where, *, bound=1e9, seconds=1.0, **changes):
    one = candidate(where, **changes)
    return Promising(
        candidate=one,
        bound=bound,
        seconds=seconds,
        configured=is_configured(where.experiment, one),
    )


def test_mesh_shapes_are_all_products():
    assert factorizations(8, 2) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    shapes = factorizations(64, 3)
    assert len(set(shapes)) == len(shapes) == math.comb(6 + 2, 2)
    assert all(math.prod(shape) == 64 for shape in shapes)
    assert factorizations(1, 0) == [()] and factorizations(2, 0) == []


def test_policies_are_all_nothing_and_nested_subsets(small):
    subsets = [
        Policy(recompute=Recompute.ALL_BUT_NAMED, saved_names=NAMES[:count])
        for count in (6, 4, 2)
    ]
    assert policies(small.experiment) == [EVERYTHING, NOTHING, *subsets]
    plain = built(GIN_FILES, ["MESH_SHAPE = (2, 4)"])
    assert policies(plain) == [EVERYTHING, NOTHING]


def test_a_candidate_is_built_from_its_bindings(small):
    for one in small.candidates():
        made = built(small.gin_files, [*small.gin_params, *one.bindings()])
        assert made.plan == one.plan.on(one.mesh)
        stack = made.task.stack
        assert (stack.recompute, tuple(stack.saved_names)) == (
            one.policy.recompute,
            one.policy.saved_names,
        )
        assert made.global_batch == one.batch
        assert is_configured(small.experiment, one) == (made == small.experiment)
    assert len(small.candidates()) == 4 * 3 * 5


def test_a_given_device_order_is_for_its_mesh_alone():
    ids = "ShardingPlan.device_ids = (7, 6, 5, 4, 3, 2, 1, 0)"
    one = candidate(space(ids), mesh=(4, 2))
    assert "ShardingPlan.device_ids = None" in one.bindings()
    assert built(GIN_FILES, [ids, *one.bindings()]).plan.device_ids is None


def test_plans_are_the_shipped_ones_of_the_same_axes_and_the_users_own(tmp_path):
    own = 'ShardingPlan.weights = {"model": "Y"}'
    shipped = [plan.name for plan in space(plans=()).plans]
    assert {"attempt1", "attempt2", "finalized"} <= set(shipped)
    names = [plan.name for plan in space(own, plans=()).plans]
    assert names == ["as configured", *shipped]
    other_axes = [
        'ShardingPlan.mesh_axes = ("data",)',
        'ShardingPlan.activations = {"batch": "data"}',
        "ShardingPlan.weights = {}",
        "ShardingPlan.mesh_shape = (8,)",
    ]
    (only,) = space(*other_axes, plans=()).plans
    assert only.name == "as configured"
    path = tmp_path / "mine.gin"
    path.write_text("\n".join(other_axes))
    small = space()
    files = ["plans/attempt1.gin", str(path)]
    wanted = named_plans(small.experiment, GIN_FILES, small.gin_params, files)
    assert [plan.name for plan in wanted] == ["attempt1", "mine"]
    assert wanted[1].gin_file == str(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mesh": (1, 8)}, "more shards than there are 'heads'"),
        ({"batch": 4, "mesh": (8, 1)}, "more shards than there are 'batch'"),
        ({"batch": 9}, "shards of unequal batches"),
        ({"mesh": (8, 1)}, None),
    ],
)
def test_shapes_that_cannot_do_are_left_out(small, changes, reason):
    assert misfit(small.experiment, candidate(small, **changes), small.torus) == reason


def test_a_mesh_that_is_no_box_of_the_topology_is_left_out(small):
    torus = topology("v5e:4x3")
    assert misfit(small.experiment, candidate(small, mesh=(8, 1)), torus) == (
        "mesh cannot be laid onto the topology"
    )


# Of small_lm.gin: L 2, B 8, S 8, M 16, H 32, N 4, D 4; float32.
ROWS = 2 * 8 * 8 * 4  # Bytes of all layers for one column.


@pytest.mark.parametrize(
    ("changes", "activations"),
    [
        ({"policy": EVERYTHING}, ROWS * 16 / 8),
        ({"policy": EVERYTHING, "plan": "attempt2"}, ROWS * 16 / 2),
        ({"policy": EVERYTHING, "plan": "attempt2", "mesh": (4, 2)}, ROWS * 16 / 4),
        ({"policy": EVERYTHING, "batch": 16}, 2 * ROWS * 16 / 8),
        # Input, query, key, value, context and hidden; nothing reads the output of the
        # feed-forward layer.
        ({"policy": ALL}, ROWS * (16 + 4 * 16 + 32) / 8),
    ],
)
def test_saved_activations_are_counted(small, changes, activations):
    one = candidate(small, **changes)
    layers = built(small.gin_files, small.gin_params).task.stack.num_layers
    assert layers == 2
    assert MemoryBound(small.experiment).activations(one) == activations


def test_nothing_recomputed_saves_more_than_what_has_a_name(small):
    bound = MemoryBound(small.experiment)
    saved = [
        bound.activations(candidate(small, policy=policy))
        for policy in (EVERYTHING, *policies(small.experiment)[:1:-1], NOTHING)
    ]
    assert saved == sorted(saved) and len(set(saved)) == len(saved)


def test_state_is_counted_with_the_gradients_of_the_loop(small):
    one = candidate(small, mesh=(2, 4))
    weights = small.experiment.task.weights()
    plan = one.plan.on(one.mesh)
    size = {
        path: spec.dtype.size * math.prod(spec.sharding(plan).shard_shape(spec.shape))
        for path, spec in weights.items_by_path()
    }
    stacked = sum(n for path, n in size.items() if path.startswith("stack."))
    assert 0 < stacked < sum(size.values())
    # Adam has two slots for each weight; the step is one number.
    bound = 3 * sum(size.values()) + stacked + 4
    assert MemoryBound(small.experiment).state(one) == bound
    unrolled = space(*NAMED, "Repeat.unroll = %Unroll.UNROLLED")
    assert MemoryBound(unrolled.experiment).state(one) == bound - stacked


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
    return list(search._compiled(where, ones, None, budget, jobs))


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


def test_what_is_configured_comes_first(small):
    as_is = built(small.gin_files, small.gin_params)
    assert as_is == small.experiment
    own = promising(small, policy=ALL, seconds=99.0)
    other = promising(small, mesh=(4, 2), seconds=1.0)
    assert own.configured and not other.configured
    assert sorted([other, own], key=search._promise) == [own, other]


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
    one = candidate(where, policy=EVERYTHING)
    result = Compile(where, one, PlanCache(folder=tmp_path)).result()
    assert "every Repeat got its recompute from" in result.refusal


def found(where):
    """As if some candidates had been compiled."""
    rows = [
        Row(
            promising=promising(where, mesh=mesh, plan=plan, policy=policy),
            result=Result(seconds=s, peak=7 * 2**30, utilization=0.4),
        )
        for mesh, plan, policy, s in (
            ((4, 2), "attempt2", ALL, 0.5),
            ((2, 4), "finalized", ALL, 1.0),
        )
    ]
    lost = Row(
        promising=promising(where, mesh=(8, 1), policy=NOTHING),
        result=Result(refusal="RESOURCE_EXHAUSTED: " + "so much too large " * 9),
    )
    left = promising(where, mesh=(2, 4))
    return Found(
        ranked=tuple(rows),
        refused=(lost,),
        screened=Screened(
            promising=(*(row.promising for row in [*rows, lost]), left),
            left_out={search.TOO_LARGE: 3, "more shards than there are 'heads'": 15},
            least=None,
        ),
    )


def test_the_winner_is_a_gin_file_to_train_with(small, tmp_path):
    text = search_text.winner(small, found(small))
    assert text == search_text.winner(small, found(small))
    path = tmp_path / "winner.gin"
    path.write_text(text)
    made = built([str(path)], [])
    best = found(small).ranked[0].promising.candidate
    assert made.plan == best.plan.on(best.mesh) and made.global_batch == best.batch
    assert tuple(made.task.stack.saved_names) == NAMES
    assert all(len(line) <= 80 for line in text.splitlines() if line[:1] == "#")
    assert text.startswith(
        "# Found by meshwright-plan --search for TPU topology v3:2x2: 62.5 ms an"
    )
    flat = " ".join(text.replace("#", " ").split())
    assert "60 candidates of plans attempt1, attempt2, finalized; batches 8" in flat
    assert "4 could fit, 3 were compiled, 2 did fit" in flat
    # Shipped files by their names, others from wherever it is read.
    assert "include 'plans/finalized.gin'" in text
    assert f"include '{DATA.resolve() / 'small_lm.gin'}'" in text


def test_the_table_fits_a_terminal(small):
    text = search_text.table(small, found(small))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "62.5" in lines[1] and "4x2" in lines[1] and "attempt2" in lines[1]
    assert lines[2].startswith("*") and "* as configured" in lines
    assert "  all but 6: query, key, value, context, hidden, feed_forward_out" in lines
    assert any(line.split()[:2] == ["refused", "8x1"] for line in lines)
    assert "RESOURCE_EXHAUSTED: so much" in text
    assert "     1 more might fit: raise --search_budget" in lines
    assert lines[-1].startswith("     3 left out: state and saved")


def test_the_smallest_of_what_cannot_fit_is_named(tmp_path):
    """16e9 weights over 8 cores: 8.7 GiB of weights and as much of gradients."""
    where = space("NUM_LAYERS = 64", files=["paper/table3_8x32.gin"], batches=(64,))
    with pytest.raises(search.NothingFitsError) as info:
        search.search(where, cache=PlanCache(folder=tmp_path), budget=1, jobs=1)
    message = str(info.value)
    bytes_, over = _numbers(message)
    assert over == pytest.approx(bytes_ - 15.48, abs=0.02) and over > 0
    assert "the smallest, " in message and "--search_batch" in message
    assert search.TOO_LARGE in message


def _numbers(message):
    words = message.split()
    units = {"GiB": 1.0, "MiB": 2**-10}
    return [
        float(words[i - 1]) * units[word]
        for i, word in enumerate(words)
        if word in units
    ]


def test_all_refused_says_how_to_go_on(small):
    row = found(small).refused[0]
    message = search._all_refused([row], found(small).screened, 1)
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


def test_a_model_without_a_plan_gets_a_shipped_one():
    """What it has splits nothing, on one device."""
    files = (GIN_FILES[0], GIN_FILES[2])
    experiment = built(files, [])
    assert not experiment.plan.weights and experiment.plan.mesh.size == 1
    plans = named_plans(experiment, files, [])
    assert plans[0].name == "as configured"
    (plan,) = (one for one in plans if one.name == "finalized")
    one = Candidate(mesh=(4, 2), plan=plan, policy=EVERYTHING, batch=8)
    made = built(files, one.bindings())
    assert made.plan == plan.on((4, 2)) and made.plan.weights


def test_what_is_the_same_program_is_looked_at_once(monkeypatch):
    """Along an axis of one device plans do not differ."""
    bounded, state = [], MemoryBound.state
    monkeypatch.setattr(
        MemoryBound, "state", lambda self, one: bounded.append(one) or state(self, one)
    )
    screened = search.screen(space())
    assert len(bounded) == len(screened.promising)
    apart = {
        (one.candidate.mesh, one.candidate.plan.name)
        for one in screened.promising
        if one.candidate.mesh in ((8, 1), (4, 2))
    }
    assert apart == {
        ((4, 2), "attempt1"),
        ((4, 2), "attempt2"),
        ((4, 2), "finalized"),
        ((8, 1), "attempt1"),
        ((8, 1), "attempt2"),
    }
    assert screened.left_out["the same program as with another plan"] == 2
    assert screened.promising[0].configured


def test_dims_that_the_model_lacks_make_no_other_program(tmp_path):
    path = tmp_path / "experts.gin"
    path.write_text(
        "include 'plans/attempt2.gin'\n"
        "ShardingPlan.weights = {'model': 'X', 'heads': 'Y', 'hidden': 'Y', "
        "'vocab': 'Y', 'experts': 'X'}\n"
    )
    screened = search.screen(space(plans=(str(path), PLANS[1])))
    assert {one.candidate.plan.name for one in screened.promising} == {"attempt2"}
    assert screened.left_out["the same program as with another plan"] == 6


@pytest.mark.slow  # Lowers each program.
def test_of_equal_programs_the_configured_one_is_kept():
    """Attempt 2 comes first, and is the same on (8, 1)."""
    screened = search.screen(space("MESH_SHAPE = (8, 1)", *NAMED))
    (own,) = (one.candidate for one in screened.promising if one.configured)
    assert own.plan.name == "finalized" and own.mesh == (8, 1)


def test_candidates_come_with_each_batch(small):
    ones = list(
        candidates(small.experiment, small.plans[:1], devices=8, batches=(8, 16))
    )
    assert {one.batch for one in ones} == {8, 16} and len(ones) == 4 * 5 * 2


def test_results_survive_json():
    for ids in (None, (1, 0, 2)):
        result = Result(seconds=1.5, peak=3, utilization=0.5, device_ids=ids)
        assert Result.of(json.loads(json.dumps(dataclasses.asdict(result)))) == result
