"""Weights of attention held as matrices: the same training, checkpoints, evaluation."""

import functools

import numpy as np
import pytest

from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.trainers.experiment.stacks import stacks
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import initial_state, random_batches, small_experiment, train

MATRICES = "Experiment.weights_as_matrices = True"
EMA = "Experiment.ema = @ExponentialMovingAverage()"
STEPS = 4


def experiment(*params, plan="data", mesh="(8,)", **how):
    return small_experiment(f"MESH_SHAPE = {mesh}", *params, EMA, plan=plan, **how)


@functools.cache
def as_they_are():
    job = experiment(plan="finalized", mesh="(1, 1)")
    return train(job, initial_state(job), STEPS)


@pytest.mark.parametrize(
    "plan,mesh,partitioner,updates",
    [
        ("finalized", "(1, 1)", "SHARDY", "off"),
        ("data", "(8,)", "SHARDY", "off"),
        ("data", "(8,)", "GSPMD", "all"),
        ("finalized", "(2, 4)", "SHARDY", "all"),
        ("finalized", "(4, 2)", "GSPMD", "off"),
        ("sequence_tensor", "(2, 4)", "SHARDY", "all"),
    ],
)
def test_training_is_the_same(plan, mesh, partitioner, updates):
    job = experiment(
        MATRICES,
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        f"Experiment.weight_update_sharding = '{updates}'",
        plan=plan,
        mesh=mesh,
    )
    theta = StepPrograms(job).traced_main.written.signature.inputs[0].theta
    # Model dims are combined with the stack's, or padded, where updates are sharded.
    assert theta.stack.attention.w_q.shape[-1] == theta.stack.attention.w_o.shape[-2]
    got, want = train(job, initial_state(job), STEPS), as_they_are()
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-6)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)
    assert got.state.keys() == want.state.keys()
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1
        np.testing.assert_allclose(
            got.state[path], value, rtol=0, atol=2e-5 * scale, err_msg=path
        )


def test_a_pipelines_weights_are_matrices_too():
    params = (
        "NUM_LAYERS = 4",
        "include 'lm/pipeline.gin'",
        "include 'plans/pipeline.gin'",
        "MESH_SHAPE = (2, 1, 2)",
        "NUM_STAGES = 2",
        "NUM_MICROBATCHES = 2",
    )
    plain = small_experiment(*params)
    (stack,) = stacks(plain.task).values()
    assert isinstance(stack, Pipeline)
    start = initial_state(plain)
    job = small_experiment(*params, MATRICES)
    shape = StepPrograms(job).step_weights.stack.attention.w_q.shape
    assert shape == (2, 2, 16, 16)
    got, want = (train(each, start, STEPS) for each in (job, plain))
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-6)


def test_weights_are_evaluated_and_saved_as_they_are():
    job = experiment(MATRICES)
    programs = StepPrograms(job)
    specs = programs.state_specs
    assert programs.step_weights.stack.attention.w_q.shape == (2, 16, 16)
    assert programs.step_weights.stack.attention.w_o.shape == (2, 16, 16)
    assert programs.step_weights.embedding == programs.weights.embedding
    state = TrainState(programs, initial_state(job))
    (batch,) = random_batches(job, 1)
    state.update(programs.main(state.stored(), batch)["state"])
    for held, wanted in ((state.weights(), specs.ema), (state.logical(), specs)):
        assert held.map(lambda x: x.shape) == wanted.map(lambda s: s.shape)
    sums = programs.eval(state.weights(), batch.map(lambda x: x[0]))
    assert float(sums.nats) > 0
    # As it is held, for histograms.
    parts = state.stored()
    state = {"step": parts.step, "theta": parts.theta}
    counted = programs.histograms(type(parts)(state), batch)
    assert len(counted.edges) == len(programs.histogram_tags)


def test_heads_that_axes_do_not_divide_stay_dims():
    job = experiment(MATRICES, plan="finalized", mesh="(1, 8)")
    programs = StepPrograms(job)
    assert programs.step_weights == programs.weights
    split = "ShardingPlan.weights = {'head_dim': 'Y'}"
    programs = StepPrograms(
        experiment(MATRICES, split, plan="finalized", mesh="(2, 4)")
    )
    assert programs.step_weights == programs.weights


def test_updates_that_follow_dims_refuse_matrices():
    message = "weights_as_matrices is True, but Adafactor updates a weight by its dims"
    with pytest.raises(ValueError, match=message):
        small_experiment(MATRICES, "MESH_SHAPE = (1, 1)", optimizer="adafactor")
