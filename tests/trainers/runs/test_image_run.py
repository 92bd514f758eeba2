"""Image classification in the trainer: parity of training with LARS; a short run."""

import functools

import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.trainers.parity import Trained, initial_state, train
from tests.trainers.runs.test_parity import assert_equal_training

SMALL = (
    "IMAGE_SIZE = 32",
    "NUM_CLASSES = 8",
    "ResNet.blocks = (1,)",
    "ResNet.widths = (3,)",
    "ImageInput.files = @SyntheticImages()",
    "Experiment.optimizer = @LARS()",
    "LARS.learning_rate = @ConstantSchedule()",
    "LARS.trust_coefficient = 0.02",
    "LARS.weight_decay = 0.0001",
    "ConstantSchedule.value = 0.5",
    "Experiment.global_batch = 16",
    "Experiment.num_steps = 4",
)


def experiment(devices: int, *params: str) -> Experiment:
    files = ["image/classification.gin", "plans/data.gin"]
    mesh = f"MESH_SHAPE = ({devices},)"
    return build_experiment(files, [*SMALL, mesh, *params])[0]


def pictures(experiment: Experiment, calls: int) -> list[NestedMap]:
    """A batch of noise, brighter for later classes, the same each time; two unused."""
    rng = np.random.default_rng(0)
    spec = StepPrograms(experiment).abstract_batches()
    label = rng.integers(0, 8, spec.label.shape).astype(np.int32)
    shades = 25 * label[..., None, None, None]
    image = (shades + rng.integers(0, 80, spec.image.shape)).astype(np.uint8)
    label[:, 3:5] = -1
    return [NestedMap(image=image, label=label)] * calls


@functools.cache
def on_one_device() -> tuple[NestedMap, Trained]:
    """The first state, and what five steps make of it."""
    job = experiment(1)
    start = initial_state(job)
    return start, train(job, start, batches_of=pictures)


@pytest.mark.parametrize(
    "partitioner",
    [
        pytest.param("SHARDY", marks=pytest.mark.always),
        pytest.param("GSPMD", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_train_as_one(partitioner):
    start, want = on_one_device()
    split = experiment(8, f"Experiment.partitioner = %Partitioner.{partitioner}")
    assert_equal_training(train(split, start, batches_of=pictures), want)


def test_a_run_is_evaluated_on_all_held_out_pictures(tmp_path):
    job = experiment(
        2,
        f"SyntheticImages.folder = '{tmp_path / 'images'}'",
        "SyntheticImages.train = 20",
        "SyntheticImages.held_out = 21",
        "SyntheticImages.size = 32",
        "Experiment.num_steps = 2",
    )
    run = loop.Run(model_dir=str(tmp_path / "model"))
    result = loop.train_and_evaluate(StepPrograms(job), run).evaluation
    assert {"loss", "cross_entropy", "top_1", "top_5"} <= set(result)
    right = result["top_1"] * 21
    np.testing.assert_allclose(right, round(right), atol=1e-5)
    assert 0 <= result["top_1"] <= result["top_5"] <= 1
