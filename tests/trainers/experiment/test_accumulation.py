"""Gradients over microbatches: the same training, and reductions once a step."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.sharding_types.checker import ShardingTypeError
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import (
    initial_state,
    random_batches,
    small_experiment,
    train,
)

BATCH = "Experiment.global_batch = 16"
STEPS = 3


def experiment(*params, steps=1, plan="data", mesh="(8,)", **how):
    return small_experiment(
        BATCH,
        f"MESH_SHAPE = {mesh}",
        f"Experiment.gradient_accumulation_steps = {steps}",
        *params,
        plan=plan,
        **how,
    )


def even_batches(of, calls):
    """All tokens count, so that microbatches do alike."""
    batches = random_batches(of, calls)
    return [
        b.map_with_path(lambda path, x: np.ones_like(x) if path == "weights" else x)
        for b in batches
    ]


@functools.cache
def at_once():
    job = experiment(plan="finalized", mesh="(1, 1)")
    return train(job, initial_state(job), STEPS, even_batches)


@pytest.mark.parametrize(
    "plan,mesh,partitioner,updates",
    [
        ("finalized", "(1, 1)", "SHARDY", "off"),
        ("data", "(8,)", "SHARDY", "all"),
        ("data", "(8,)", "GSPMD", "off"),
        ("finalized", "(2, 4)", "SHARDY", "all"),
        ("finalized", "(4, 2)", "GSPMD", "all"),
        ("sequence_tensor", "(2, 4)", "SHARDY", "all"),
        pytest.param(
            *("sequence_tensor", "(4, 2)", "GSPMD", "off"), marks=pytest.mark.slow
        ),
    ],
)
def test_microbatches_train_as_their_batch(plan, mesh, partitioner, updates):
    job = experiment(
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        f"Experiment.weight_update_sharding = '{updates}'",
        steps=2,
        plan=plan,
        mesh=mesh,
    )
    got = train(job, initial_state(job), STEPS, even_batches)
    want = at_once()
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-6)
    for path, value in want.state.items():
        if path.startswith("theta"):
            np.testing.assert_allclose(
                got.state[path], value, rtol=0, atol=2e-5 * np.abs(value).max()
            )


def large_sums(program):
    """Collectives that add up more than 100 numbers: [(kind, in a loop, numbers)]."""
    module = HloModule(program.hlo_text())
    return [
        (
            c.kind,
            bool(module.loops_around(module.by_name[c.name].computation)),
            sum(map(math.prod, c.shapes)),
        )
        for c in program.collectives()
        if c.kind in ("all-reduce", "reduce-scatter") and c.bytes > 400
    ]


def test_gradients_are_reduced_once_a_step():
    """All in one all-reduce after the loop over microbatches, whatever their number."""
    weights = StepPrograms(experiment()).weights
    numbers = sum(spec.size for spec in weights.leaves())
    for steps in (2, 1):
        job = experiment("Experiment.weight_update_sharding = 'off'", steps=steps)
        sums = large_sums(StepPrograms(job).main)
        # At once, those of layers are reduced in the loop over layers.
        assert (sums == [("all-reduce", False, numbers)]) == (steps == 2)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_are_reduced_onto_shards_of_the_update(steps):
    job = experiment("Experiment.weight_update_sharding = 'all'", steps=steps)
    sums = large_sums(StepPrograms(job).main)
    assert sums and all(kind == "reduce-scatter" for kind, _, _ in sums)
    if steps > 1:  # At once, those of layers are reduced in the loop over layers.
        assert not any(in_loop for _, in_loop, _ in sums)


def test_rows_that_microbatches_do_not_divide_are_refused():
    job = experiment(steps=4)
    message = r"gradient_accumulation_steps is 4, but batch.\w+ has 16 rows on 8"
    with pytest.raises(ValueError, match=message):
        StepPrograms(job).traced_main  # noqa: B018
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 0"):
        experiment(steps=0)


def test_experts_train_as_on_one_device():
    """Auxiliary losses, sums and all-to-alls are in the loop over microbatches."""

    def trained(devices):
        job = experiment(steps=2, plan="sparse", mesh=f"({devices},)", experts=4)
        return train(job, initial_state(job), STEPS)

    got, want = trained(4), trained(1)
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-6)
    for path, value in want.state.items():
        if path.startswith("theta"):
            np.testing.assert_allclose(
                got.state[path], value, rtol=0, atol=2e-5 * np.abs(value).max()
            )


def test_a_plan_may_leave_gradients_of_a_batch_at_once_to_the_end():
    """Those of a stack's layers too: not in the loop over layers."""
    job = experiment(
        "ShardingPlan.unreduced_gradient_axes = ('data',)",
        "Experiment.weight_update_sharding = 'off'",
    )
    programs = StepPrograms(job)
    numbers = sum(spec.size for spec in programs.weights.leaves())
    # With the loss.
    assert large_sums(programs.main) == [("all-reduce", False, numbers + 1)]


def test_steps_in_a_loop_and_a_moving_average():
    """Two steps to a call, each of two microbatches, as one at a time."""
    ema = ("Experiment.ema = @ExponentialMovingAverage()",)

    def trained(per_loop, calls):
        many = (
            f"Experiment.steps_per_loop = {per_loop}",
            "Experiment.num_steps = 4",
            "Experiment.checkpoint_interval = 2",
            "Experiment.summary_interval = 2",
        )
        job = experiment(*ema, *many, steps=2)
        return train(job, initial_state(job), calls)

    got, want = trained(2, 1), trained(1, 2)
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-6)
    assert any(path.startswith("ema") for path in want.state)
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1
        np.testing.assert_allclose(got.state[path], value, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_data_parallel_step_communicates_where_annotations_say_so(steps):
    strict = experiment("Experiment.check_types = True", steps=steps)
    assert StepPrograms(strict).traced_main.written


def test_a_step_that_leaves_it_to_the_partitioner_is_refused():
    mesh = {"plan": "data_tensor", "mesh": "(4, 2)"}
    one_hot = "TokenEmbedding.lookup = %Lookup.ONE_HOT"
    strict = experiment(one_hot, "Experiment.check_types = True", **mesh)
    message = "train: op .* partial values along tensor"
    with pytest.raises(ShardingTypeError, match=message):
        _ = StepPrograms(strict).traced_main


def test_a_loss_that_is_no_scalar_is_refused(monkeypatch):
    job = experiment()
    real = type(job.task).loss

    def rows(*args):
        loss = real(*args)
        return dataclasses.replace(loss, loss=loss.loss[None])

    monkeypatch.setattr(type(job.task), "loss", rows)
    with pytest.raises(ValueError, match=r"TaskLoss.loss of shape \(1,\); it must"):
        _ = StepPrograms(job).traced_main
