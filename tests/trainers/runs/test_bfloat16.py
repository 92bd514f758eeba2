"""bfloat16 activations: eight devices train as one, within the error of the format."""

import dataclasses
import functools

import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment import step_programs
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.gradients import batch_gradients
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import (
    Trained,
    initial_state,
    random_batches,
    small_experiment,
    train,
)

EPS = 2.0**-8
"""A bfloat16 has 8 bits: this is how far apart neighbours are, for their size."""
# A loss is a sum over tens of tokens whose errors have either sign: 0.11 EPS measured.
LOSS_TOLERANCE = EPS / 4
# Sums over devices are of rounded parts, in another order, and an activation is rounded
# some tens of times on its way through the layers and back. Measured are 0.5 EPS of the
# gradients' norm, and 2.3 EPS of what five steps change in a weight. Between bfloat16
# and float32 on one device it is as much; a gradient counted twice would be 256.
NORM_TOLERANCE = EPS
WEIGHT_TOLERANCE = 4 * EPS
# Of the largest change of any weight: a bias of attention's keys has no gradient.
LEAST_SCALE = 0.1
STEPS = 5

PLAIN = (
    "Experiment.optimizer = @SGD()",
    "SGD.learning_rate = @ConstantSchedule()",
    "SGD.momentum = 0.9",
)
BFLOAT16 = "Experiment.activation_dtype = %bfloat16"
CONFORMER = (
    "MODEL_DIMS = 16",
    "HIDDEN_DIMS = 32",
    "NUM_HEADS = 4",
    "HEAD_DIM = 4",
    "NUM_LAYERS = 2",
    "NUM_BINS = 16",
    "LABEL_LENGTH = 4",
    "SUBSAMPLING_CHANNELS = 4",
    "Manifest.path = ''",
    "SpeechInput.bucket_frames = (48,)",
    "SpecAugment.bin_width = 6",
    "conformer_layer.window = 3",
    "conformer_layer.dropout_rate = 0.1",
    "Repeat.recompute = %Recompute.NOTHING",
    "Experiment.global_batch = 8",
    "Experiment.num_steps = 5",
    "ConstantSchedule.value = 0.03",
)


def language_model(*params: str) -> Experiment:
    # ReLU's derivative jumps: a rounding may switch a hidden unit on or off.
    smooth = "transformer_layer.activation = %Activation.GELU"
    return small_experiment(*PLAIN, smooth, "ConstantSchedule.value = 0.3", *params)


def conformer(*params: str) -> Experiment:
    files = ["asr/speech.gin", "plans/finalized.gin"]
    return build_experiment(files, [*PLAIN, *CONFORMER, *params])[0]


def sounds(experiment: Experiment, calls: int) -> list[NestedMap]:
    """Noise and labels, the same each time; rows of unequal length."""
    rng = np.random.default_rng(0)
    spec = StepPrograms(experiment).abstract_batches()
    batch = NestedMap(
        features=rng.standard_normal(spec.features.shape).astype(np.float32),
        frames=np.array([[48, 40, 44, 48, 36, 48, 20, 31]], np.int32),
        labels=rng.integers(1, 20, spec.labels.shape).astype(np.int32),
        label_counts=np.array([[4, 3, 4, 2, 4, 1, 0, 3]], np.int32),
    )
    return [batch] * calls


MODELS = {
    "language_model": (language_model, random_batches),
    "conformer": (conformer, sounds),
}


@functools.cache
def one_device(model: str, *params: str) -> tuple[NestedMap, Trained]:
    """The first state, and what five steps make of it."""
    make, batches_of = MODELS[model]
    job = make("MESH_SHAPE = (1, 1)", *params)
    start = initial_state(job)
    if model == "conformer":
        # Padding comes out of the subsampling as zeros else: a norm divides them by
        # its epsilon, and their gradients with them.
        bias = start.theta.subsampling.b_out
        rng = np.random.default_rng(1)
        start.theta.subsampling.b_out = rng.standard_normal(bias.shape).astype("f")
    return start, train(job, start, STEPS, batches_of)


def differences(got: Trained, want: Trained, start: NestedMap) -> dict[str, float]:
    """By what is compared the difference, in units of its tolerance."""
    first = {path: x for path, x in start.items_by_path() if path.startswith("theta.")}
    moved = {p: np.linalg.norm(want.state[p] - x) for p, x in first.items()}
    least = LEAST_SCALE * max(moved.values())
    deviations = {
        f"weight {path}": np.linalg.norm(got.state[path] - want.state[path])
        / (WEIGHT_TOLERANCE * max(moved[path], least))
        for path in first
    }
    for name, mine, other, tolerance in (
        ("loss", got.losses, want.losses, LOSS_TOLERANCE),
        ("gradients' norm", got.norms, want.norms, NORM_TOLERANCE),
    ):
        deviations[name] = np.abs(mine / other - 1).max() / tolerance
    return deviations


def assert_within_the_format(got: Trained, want: Trained, start: NestedMap) -> None:
    assert got.losses[-1] < got.losses[0], "five steps must learn something"
    wrong = {k: v for k, v in differences(got, want, start).items() if not v <= 1}
    assert not wrong, "in units of the tolerance: " + str(wrong)


@pytest.mark.parametrize(
    "model,partitioner",
    [
        ("language_model", "SHARDY"),
        pytest.param("language_model", "GSPMD", marks=pytest.mark.always),
        pytest.param("conformer", "SHARDY", marks=pytest.mark.slow),
        pytest.param("conformer", "GSPMD", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_train_as_one(model, partitioner):
    make, batches_of = MODELS[model]
    start, want = one_device(model, BFLOAT16)
    split = make(
        "MESH_SHAPE = (2, 4)",
        BFLOAT16,
        f"Experiment.partitioner = %Partitioner.{partitioner}",
    )
    assert_within_the_format(train(split, start, STEPS, batches_of), want, start)


@pytest.mark.parametrize("path", ["embedding.table", "stack.attention.w_k"])
def test_a_gradient_a_twentieth_too_large_is_noticed(path, monkeypatch):
    def wrong(*args):
        result = batch_gradients(*args)
        scaled = 1.05 * result.gradients.get_path(path)
        gradients = result.gradients.map_with_path(
            lambda name, gradient: scaled if name == path else gradient
        )
        return dataclasses.replace(result, gradients=gradients)

    start, want = one_device("language_model", BFLOAT16)
    monkeypatch.setattr(step_programs, "batch_gradients", wrong)
    got = train(language_model("MESH_SHAPE = (2, 4)", BFLOAT16), start, STEPS)
    with pytest.raises(AssertionError, match=f"weight theta.{path}"):
        assert_within_the_format(got, want, start)
