"""Runs go on as if never interrupted, anywhere; what is bad stops them unsaved."""

import dataclasses
import logging
import os
import re
import shutil
import signal

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from meshwright.trainers.training import loop
from tests.tasks.keras.keras_cases import (
    CROSS_ENTROPY,
    classifier,
    programs_of,
    task_of,
)
from tests.trainers.small_run import (
    at,
    five_steps_a_loop,
    points,
    saved_state,
    saved_steps,
    small_programs,
    train,
)

SGD_WITH_EMA = (
    "Experiment.optimizer = @SGD()",
    "SGD.learning_rate = @LinearWarmup()",
    "Experiment.ema = @ExponentialMovingAverage()",
    "ExponentialMovingAverage.decay = 0.75",
    "ExponentialMovingAverage.warmup = None",
)


def assert_same_state(got, want):
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def resume_from(straight_folder, step, folder):
    """A folder in which training has come to `step`."""
    os.makedirs(folder / "checkpoints")
    shutil.copytree(
        straight_folder / "checkpoints" / str(step), folder / "checkpoints" / str(step)
    )
    return folder


@pytest.mark.parametrize(
    "steps_per_loop",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(5, marks=pytest.mark.always),
    ],
)
def test_resumed_run_has_identical_bits(straight, tmp_path, steps_per_loop):
    want, folder = straight(steps_per_loop)
    programs = five_steps_a_loop() if steps_per_loop == 5 else small_programs()
    first = train(programs, tmp_path, num_steps=10)
    second = train(programs, tmp_path)
    assert (first.step, second.step) == (10, 20)
    assert first.losses | second.losses == want.losses
    assert list(want.losses) == list(range(1, 21))
    assert want.losses[20] < want.losses[1]
    assert_same_state(
        saved_state(programs, tmp_path, 20), saved_state(programs, folder, 20)
    )


def test_steps_in_a_compiled_loop_are_the_same_steps(straight):
    single, five = straight(1)[0], straight(5)[0]
    np.testing.assert_allclose(
        list(five.losses.values()), list(single.losses.values()), rtol=1e-6
    )
    assert five.evaluation == pytest.approx(single.evaluation, rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "params"),
    [
        ("finalized", ("MESH_SHAPE = (4, 2)",)),
        ("finalized", ("MESH_SHAPE = (1, 1)",)),
        ("attempt1", ("Experiment.partitioner = %Partitioner.GSPMD",)),
    ],
)
def test_restored_elsewhere_losses_go_on(straight, tmp_path, plan, params):
    want, folder = straight()
    programs = small_programs(*params, plan=plan)
    resume_from(folder, 10, tmp_path)
    run = loop.Run(model_dir=str(tmp_path), evaluate=False)
    got = loop.train_and_evaluate(programs, run)
    assert list(got.losses) == list(range(11, 21))
    for step, loss in got.losses.items():
        assert loss == pytest.approx(want.losses[step], rel=1e-5), step


def test_checkpoints_are_exact_where_no_dim_divides_its_axes(straight, tmp_path):
    """Batch 8 and model 16 over an axis of 3: onto such a mesh, and back."""
    want, folder = straight()
    uneven, even = small_programs("MESH_SHAPE = (3, 2)"), small_programs()
    assert not uneven.initial_layout.same_arrays(uneven.plan_layout)
    resume_from(folder, 10, tmp_path)
    uneven.experiment = dataclasses.replace(uneven.experiment, num_steps=15)
    run = loop.Run(model_dir=str(tmp_path), evaluate=False)
    losses = loop.train_and_evaluate(uneven, run).losses
    shapes = {p: s.shape for p, s in even.state_specs.items_by_path()}
    assert {
        path: leaf.shape for path, leaf in saved_state(even, tmp_path, 15).items()
    } == shapes
    losses |= train(even, tmp_path).losses
    for step, loss in losses.items():
        assert loss == pytest.approx(want.losses[step], rel=1e-5), step


def test_moving_average_and_an_optimizer_without_slots(tmp_path):
    programs = at(small_programs(*SGD_WITH_EMA), eval_interval=0)
    result = train(programs, tmp_path / "straight", num_steps=4)
    train(programs, tmp_path / "broken", num_steps=2)
    train(programs, tmp_path / "broken", num_steps=4)
    state = saved_state(programs, tmp_path / "straight", 4)
    assert_same_state(saved_state(programs, tmp_path / "broken", 4), state)
    assert not any(path.startswith("slots") for path in state)

    def evaluate(part):
        prefix = part + "."
        theta = programs.weights.map_with_path(lambda path, _: state[prefix + path])
        sums = {"nats": 0.0, "tokens": 0.0}
        for batch in programs.experiment.task.eval_batches(
            global_batch=8, rows=range(8), max_batches=2
        ):
            out = programs.eval(theta, batch.map(lambda t: t.numpy()))
            sums = {name: sums[name] + float(out[name]) for name in sums}
        return sums["nats"] / sums["tokens"]

    assert result.evaluation["loss"] == pytest.approx(evaluate("ema"), rel=1e-6)
    assert result.evaluation["loss"] != pytest.approx(evaluate("theta"), rel=1e-6)


@pytest.mark.parametrize(
    ("steps_per_loop", "bad_step", "kept"),
    [(1, 3, []), (1, 6, [5]), (5, 8, [5]), (5, 15, [5, 10])],
)
def test_nan_stops_at_its_step(
    change_batches, tmp_path, steps_per_loop, bad_step, kept
):
    def poison(first, batches):
        if first <= bad_step < first + steps_per_loop:
            batches.weights[bad_step - first] = np.inf

    programs = five_steps_a_loop() if steps_per_loop == 5 else at(small_programs())
    # Advises to clip what is not clipped.
    advice = "Lower the learning rate, or check the data"
    if not kept:
        adam = dataclasses.replace(programs.experiment.optimizer, clip_global_norm=None)
        programs = at(programs, optimizer=adam)
        advice = "rate, set Adam.clip_global_norm, or check the data$"
    change_batches(poison)
    match = f"loss is nan at step {bad_step}; "
    match += f"checkpoint {', '.join(map(str, kept))} is" if kept else "nothing was"
    with pytest.raises(loop.TrainingError, match=f"{match}.*{advice}"):
        train(programs, tmp_path)
    assert saved_steps(tmp_path) == kept
    change_batches(lambda first, batches: None)
    assert train(programs, tmp_path).step == 20


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The loss of step 10 is good but its update is not: a checkpoint would be bad."""
    programs = at(small_programs())
    main = programs.main

    class Corrupting:
        memory, arguments = main.memory, main.arguments

        def __call__(self, state, batches):
            out = main(state, batches)
            if int(out["state"].step) == 10:
                out["state"].theta.final_norm.scale *= jnp.inf
            return out

    programs.main = Corrupting()
    match = "after step 10, .*theta.final_norm.scale.*checkpoint 5 is kept"
    with pytest.raises(loop.TrainingError, match=match):
        train(programs, tmp_path)
    assert saved_steps(tmp_path) == [5]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_stops(straight, change_batches, tmp_path, capfd, signum):
    def ask_to_stop(first, batches):
        if first == 8:
            signal.raise_signal(signum)
            if signum == signal.SIGTERM:  # `timeout` sends two.
                signal.raise_signal(signum)

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    programs = at(small_programs())
    change_batches(ask_to_stop)
    result = train(programs, tmp_path)
    assert (result.stop, result.step, result.evaluation) == (signum, 7, {})
    assert saved_steps(tmp_path) == [5, 7]
    assert capfd.readouterr().err.count(f"{signum.name}: stopping") == 1
    assert handlers == [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    ]
    change_batches(lambda first, batches: None)
    want = straight()[0].losses
    got = result.losses | train(programs, tmp_path).losses
    assert got == want


def test_second_ctrl_c_quits_at_once(change_batches, tmp_path):
    def ask_to_stop(first, batches):
        if first >= 8:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    change_batches(ask_to_stop)
    with pytest.raises(KeyboardInterrupt):
        train(at(small_programs()), tmp_path)
    assert saved_steps(tmp_path) == [5]


def test_signal_ends_an_evaluation(tmp_path):
    """A scheduler's grace is short, an evaluation may be long."""
    programs = at(small_programs())
    evaluate, calls = programs.eval, []

    def stop_in_evaluation(theta, batch):
        calls.append(1)
        signal.raise_signal(signal.SIGTERM)
        return evaluate(theta, batch)

    stop_in_evaluation.arguments = evaluate.arguments
    programs.eval = stop_in_evaluation
    result = train(programs, tmp_path)
    assert (result.step, result.evaluation, len(calls)) == (10, {}, 1)
    assert saved_steps(tmp_path) == [5, 10]
    assert points(tmp_path, "eval") == {}


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_evaluation_of_every_due_step_once(tmp_path, caplog, is_cut_off):
    """Also if a run ends between a save and the evaluation after it."""
    caplog.set_level(logging.INFO, logger="absl")
    run = loop.Run(model_dir=str(tmp_path), evaluate=not is_cut_off)
    loop.train_and_evaluate(at(small_programs(), num_steps=10), run)
    train(small_programs(), tmp_path, num_steps=11)
    prefixes = [line.split(":")[0] for line in caplog.messages if "held-out" in line]
    assert prefixes == ["step 10", "step 11"]


def test_run_that_is_done_only_evaluates(straight, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    want, folder = straight()
    caplog.clear()
    resume_from(folder, 20, tmp_path)
    result = train(small_programs(), tmp_path)
    assert (result.step, result.losses) == (20, {})
    assert result.evaluation == want.evaluation
    assert "tracing" not in caplog.text and "compiling" not in caplog.text


def test_evaluates_at_the_end_whatever_the_interval(tmp_path):
    result = train(small_programs(), tmp_path, num_steps=4, eval_interval=3)
    latest = loop.evaluate_latest(
        at(small_programs()), loop.Run(model_dir=str(tmp_path))
    )
    assert result.evaluation == latest


def only_restored(straight, folder, *params):
    """Starts a run that has nothing left to do."""
    run = loop.Run(model_dir=str(resume_from(straight()[1], 20, folder)))
    run = dataclasses.replace(run, evaluate=False)
    loop.train_and_evaluate(small_programs(*params), run)


@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("TextFiles.pattern = '[a-m]*.py'", "files or Python version"),
        ("TextInput.seed = 1", "TextInput.seed"),
        ("SEQUENCE_LENGTH = 16", "TextInput.sequence_length"),
        ("Experiment.global_batch = 16", "Experiment.global_batch"),
    ],
)
def test_changed_training_data_is_warned_of(straight, tmp_path, caplog, param, changed):
    only_restored(straight, tmp_path, param)
    message = (
        rf"(?s)since checkpoint step 20:\n.*training data \({changed}\): examples now "
    )
    assert re.search(f"{message}come in another order", caplog.text)


def test_the_same_training_data_is_not_warned_of(straight, tmp_path, caplog):
    only_restored(straight, tmp_path, "Experiment.seed = 1")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("table", "what", "typo", "dim"),
    [
        ("weights", "weight", "hiden", "hidden"),
        ("activations", "activation", "bacth", "batch"),
    ],
)
def test_plan_for_a_dim_that_nothing_has_is_warned_of(caplog, table, what, typo, dim):
    programs = at(small_programs())
    plan = programs.experiment.plan
    tables = {table: {**getattr(plan, table), typo: "X"}}
    programs.experiment = dataclasses.replace(
        programs.experiment, plan=dataclasses.replace(plan, **tables)
    )
    programs.check_dims_of_plan()
    assert (
        f"ShardingPlan.{table} splits dim {typo!r}, which no {what} has; do you mean "
        f"{dim}?"
    ) in caplog.text


def test_checkpoint_in_the_middle_of_a_compiled_loop(straight, tmp_path):
    train(at(small_programs()), tmp_path, num_steps=3)
    with pytest.raises(ValueError, match="from step 3 to 20 is no multiple of .* = 5"):
        train(five_steps_a_loop(), tmp_path)
    assert saved_steps(tmp_path) == [3]


def test_disk_without_space_for_a_checkpoint_is_noticed_first(
    change_batches, tmp_path, monkeypatch
):
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    change_batches(lambda first, batches: pytest.fail("training began"))
    with pytest.raises(CheckpointError, match="only 1,000 are free"):
        train(at(small_programs()), tmp_path)


def test_evaluation_without_a_checkpoint(tmp_path):
    run = loop.Run(model_dir=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="there is no checkpoint in .*none"):
        loop.evaluate_latest(at(small_programs()), run)
    assert not list(tmp_path.iterdir())


def test_that_nothing_is_held_out_is_told_before_training(tmp_path):
    task = task_of(classifier, **CROSS_ENTROPY)
    programs = programs_of(task, keras.optimizers.SGD(0.05))
    with pytest.raises(ValueError, match="held_out is not set, .* train with --mode="):
        loop.train_and_evaluate(programs, loop.Run(model_dir=str(tmp_path)))
    assert not {"main", "init", "traced_main"} & vars(programs).keys()
