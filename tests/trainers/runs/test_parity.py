"""Parity: the same training on one device and on eight, however it is partitioned."""

import functools
import itertools
import math

import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from tests.trainers.parity import (
    Trained,
    initial_state,
    small_experiment,
    train,
    train_by_tf,
)

PLANS = ("attempt1", "attempt2", "finalized")
LOSS_RTOL = 1e-5
# Of a weight's largest element. Adam's first updates are gradient / |gradient|: where a
# gradient is next to zero, rounding in another order shows.
STATE_TOLERANCE = 1e-3


@functools.cache
def start(optimizer: str, *params: str) -> NestedMap:
    experiment = small_experiment("MESH_SHAPE = (1, 1)", *params, optimizer=optimizer)
    return initial_state(experiment)


@functools.cache
def one_device(optimizer: str, *params: str) -> Trained:
    experiment = small_experiment("MESH_SHAPE = (1, 1)", *params, optimizer=optimizer)
    return train(experiment, start(optimizer, *params))


def assert_equal_training(got: Trained, want: Trained) -> None:
    np.testing.assert_allclose(got.losses, want.losses, rtol=LOSS_RTOL)
    assert got.losses[-1] < got.losses[0], "five steps must learn something"
    assert got.state.keys() == want.state.keys()
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(
            got.state[path] / scale, value / scale, atol=STATE_TOLERANCE, err_msg=path
        )


# Any two of the settings meet in one of these; all of them do in the slow ones.
PAIRS = (
    ("attempt1", "SHARDY", "adam", "LOOP"),
    ("attempt1", "GSPMD", "adafactor", "UNROLLED"),
    ("attempt2", "SHARDY", "adafactor", "UNROLLED"),
    ("attempt2", "GSPMD", "adam", "LOOP"),
    ("finalized", "SHARDY", "adam", "UNROLLED"),
    ("finalized", "GSPMD", "adafactor", "LOOP"),
)


@pytest.mark.parametrize(
    "plan,partitioner,optimizer,unroll",
    [
        case if case in PAIRS else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(
            PLANS, ("SHARDY", "GSPMD"), ("adam", "adafactor"), ("LOOP", "UNROLLED")
        )
    ],
)
def test_eight_devices_train_as_one(plan, partitioner, optimizer, unroll):
    repeat = f"Repeat.unroll = %Unroll.{unroll}"
    experiment = small_experiment(
        "MESH_SHAPE = (2, 4)",
        repeat,
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        plan=plan,
        optimizer=optimizer,
    )
    assert_equal_training(
        train(experiment, start(optimizer, repeat)), one_device(optimizer, repeat)
    )


@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
def test_fully_sharded_data_parallelism_trains_as_one_device(partitioner):
    experiment = small_experiment(
        "MESH_SHAPE = (8,)",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        plan="fsdp",
    )
    specs, plan = experiment.task.weights(), experiment.plan
    for path, spec in specs.items_by_path():
        parts = spec.sharding(plan).splits()
        assert math.prod(parts) == (8 if "model" in spec.dims else 1), path
    assert_equal_training(train(experiment, start("adam")), one_device("adam"))


@pytest.mark.parametrize(
    "optimizer,partitioner",
    [
        ("adam", "GSPMD"),
        ("adafactor", "SHARDY"),
        # Each by itself is above, and the optimizers meet them in `PAIRS`.
        pytest.param("adam", "SHARDY", marks=pytest.mark.slow),
        pytest.param("adafactor", "GSPMD", marks=pytest.mark.slow),
    ],
)
def test_axes_that_divide_no_dim(optimizer, partitioner):
    """Batch 8, M 16, H 32, N 4, V 265 on axes of 3 and 2: padded in the stored form."""
    vocab = "VOCAB_SIZE = 265"
    experiment = small_experiment(
        "MESH_SHAPE = (3, 2)",
        vocab,
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        optimizer=optimizer,
    )
    assert_equal_training(
        train(experiment, start(optimizer, vocab)), one_device(optimizer, vocab)
    )


@pytest.mark.parametrize(
    "plan,mesh,partitioner,updates",
    [
        ("finalized", "(2, 4)", "SHARDY", "off"),
        ("attempt1", "(4, 2)", "GSPMD", "off"),
        ("data", "(8,)", "SHARDY", "all"),
        ("data_tensor", "(2, 4)", "GSPMD", "all"),
    ],
)
def test_muon_trains_as_on_one_device(plan, mesh, partitioner, updates):
    experiment = small_experiment(
        f"MESH_SHAPE = {mesh}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        f"Experiment.weight_update_sharding = '{updates}'",
        plan=plan,
        optimizer="muon",
    )
    assert_equal_training(train(experiment, start("muon")), one_device("muon"))


OPTIONS = (
    "transformer_layer.dropout_rate = 0.1",
    "transformer_layer.activation = %Activation.GATED_GELU",
    "transformer_layer.positions = %PositionKind.RELATIVE",
    "transformer_layer.norm = @LayerNorm",
    "LanguageModel.final_norm = @LayerNorm()",
    "LayerNorm.model_dims = %MODEL_DIMS",
    "TokenEmbedding.softmax = %SoftmaxKind.SEPARATE",
    "LanguageModel.softmax = @Softmax()",
    "Softmax.model_dims = %MODEL_DIMS",
    "Softmax.vocab_size = %VOCAB_SIZE",
    "Repeat.recompute = %Recompute.ALL_BUT_NAMED",
    "Repeat.saved_names = ('query', 'context', 'hidden', 'gate')",
    "Experiment.ema = @ExponentialMovingAverage()",
    "Experiment.steps_per_loop = 5",
)


@functools.cache
def without_xla(optimizer: str, *params: str) -> Trained:
    experiment = small_experiment("MESH_SHAPE = (1, 1)", *params, optimizer=optimizer)
    return train_by_tf(experiment, start(optimizer, *params), calls=1)


@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
def test_every_option_at_once(partitioner):
    """Dropout and all, five steps in one compiled loop, against TF without XLA."""
    experiment = small_experiment(
        "MESH_SHAPE = (2, 4)",
        *OPTIONS,
        f"Experiment.partitioner = %Partitioner.{partitioner}",
    )
    got = train(experiment, start("adam", *OPTIONS), calls=1)
    assert len(got.losses) == 5
    assert_equal_training(got, without_xla("adam", *OPTIONS))
    assert any(path.startswith("ema.softmax") for path in got.state)


@functools.cache
def experts_on_one_device(optimizer: str) -> tuple[NestedMap, Trained]:
    """The first state, and what TF makes of it without XLA."""
    experiment = small_experiment(
        "MESH_SHAPE = (1, 1)", plan="hybrid", optimizer=optimizer, experts=8
    )
    start = initial_state(experiment)
    return start, train_by_tf(experiment, start)


SPARSE, HYBRID = ("sparse", (8,), "adam"), ("hybrid", (2, 4), "adafactor")
DENSE = ("dense", (2, 4), "adam")


@pytest.mark.parametrize(
    "plan,mesh,optimizer,partitioner",
    [
        (*HYBRID, "GSPMD"),
        pytest.param(*SPARSE, "SHARDY", marks=pytest.mark.always),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (*SPARSE, "GSPMD"),
                (*HYBRID, "SHARDY"),
                (*DENSE, "SHARDY"),
                (*DENSE, "GSPMD"),
            ]
        ),
    ],
)
def test_experts_train_as_on_one_device(plan, mesh, optimizer, partitioner):
    start, want = experts_on_one_device(optimizer)
    experiment = small_experiment(
        f"MESH_SHAPE = {mesh}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        plan=plan,
        optimizer=optimizer,
        experts=8,
    )
    assert_equal_training(train(experiment, start), want)
