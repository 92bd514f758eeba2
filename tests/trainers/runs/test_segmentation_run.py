"""Segmentation in the trainer: parity of training however volumes are split; a run."""

import functools

import nibabel
import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.tasks.segmentation.volume_files_on_disk import install
from tests.trainers.parity import Trained, initial_state, train
from tests.trainers.runs.test_parity import assert_equal_training

SMALL = (
    "NUM_CLASSES = 3",
    "UNet3D.analysis = ((3,), (4, 4))",
    "UNet3D.synthesis = ((3,),)",
    "Experiment.optimizer = @Adam()",
    "Adam.learning_rate = @ConstantSchedule()",
    "ConstantSchedule.value = 0.01",
    "Experiment.global_batch = 2",
    "Experiment.num_steps = 4",
    "SegmentationInput.files = @VolumeFiles()",
)
PLANS = {
    "one": ("data_spatial", (1, 1)),
    "spatial": ("spatial", (8,)),
    "data_spatial": ("data_spatial", (2, 4)),
    "spatial_2d": ("spatial_2d", (2, 2, 2)),
}
EVEN, UNEVEN = (16, 8, 6), (13, 7, 6)


def experiment(plan: str, *params: str) -> Experiment:
    name, shape = PLANS[plan]
    files = ["seg/segmentation.gin", f"plans/{name}.gin"]
    return build_experiment(files, [*SMALL, f"MESH_SHAPE = {shape}", *params])[0]


def volumes(experiment: Experiment, calls: int) -> list[NestedMap]:
    """A batch of bright boxes and some voxels that do not count, the same each time."""
    rng = np.random.default_rng(0)
    spec = StepPrograms(experiment).abstract_batches()
    label = np.zeros(spec.label.shape, np.int32)
    label[:, :, 2:9, 2:6, 1:4] = 1
    label[:, :, 5:12, 3:5, 2:6] = 2
    image = label[..., None] + rng.standard_normal(spec.image.shape)
    label[:, 0, :2] = -1
    return [NestedMap(image=image.astype(np.float32), label=label)] * calls


@functools.cache
def on_one_device(size: tuple[int, ...]) -> tuple[NestedMap, Trained]:
    """The first state, and what five steps make of it."""
    job = experiment("one", "VolumeFiles.path = ''", f"PATCH = {size}")
    start = initial_state(job)
    return start, train(job, start, batches_of=volumes)


@pytest.mark.parametrize(
    ("plan", "size", "partitioner"),
    [
        ("data_spatial", EVEN, "SHARDY"),
        ("data_spatial", UNEVEN, "GSPMD"),
        ("spatial_2d", UNEVEN, "SHARDY"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("data_spatial", EVEN, "GSPMD"),
                ("data_spatial", UNEVEN, "SHARDY"),
                ("spatial", EVEN, "SHARDY"),
                ("spatial", UNEVEN, "GSPMD"),
                ("spatial_2d", EVEN, "GSPMD"),
            )
        ),
    ],
)
def test_eight_devices_train_as_one(plan, size, partitioner):
    start, want = on_one_device(size)
    split = experiment(
        plan,
        "VolumeFiles.path = ''",
        f"PATCH = {size}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
    )
    assert_equal_training(train(split, start, batches_of=volumes), want)


def test_a_run_writes_its_predictions_and_shows_them(tmp_path):
    files = install(tmp_path, count=5, shape=(20, 10, 8), held=2)
    job = experiment(
        "data_spatial",
        "PATCH = (16, 8, 8)",
        f"VolumeFiles.path = '{files}'",
        "Experiment.eval_interval = 2",
        "Experiment.decode_batches = None",
        "BatchNorm.decay = 0.5",
    )
    folder = tmp_path / "model"
    result = loop.train_and_evaluate(StepPrograms(job), loop.Run(model_dir=str(folder)))
    scores = {"dice", "dice/liver", "volume_dice", "volume_dice/tumour"}
    assert scores <= set(result.evaluation)
    for step in (2, 4):
        written = sorted((folder / "predictions" / f"step_{step}").iterdir())
        assert [path.name for path in written] == ["3.nii.gz", "4.nii.gz"]
    truth = nibabel.load(tmp_path / "labelsTr" / "3.nii.gz")
    made = nibabel.load(written[0])
    assert made.shape == truth.shape
    np.testing.assert_array_equal(made.affine, truth.affine)
    assert set(np.unique(made.dataobj)) <= {0, 1, 2}
    events = EventAccumulator(str(folder / "eval")).Reload()
    tags = {f"metrics/{score}" for score in scores}
    assert {*tags, "3", "4"} <= set(events.Tags()["tensors"])
