"""Recommendation in the trainer: parity of training, with split tables too; a run."""

import functools

import pytest

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.trainers.parity import Trained, initial_state, train
from tests.trainers.runs.test_parity import assert_equal_training

SMALL = (
    "USERS = 30",
    "ITEMS = 21",
    "SyntheticInteractions.per_user = 6",
    "RecommendationInput.held_out_negatives = 12",
    "NeuMF.factors = 4",
    "NeuMF.mlp_dims = (8, 8, 4)",
    "Experiment.global_batch = 16",
    "Experiment.num_steps = 20",
    "Experiment.eval_interval = 10",
    "Experiment.checkpoint_interval = 10",
    "Experiment.summary_interval = 10",
    "CosineSchedule.end_step = 20",
    "LEARNING_RATE = 0.02",
)
ROWS = 'ShardingPlan.weights = {"users": "data", "items": "data"}'


def experiment(devices: int, *params: str) -> Experiment:
    mesh = f"MESH_SHAPE = ({devices},)"
    return build_experiment(["rec/synthetic_ncf.gin"], [*SMALL, mesh, *params])[0]


def batches_of(experiment: Experiment, calls: int) -> list[NestedMap]:
    B, steps = experiment.global_batch, experiment.steps_per_loop
    batches = experiment.task.train_batches(0, global_batch=B, rows=range(B))
    stacked = batches.batch(steps).take(calls)
    return [NestedMap(batch).map(lambda t: t.numpy()) for batch in stacked]


@functools.cache
def on_one_device() -> tuple[NestedMap, Trained]:
    """The first state, and what two calls of ten steps make of it."""
    job = experiment(1)
    start = initial_state(job)
    return start, train(job, start, calls=2, batches_of=batches_of)


@pytest.mark.parametrize(
    ("plan", "partitioner"),
    [
        ((), "SHARDY"),
        ((), "GSPMD"),
        ((ROWS,), "SHARDY"),
        pytest.param((ROWS,), "GSPMD", marks=pytest.mark.always),
    ],
    ids=["data-shardy", "data-gspmd", "rows-shardy", "rows-gspmd"],
)
def test_eight_devices_train_as_one(plan, partitioner):
    start, want = on_one_device()
    params = f"Experiment.partitioner = %Partitioner.{partitioner}"
    split = experiment(8, *plan, params)
    assert_equal_training(train(split, start, 2, batches_of), want)


@pytest.mark.always
def test_a_run_ranks_what_was_held_out(tmp_path):
    """Training, evaluation, decoding and scores, as other kinds of jobs have them."""
    programs = StepPrograms(experiment(8))
    result = loop.train_and_evaluate(programs, loop.Run(model_dir=str(tmp_path)))
    scores = result.evaluation
    assert set(scores) == {"loss", "hit_rate@10", "ndcg@10"}
    assert 0 < scores["ndcg@10"] < scores["hit_rate@10"] <= 1
