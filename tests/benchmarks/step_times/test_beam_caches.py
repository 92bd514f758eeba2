"""The benchmark of beams' caches: what it compares, and the bytes that it counts."""

import pytest

from benchmarks.step_times import beam_caches
from meshwright.layers.stacks.beams import BeamCaches
from meshwright.tasks.text.decoding import BeamSearch
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.serving.generation import Continued


def test_searches_that_find_different_things_are_not_compared():
    found = [[Continued(ids=(3, 4), score=-1.0, ended=False)]]
    beam_caches.check_same([found, found])
    for ids, score in (((3, 5), -1.0), ((3, 4), -1.1)):
        other = [[Continued(ids=ids, score=score, ended=False)]]
        with pytest.raises(ValueError, match="hypotheses differ"):
            beam_caches.check_same([found, other])


def test_bytes_are_those_of_all_keys_and_values():
    """Keys and values of four layers with four heads of 32, of two rows' four beams."""
    sizes = {"rows": 2, "beams": 4, "prompt": 16, "tokens": 48}
    task = build_experiment(["lm/stdlib_tiny.gin"], [])[0].task
    token = 2 * 4 * 4 * 32 * 4
    for caches, tokens in (
        (BeamCaches.REORDERED, 4 * (15 + 48)),
        (BeamCaches.FLAT, 15 + 4 * 48),
    ):
        search = BeamSearch(caches=caches)
        assert beam_caches.cache_bytes(task, search, **sizes) == 2 * tokens * token
