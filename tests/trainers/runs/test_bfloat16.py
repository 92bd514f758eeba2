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

# Sums over devices are of rounded parts, in another order. Each of two roundings of the
# same numbers is as far from the exact ones as the other, so of independent errors the
# difference is 1.4 times the error of either. Measured with eight draws are 0.2 to 1.5.
MOST = 2.0
DRAWS = 5
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


@dataclasses.dataclass(frozen=True)
class Draw:
    """Trained by one device from a first state."""

    start: NestedMap
    exact: Trained
    rounded: Trained


def trainings(
    model: str, starts: list[NestedMap], params: tuple[str, ...]
) -> list[Trained]:
    """Five steps from each of the states, by programs that are compiled once."""
    make, batches_of = MODELS[model]
    job = make(*params)
    programs = StepPrograms(job)
    return [train(job, start, STEPS, batches_of, programs) for start in starts]


@functools.cache
def one_device(model: str) -> list[Draw]:
    """What five steps make of some first states, in float32 and in bfloat16."""
    params = ("MESH_SHAPE = (1, 1)",)
    starts = [first_state(model, params, draw) for draw in range(DRAWS)]
    exact = trainings(model, starts, params)
    rounded = trainings(model, starts, (*params, BFLOAT16))
    return list(map(Draw, starts, exact, rounded))


def first_state(model: str, params: tuple[str, ...], draw: int) -> NestedMap:
    make, _ = MODELS[model]
    start = initial_state(make(*params), draw)
    if model == "conformer":
        # Padding comes out of the subsampling as zeros else: a norm divides them by
        # its epsilon, and their gradients with them.
        bias = start.theta.subsampling.b_out
        rng = np.random.default_rng(draw)
        start.theta.subsampling.b_out = rng.standard_normal(bias.shape).astype("f")
    return start


def differences(got: Trained, want: Trained, start: NestedMap) -> dict[str, float]:
    """By what is compared the relative difference; a weight's of what it moved."""
    first = {path: x for path, x in start.items_by_path() if path.startswith("theta.")}
    moved = {p: np.linalg.norm(want.state[p] - x) for p, x in first.items()}
    least = LEAST_SCALE * max(moved.values())
    return {
        "loss": np.abs(got.losses / want.losses - 1).max(),
        "gradients' norm": np.abs(got.norms / want.norms - 1).max(),
    } | {
        f"weight {path}": np.linalg.norm(got.state[path] - want.state[path])
        / max(moved[path], least)
        for path in first
    }


def assert_within_the_format(got: list[Trained], draws: list[Draw]) -> None:
    """Asserts that the median difference is no more than the format's own error."""
    for training in got:
        assert training.losses[-1] < training.losses[0], "it must learn something"
    ours = _medians(
        [(g, draw.rounded, draw.start) for g, draw in zip(got, draws, strict=True)]
    )
    formats = _medians([(draw.rounded, draw.exact, draw.start) for draw in draws])
    ratios = {name: ours[name] / formats[name] for name in ours}
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= MOST}
    assert not wrong, "in units of the format's error: " + str(wrong)


def _medians(compared: list[tuple[Trained, Trained, NestedMap]]) -> dict[str, float]:
    errors = [differences(*each) for each in compared]
    return {name: np.median([each[name] for each in errors]) for name in errors[0]}


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
    draws = one_device(model)
    split = (
        "MESH_SHAPE = (2, 4)",
        BFLOAT16,
        f"Experiment.partitioner = %Partitioner.{partitioner}",
    )
    got = trainings(model, [draw.start for draw in draws], split)
    assert_within_the_format(got, draws)


@pytest.mark.parametrize("path", ["embedding.table", "stack.attention.w_k"])
def test_a_gradient_a_twentieth_too_large_is_noticed(path, monkeypatch):
    def wrong(*args):
        result = batch_gradients(*args)
        scaled = 1.05 * result.gradients.get_path(path)
        gradients = result.gradients.map_with_path(
            lambda name, gradient: scaled if name == path else gradient
        )
        return dataclasses.replace(result, gradients=gradients)

    draws = one_device("language_model")
    monkeypatch.setattr(step_programs, "batch_gradients", wrong)
    starts = [draw.start for draw in draws]
    got = trainings("language_model", starts, ("MESH_SHAPE = (2, 4)", BFLOAT16))
    with pytest.raises(AssertionError, match=f"weight theta.{path}"):
        assert_within_the_format(got, draws)
