"""What a search does where plans that no file has cannot be looked at."""

import logging

import pytest

from meshwright.framework.compiler.stablehlo.shardy.named_module import OnePlanError
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.planning.search.found import joined
from meshwright.trainers.planning.search.found.finding import Point
from meshwright.trainers.planning.search.found.named_step import named_step, names_of
from meshwright.trainers.planning.search.found.propagated import Priced
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search_screen import screen
from tests.trainers.planning.search.search_cases import space


def join(monkeypatch, folder, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(joined, "_finder", fail)
    where = space()
    screened = screen(where)
    cache = PlanCache(folder=folder)
    return screened, joined.with_found(where, screened, cache, 10)


def test_a_model_of_one_plan_leaves_those_of_files(monkeypatch, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        screened, both = join(monkeypatch, tmp_path, OnePlanError("has regions\nmore"))
    assert both is screened
    assert "as the model has no other: has regions" in caplog.text


def test_any_other_error_is_one(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="a fault"):
        join(monkeypatch, tmp_path, ValueError("a fault"))


def test_costs_are_kept_if_it_is_interrupted(monkeypatch, tmp_path):
    monkeypatch.setattr(joined, "_finder", lambda space, known: known)
    where, cache = space(), PlanCache(folder=tmp_path)
    costs = {
        Point(0, (8,), (1, 0)): Priced(seconds=2.0, computing=1.0, memory=3.0),
        Point(1, (4, 2), (1, 2)): None,
    }
    with (
        pytest.raises(KeyboardInterrupt),
        joined.kept_finder(where, cache) as known,
    ):
        assert not known
        known.update(costs)
        raise KeyboardInterrupt
    with joined.kept_finder(where, cache) as known:
        assert known == costs


def test_a_pipeline_is_of_one_plan():
    experiment, _ = build_experiment(["lm/stdlib_pipeline.gin"], [])
    with pytest.raises(OnePlanError, match="stages must fit their axis"):
        named_step(experiment, names_of(experiment))


def test_dims_of_one_name_in_a_tensor_are_not_split():
    experiment, _ = build_experiment(["image/synthetic_resnet.gin"], [])
    names = list(map(str, names_of(experiment)))
    assert "weights['window']" not in names and "activations['batch']" in names
