"""Why a plan of a file was not chosen, and how found plans are written."""

import dataclasses

import pytest

from meshwright.framework.sharding.plan import SequenceAttention, as_axes
from meshwright.trainers.planning.search import search_screen, search_text
from meshwright.trainers.planning.search.found import found_plans, joined
from meshwright.trainers.planning.search.found.finding import Point, Progress
from meshwright.trainers.planning.search.found.propagated import Priced
from meshwright.trainers.planning.search.found.why_not import why_not
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search_screen import Dropped
from meshwright.trainers.planning.search.search_space import NamedPlan, built
from tests.trainers.planning.search.search_cases import (
    candidate,
    promising,
    searched,
    space,
)

GIB = 2**30


@pytest.fixture(scope="module")
def where():
    return space()


def with_dropped(where, *dropped, plan="attempt1"):
    """A search that attempt 2 won, and that dropped candidates of another plan."""
    rows = tuple(
        Dropped(space=where, candidate=candidate(where, plan=plan), **fields)
        for fields in dropped
    )
    return with_screened(where, dropped=rows)


def with_screened(where, **fields):
    outcome = searched(where)
    screened = dataclasses.replace(outcome.screened, **fields)
    return dataclasses.replace(outcome, screened=screened)


@pytest.mark.parametrize(
    "dropped, line",
    [
        ([], "attempt1: was not looked at"),
        (
            [{"reason": "shards of unequal batches"}],
            "attempt1: not allowed: shards of unequal batches",
        ),
        (
            [{"reason": search_screen.SAME}],
            "attempt1: is the same program as another plan of the space",
        ),
        (
            [{"reason": "shards of unequal batches"}, {"reason": search_screen.SAME}],
            "attempt1: the same program as another plan at 2x4, recompute everything, "
            "batch 8; elsewhere shards of unequal batches",
        ),
        (
            [{"reason": search_screen.TOO_LARGE, "bound": 17.48 * GIB}],
            "attempt1: does not fit by 2.00 GiB or more, at 2x4, recompute everything, "
            "batch 8",
        ),
    ],
)
def test_each_plan_of_a_file_is_answered_for(where, dropped, line):
    lines = list(why_not(where, with_dropped(where, *dropped)))
    assert lines[0] == line
    assert lines[1].startswith("finalized: 100.0% slower at 2x4, recompute all but 6")
    assert len(lines) == 2


@pytest.mark.parametrize(
    "seconds, propagated, of_winner, line",
    [
        (
            1.5,
            True,
            True,
            "50.0% slower at 2x4, recompute everything, batch 8, by",
        ),
        (
            3.0,
            True,
            True,
            "takes 3.0 times as long at 2x4, recompute everything,",
        ),
        (
            1.5,
            False,
            True,
            "was not compiled at 2x4, recompute everything, batch 8,",
        ),
        (
            1.5,
            True,
            False,
            "was not compiled at 2x4, recompute everything, batch 8; 187.5 ms an "
            "example by propagation",
        ),
    ],
)
def test_what_was_not_compiled_is_compared_by_propagation(
    where, seconds, propagated, of_winner, line
):
    line = f"attempt1: {line}"
    slow = promising(where, plan="attempt1", seconds=seconds, propagated=propagated)
    outcome = with_screened(where, slow=(slow,))
    winner = outcome.ranked[0]
    priced = dataclasses.replace(winner.promising, propagated=of_winner)
    ranked = (dataclasses.replace(winner, promising=priced), *outcome.ranked[1:])
    first, *_ = why_not(where, dataclasses.replace(outcome, ranked=ranked))
    assert first.startswith(line)


def test_a_found_plan_is_written_as_gin(where):
    tables = dataclasses.replace(
        where.experiment.plan,
        mesh_axes=("X", "Y"),
        mesh_shape=(4, 2),
        weights={"model": ("X",), "hidden": ("Y",)},
        activations={"batch": ("X", "Y"), "sequence": ("Y",), "stream": ()},
    )
    plan = NamedPlan(name="found 1", gin_file=None, tables=tables)
    found = dataclasses.replace(candidate(where), plan=plan, mesh=(4, 2))
    read = built(where.gin_files, [*where.gin_params, *found.bindings()]).plan
    assert tuple(read.mesh_axes) == ("X", "Y") and tuple(read.mesh_shape) == (4, 2)
    for table in ("weights", "activations"):
        assert {d: as_axes(a) for d, a in getattr(read, table).items()} == getattr(
            tables, table
        )


def test_the_winner_is_a_table_of_names(where):
    outcome = searched(where)
    best = outcome.ranked[0]
    plan = dataclasses.replace(
        best.promising.candidate.plan, name="found 1", gin_file=None
    )
    changed = dataclasses.replace(best.promising.candidate, plan=plan)
    row = dataclasses.replace(
        best, promising=dataclasses.replace(best.promising, candidate=changed)
    )
    progress = Progress(considered=12345, propagated=67, best=0.25, floor=0.125)
    outcome = dataclasses.replace(
        outcome,
        ranked=(row, *outcome.ranked[1:]),
        screened=dataclasses.replace(outcome.screened, progress=progress),
    )
    text = search_text.table(where, outcome)
    assert "found 1:" in text and "hidden  Y        Y" in text
    assert "12345 plans by names were considered, 67 propagated" in text
    assert max(map(len, text.splitlines())) <= 80
    winner = search_text.winner(where, outcome)
    assert "# batch" not in winner and "#   batch            X" in winner
    assert "12345 plans by names" in " ".join(winner.split("\n# "))


def test_costs_are_kept_for_the_next_time(tmp_path):
    cache = PlanCache(folder=tmp_path)
    known = {
        Point(0, (4, 2), (1, 0)): Priced(seconds=1.0, computing=0.5, memory=2.0),
        Point(1, (8,), (1, 1)): None,
    }
    cache.store({"key": "a"}, {"plans": joined._written(known)})
    assert joined._read(cache.cached({"key": "a"})) == known
    assert joined._read(None) == {}


def test_what_is_slow_by_propagation_waits(where):
    """What was not propagated is not called slow, nor is the configuration."""
    slow = promising(where, plan="attempt1", seconds=9.0, propagated=True)
    unknown = promising(where, plan="attempt1", seconds=9.0)
    fast = promising(where, plan="attempt2", seconds=1.0, propagated=True)
    configured = dataclasses.replace(slow, configured=True)
    progress = Progress(considered=9, propagated=3, best=1.0 / 8, floor=0.1)
    before = dataclasses.replace(searched(where).screened, left_out={})
    screened = joined._without_slow(before, [configured, fast, unknown, slow], progress)
    assert screened.promising == (configured, fast, unknown)
    assert screened.slow == (slow,) and screened.left_out == {joined.SLOWER: 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"unreduced_gradient_axes": ("X",)},
        {"sequence_attention": SequenceAttention.RING},
        {"weights": {"layers": "X"}},
    ],
)
def test_a_plan_that_is_not_in_the_space_has_no_price(where, changes):
    assert found_plans._says_more(dataclasses.replace(where.experiment.plan, **changes))
    assert not found_plans._says_more(where.experiment.plan)
