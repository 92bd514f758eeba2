"""What the search finds is the best of all plans, where all can be compiled."""

import math

import pytest

from benchmarks.search import planted
from benchmarks.search.planted_models import planted_models
from meshwright.framework.devices.topology import topology
from meshwright.trainers import search
from tests.needs import libtpu

MODELS, KEPT = planted_models(), planted.kept()
BUDGET = 4


def test_all_plans_of_20_models_were_compiled():
    assert sorted(map(planted.name_of, MODELS)) == sorted(KEPT)
    assert len(KEPT) == 20


@pytest.mark.parametrize("number", [1, 8, 12])
def test_the_winner_is_the_best_of_all(number):
    """By what was kept; nothing is compiled."""
    model = MODELS[number]
    searched = planted.Searched(model)
    seconds = KEPT[planted.name_of(model)]
    assert set(seconds) == set(map(planted.key, searched.points()))
    row = searched.row(seconds, BUDGET)
    assert row.winner <= 1.03 * row.best < row.worst


def test_a_search_with_time_left_propagates_all_plans():
    """Neighbours of slower plans are looked at when those of the best are."""
    searched = planted.Searched(MODELS[1])
    searched.finder.run([], most=1000)
    assert len(searched.finder.found) == len(list(searched.points()))


@libtpu
def test_what_is_kept_is_what_the_compiler_says():
    searched = planted.Searched(MODELS[1])
    point = next(p for p in searched.points() if any(p.masks))
    kept = KEPT[planted.name_of(MODELS[1])][planted.key(point)]
    assert math.isclose(searched.compiled(point), kept, rel_tol=1e-6)


@libtpu
@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_search_that_compiles_finds_the_best_of_all(number):
    model = MODELS[number]
    found = search(
        model.step,
        model.args,
        model.topology,
        results_like=model.results_like,
        most_axes=1,
        compiled=BUDGET,
    )
    seconds = KEPT[planted.name_of(model)]
    assert found.compiled <= 1.03 * min(s for s in seconds.values() if s is not None)
    assert found.mesh.size == topology(model.topology).size
