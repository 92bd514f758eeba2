"""Bounds of a candidate's memory: state, gradients, saved activations."""

import math

import pytest

from meshwright.trainers.planning.search.search_memory import MemoryBound
from meshwright.trainers.planning.search.search_space import built, policies
from tests.trainers.planning.search.search_cases import (
    ALL,
    EVERYTHING,
    NAMED,
    NOTHING,
    candidate,
    space,
)


@pytest.fixture(scope="module")
def small():
    return space(*NAMED)


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
    case = candidate(small, **changes)
    layers = built(small.gin_files, small.gin_params).task.stack.num_layers
    assert layers == 2
    assert MemoryBound(small.experiment).activations(case) == activations


def test_nothing_recomputed_saves_more_than_what_has_a_name(small):
    bound = MemoryBound(small.experiment)
    saved = [
        bound.activations(candidate(small, policy=policy))
        for policy in (EVERYTHING, *policies(small.experiment)[:1:-1], NOTHING)
    ]
    assert saved == sorted(saved) and len(set(saved)) == len(saved)


def test_state_is_counted_with_the_gradients_of_the_loop(small):
    case = candidate(small, mesh=(2, 4))
    weights = small.experiment.task.weights()
    plan = case.plan.on(case.mesh)
    size = {
        path: spec.dtype.size * math.prod(spec.sharding(plan).shard_shape(spec.shape))
        for path, spec in weights.items_by_path()
    }
    stacked = sum(n for path, n in size.items() if path.startswith("stack."))
    assert 0 < stacked < sum(size.values())
    # Adam has two slots for each weight; the step is one number.
    bound = 3 * sum(size.values()) + stacked + 4
    assert MemoryBound(small.experiment).state(case) == bound
    unrolled = space(*NAMED, "Repeat.unroll = %Unroll.UNROLLED")
    assert MemoryBound(unrolled.experiment).state(case) == bound - stacked
