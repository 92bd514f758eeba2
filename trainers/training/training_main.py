"""What meshwright-train does once TensorFlow is imported."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
import time
from typing import NoReturn

import jax

from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.compiler.xla.processes import (
    check_takes_part,
    is_first_process,
)
from meshwright.framework.sizes import number_text
from meshwright.tasks.task import Task
from meshwright.trainers import cli
from meshwright.trainers.checkpoints.checkpoint_initialize import check_is_there
from meshwright.trainers.checkpoints.checkpoints import (
    Access,
    CheckpointError,
    Checkpoints,
)
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.processes import processes
from meshwright.trainers.processes.peers import PeerError, Peers
from meshwright.trainers.startup import compile_cache, files, train_flags
from meshwright.trainers.training import evaluation, loop
from meshwright.trainers.training.start_notes import (
    start_notes,
    warn_of_no_plan,
)


def _start() -> tuple[processes.Membership | None]:
    return (processes.start(train_flags.PLATFORM.value),)


def _run(
    experiment: Experiment,
    config_text: str,
    membership: processes.Membership | None,
) -> int | None:
    mode, platform = train_flags.MODE.value, train_flags.PLATFORM.value
    devices = processes.devices_each(
        experiment.plan.mesh, membership, platform, cli.DEVICE_COUNT.value
    )
    if train_flags.DRY_RUN.value:
        set_platform(platform, devices)
        return _dry_run(experiment)
    run = loop.Run(
        model_dir=train_flags.MODEL_DIR.value,
        config=config_text,
        evaluate=train_flags.MODE.value == "train_and_eval",
        profile_steps=train_flags.profile_steps(),
        write_program=train_flags.PROGRAM_PAGE.value,
    )
    settings = "\n".join([mode, platform, run.model_dir, config_text])
    with processes.together(membership, settings) as peers:
        still = train_flags.STANDSTILL.value or None
        compile_cache.use(cli.COMPILE_CACHE.value, is_alone=membership is None)
        set_platform(platform, devices, standstill_seconds=still)
        check_takes_part(experiment.plan.mesh)
        warn_of_no_plan(experiment.plan, jax.device_count())
        processes.check_shared(run.model_dir)
        return _train_or_evaluate(experiment, run, peers)


def _dry_run(experiment: Experiment) -> None:
    check_takes_part(experiment.plan.mesh)
    programs = StepPrograms(experiment)
    programs.check_dims_of_plan()
    programs.traced_main  # noqa: B018  Traces, and raises any errors.
    weights = programs.state_specs.theta.leaves()
    count = sum(math.prod(spec.shape) for spec in weights)
    print(f"Mesh: {experiment.plan.mesh} ({experiment.partitioner.value}).")
    task = type(experiment.task).__name__
    print(f"  {task}: {len(weights)} weights, {count:,} numbers")
    batch = experiment.task.batch_spec(experiment.global_batch)
    for path, spec in batch.items_by_path():
        print(f"  batch.{path}: {spec.dtype.name} {list(spec.shape)}")
    for line in start_notes(programs):
        print(line)
    print("The training program was traced. Nothing was read, compiled or written.")


def _train_or_evaluate(
    experiment: Experiment, run: loop.Run, peers: Peers | None
) -> int | None:
    _check_has_a_start(experiment, run)
    programs = StepPrograms(experiment)
    programs.check_weights_of_plan()
    output = sys.stdout if is_first_process() else io.StringIO()
    with contextlib.redirect_stdout(output):
        mesh = experiment.plan.mesh
        print(f"Mesh: {mesh} ({experiment.partitioner.value}). Logs: {run.model_dir}")
        for name, value in experiment.task.describe_data().items():
            print(f"  {name}: {number_text(value)}")
        sys.stdout.flush()
        if train_flags.MODE.value == "eval":
            metrics = loop.evaluate_latest(programs, run, peers)
            if metrics is None:
                print("Stopped by a signal before the end of the evaluation.")
                return cli.INTERRUPTED
            print("Held-out:", evaluation.format_metrics(metrics))
            return None
        start = time.time()
        with files.leaving_none_empty(run.checkpoint_dir):  # What is refused.
            result = loop.train_and_evaluate(programs, run, peers, _leave)
        _print_result(experiment.task, result, time.time() - start)
    is_done = result.stop is None or result.step >= experiment.num_steps
    if is_done and result.stop != signal.SIGINT:
        return None
    return _status_after(result.stop)


def _status_after(stop: int) -> int:
    """The exit status of a training that a signal ended."""
    if stop == signal.SIGINT:
        return cli.INTERRUPTED
    return train_flags.STOPPED_STATUS.value


def _leave(stop: int) -> NoReturn:
    """Ends the process before its first step, whatever its main thread is doing."""
    name = signal.Signals(stop).name
    text = f"Stopped by {name} before the first step: this run trained nothing.\n"
    try:
        os.write(sys.__stdout__.fileno(), text.encode())
    finally:  # There may be no standard output.
        os._exit(_status_after(stop))


def _check_has_a_start(experiment: Experiment, run: loop.Run) -> None:
    """Checks that there are weights to start from, before data or programs are made.

    Raises:
      CheckpointError: there are none to evaluate; or those to initialize from are not
        there, and the run has no checkpoint to go on from.
    """
    source, evaluates = experiment.initialize_from, train_flags.MODE.value == "eval"
    if source is None and not evaluates:
        return
    with Checkpoints(run.checkpoint_dir, access=Access.READ) as checkpoints:
        if evaluates:
            checkpoints.existing()
        elif checkpoints.latest_step() is None:
            check_is_there(source)


def _print_result(task: Task, result: loop.TrainResult, seconds: float) -> None:
    print(_how_it_ended(result, seconds))
    if result.step in result.losses:
        loss = number_text(result.losses[result.step])
        print(f"Training loss: {loss} {task.loss_unit}".rstrip())
        if task.loss_extras:
            print(f"  with {task.loss_extras}; TensorBoard's is without")
    if result.evaluation and result.stop is None:
        print("Held-out:", evaluation.format_metrics(result.evaluation))
    model_dir = train_flags.MODEL_DIR.value
    print(f"Logs and checkpoints: {model_dir}\n  tensorboard --logdir {model_dir}")


def _how_it_ended(result: loop.TrainResult, seconds: float) -> str:
    """A sentence, or two."""
    name = result.stop and signal.Signals(result.stop).name
    if result.losses:
        how = f"Stopped by {name}: saved training" if name else "Trained"
        return f"{how} to step {result.step} in {seconds:.0f} s."
    if name:
        first = result.step + 1
        return f"Stopped by {name} before step {first}: this run trained nothing."
    return (
        f"This run trained nothing: step {result.step} is the last already. Raise "
        "Experiment.num_steps to go on."
    )


COMMAND = cli.Command(
    run=_run,
    errors=(CheckpointError, PeerError, loop.TrainingError, ImportError),
    start=_start,
)
