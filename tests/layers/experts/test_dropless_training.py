"""Five steps with experts that are never full: one device, eight, and slots for all."""

import functools

import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from tests.trainers.parity import Trained, initial_state, small_experiment, train

EXPERTS = 8
DROPLESS = (
    "include 'layers/dropless.gin'",
    "EXPERTS_PER_TOKEN = 3",
    "TopK.bias_rate = 0.01",
    "TopK.expert_sets = 4",
    "TopK.sets_per_token = 2",
    "MoE.balance_weight = 0.01",
)
SLOTS_FOR_ALL = (
    "MoE.dropless = None",
    "TopK.capacity = @Capacity()",
    "Capacity.factor = 8.0",
)
"""The einsums, with as many slots as an expert can need."""
MESHES = {"sparse": (8,), "hybrid": (2, 4), "dense": (2, 4)}


def experiment_of(plan, mesh, *params):
    return small_experiment(
        f"MESH_SHAPE = {mesh}",
        *DROPLESS,
        *params,
        plan=plan,
        experts=EXPERTS,
    )


@functools.cache
def by_slots() -> tuple[NestedMap, Trained]:
    """The state before; training on one device in which no expert is ever full."""
    experiment = experiment_of("sparse", (1,), *SLOTS_FOR_ALL)
    start = initial_state(experiment)
    return start, train(experiment, start)


def assert_equal_training(got: Trained, want: Trained) -> None:
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    assert got.losses[-1] < got.losses[0], "five steps must learn something"
    assert got.state.keys() == want.state.keys()
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(
            got.state[path] / scale, value / scale, atol=1e-3, err_msg=path
        )


def test_one_device_trains_as_with_slots_for_all():
    start, want = by_slots()
    got = train(experiment_of("sparse", (1,), "Dropless.block_size = 8"), start)
    assert_equal_training(got, want)
    (bias,) = (value for path, value in got.state.items() if path.endswith("bias"))
    # Five steps, each by the rate.
    assert 0 < np.abs(bias).max() <= 5 * 0.01 + 1e-6


CASES = (
    ("sparse", 1.5, "NOTHING"),
    ("sparse", 0.3, "EVERYTHING"),
    ("hybrid", 1.0, "NOTHING"),
    ("dense", 1.0, "NOTHING"),
)
OFTEN = (
    (*CASES[0], "SHARDY"),
    (*CASES[1], "GSPMD"),
    (*CASES[2], "GSPMD"),
    (*CASES[3], "SHARDY"),
)


@pytest.mark.parametrize(
    ("plan", "factor", "recompute", "partitioner"),
    [
        case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (*case, partitioner)
            for case in CASES
            for partitioner in ("SHARDY", "GSPMD")
        )
    ],
)
def test_eight_devices_train_as_one(plan, factor, recompute, partitioner):
    start, want = by_slots()
    experiment = experiment_of(
        plan,
        MESHES[plan],
        "Dropless.block_size = 8",
        f"Dropless.exchange_factor = {factor}",
        f"Repeat.recompute = %Recompute.{recompute}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
    )
    assert_equal_training(train(experiment, start), want)
