"""The training loop, and evaluation.

Read top to bottom: `train_and_evaluate` and `evaluate_latest` are what the main calls.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
import tensorflow as tf
import tqdm

from meshwright.framework.compiler.devices import peak_flops
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints import Access, CheckpointError, Checkpoints
from meshwright.trainers.experiment import Experiment
from meshwright.trainers.programs import Programs
from meshwright.trainers.state import TrainState
from meshwright.trainers.summaries import Summaries

log = logging.getLogger("absl")


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and what is kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how an experiment is run.

    Args:
      model_dir: folder of checkpoints and summaries.
      config: the operative gin configuration as text; "" if not built by gin.
      evaluate: whether training evaluates, at the experiment's interval and at the end.
      profile_steps: (first, last) step to trace, or None.
    """

    model_dir: str
    config: str = ""
    evaluate: bool = True
    profile_steps: tuple[int, int] | None = None

    @property
    def checkpoint_dir(self) -> str:
        return os.path.join(self.model_dir, "checkpoints")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How training ended.

    Args:
      step: updates made.
      stopped: whether a signal ended it early; the state is saved.
      losses: the loss at each step of this run, by step number.
      evaluation: metrics of the last evaluation, empty if there was none.
    """

    step: int
    stopped: bool
    losses: dict[int, float]
    evaluation: dict[str, float]


def train_and_evaluate(experiment: Experiment, run: Run) -> TrainResult:
    """Trains from the newest checkpoint in the run's folder, or from the start.

    Raises:
      TrainingError: the loss or gradients are not finite.
      CheckpointError: see `Checkpoints`.
      OSError: no data, or a folder that cannot be written.
    """
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(run.checkpoint_dir, max_to_keep=experiment.keep_checkpoints)
        )
        loop = _Loop(experiment, run, checkpoints)
        stack.callback(loop.close)
        return loop.run_to_end()


def evaluate_latest(experiment: Experiment, run: Run) -> dict[str, float]:
    """Evaluates the newest checkpoint; writes nothing but summaries."""
    programs = Programs(experiment)
    with Checkpoints(run.checkpoint_dir, access=Access.READ) as checkpoints:
        state = TrainState(
            programs, checkpoints.restore(None, TrainState.abstract(programs))
        )
    metrics = _evaluate(programs, state.stored())
    summaries = Summaries(run.model_dir, "eval")
    summaries.scalars(state.step, metrics)
    summaries.close()
    return metrics


class _Loop:
    """One run of the training loop."""

    def __init__(self, experiment: Experiment, run: Run, checkpoints: Checkpoints):
        self.experiment = experiment
        self.run = run
        self.checkpoints = checkpoints
        self.programs = Programs(experiment)
        self.summaries = Summaries(run.model_dir, "train")
        self.eval_summaries = Summaries(run.model_dir, "eval")
        self.losses: dict[int, float] = {}
        self.evaluation: dict[str, float] = {}
        self.saved_step: int | None = None
        self.peak_flops = peak_flops(experiment.plan.mesh.size)

    def close(self) -> None:
        self.summaries.close()
        self.eval_summaries.close()

    def run_to_end(self) -> TrainResult:
        experiment = self.experiment
        self.fingerprint = experiment.task.data_fingerprint()
        state = self._restored_or_initial()
        start = step = state.step
        if (experiment.num_steps - start) % experiment.steps_per_loop:
            raise ValueError(
                f"from step {start} to {experiment.num_steps} is no multiple of "
                f"Experiment.steps_per_loop = {experiment.steps_per_loop}: set it to 1 "
                "or to the value that the checkpoint was trained with"
            )
        self.summaries.gin_config(step, self.run.config)
        main = self.programs.main
        memory = main.memory()
        log.info("train program: %.1f MB a device", memory.peak / 1e6)
        calls = _device_batches(self.programs, start)
        pending: collections.deque[_Call] = collections.deque()
        progress = _progress_bar(start, experiment.num_steps)
        profile = _Profile(self.run, experiment.steps_per_loop)
        with _termination_signal() as stop, progress as bar:
            clock = time.perf_counter()
            while step < experiment.num_steps and not stop.requested:
                profile.before(step)
                out = main(state.stored(), next(calls))
                state.update(out["state"])
                step += experiment.steps_per_loop
                pending.append(_Call(last_step=step, metrics=out["metrics"]))
                profile.after(step, out["metrics"])
                at_rest = self._is_due(step, experiment.checkpoint_interval) or (
                    self._is_due(step, experiment.eval_interval)
                )
                # One call stays in flight, so that devices need not wait for Python.
                while len(pending) > (0 if at_rest else 1):
                    clock = self._report(pending.popleft(), clock, bar)
                if self._is_due(step, experiment.checkpoint_interval):
                    self._save(step, state)
                if self._is_due(step, experiment.eval_interval):
                    self._evaluate(step, state, bar)
                if at_rest:
                    clock = time.perf_counter()
            while pending:
                clock = self._report(pending.popleft(), clock, bar)
        profile.close()
        self._save(step, state)
        if not stop.requested and self.run.evaluate and not self.evaluation:
            self._evaluate(step, state, None)
        self.checkpoints.wait()
        return TrainResult(
            step=step,
            stopped=stop.requested,
            losses=self.losses,
            evaluation=self.evaluation,
        )

    def _is_due(self, step: int, interval: int) -> bool:
        return interval > 0 and step % interval == 0

    def _restored_or_initial(self) -> TrainState:
        step = self.checkpoints.latest_step()
        if step is None:
            return TrainState.initial(self.programs)
        before = self.checkpoints.metadata(step).get("data", "")
        if before != self.fingerprint:
            log.warning(
                "the training data is not what checkpoint step %d was trained on "
                "(files or Python version changed): the order of examples changes",
                step,
            )
        log.info("restoring step %d from %s", step, self.run.checkpoint_dir)
        self.saved_step = step
        abstract = TrainState.abstract(self.programs)
        return TrainState(self.programs, self.checkpoints.restore(step, abstract))

    def _save(self, step: int, state: TrainState) -> None:
        if step != self.saved_step:
            metadata = {"config": self.run.config, "data": self.fingerprint}
            self.checkpoints.save(step, state.logical(), metadata=metadata)
            self.saved_step = step

    def _evaluate(self, step: int, state: TrainState, bar) -> None:
        if not self.run.evaluate:
            return
        if bar is not None:
            bar.set_description(f"evaluating at step {step}")
        self.evaluation = _evaluate(self.programs, state.stored())
        self.eval_summaries.scalars(step, self.evaluation)
        self.eval_summaries.flush()
        with tqdm.tqdm.external_write_mode(file=sys.stderr):
            log.info("step %d: held-out %s", step, format_metrics(self.evaluation))

    def _report(self, call: _Call, clock: float, bar: tqdm.tqdm) -> float:
        """Waits for a call's metrics, checks and shows them; returns the time."""
        metrics = call.metrics.map(np.asarray)
        now = time.perf_counter()
        steps = self.experiment.steps_per_loop
        first = call.last_step - steps
        for i in range(steps):
            self._check_finite(first + i, metrics.map(lambda m, i=i: float(m[i])))
            self.losses[first + i] = float(metrics.loss[i])
        seconds = (now - clock) / steps
        if self._is_due(call.last_step, self.experiment.summary_interval):
            self._write_scalars(call.last_step, metrics, seconds)
        bar.set_description("training")
        bar.set_postfix(
            loss=f"{metrics.loss[-1]:.3f}",
            tokens_s=f"{self.experiment.task.tokens(self._batch) / seconds:,.0f}",
        )
        bar.update(steps)
        return now

    @property
    def _batch(self) -> int:
        return self.experiment.global_batch

    def _write_scalars(self, step: int, metrics: NestedMap, seconds: float) -> None:
        task = self.experiment.task
        scalars = {k: float(v[-1]) for k, v in metrics.items() if k != "sums"}
        sums = {k: float(v[-1]) for k, v in metrics.sums.items()}
        scalars.update(task.metrics(sums))
        scalars["step_time_s"] = seconds
        scalars["tokens_per_s"] = task.tokens(self._batch) / seconds
        if self.peak_flops:
            rate = task.train_flops(self._batch) / seconds
            scalars["model_flops_utilization"] = rate / self.peak_flops
        self.summaries.scalars(step, scalars)
        self.summaries.flush()

    def _check_finite(self, step: int, metrics: NestedMap) -> None:
        for name in ("loss", "grad_norm"):
            if not np.isfinite(metrics[name]):
                kept = self.checkpoints.latest_step()
                good = "no checkpoint was saved before it"
                if kept is not None:
                    good = (
                        f"checkpoint step {kept} in {self.run.checkpoint_dir} is good"
                    )
                raise TrainingError(
                    f"{name} is {metrics[name]} at step {step}; {good}. Lower the "
                    "learning rate, set clip_global_norm, or check the data, and run "
                    "again to go on from there"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of the main program whose metrics nobody has waited for yet."""

    last_step: int
    metrics: NestedMap


def _evaluate(programs: Programs, stored: NestedMap) -> dict[str, float]:
    """Metrics over the held-out batches, by the moving average if there is one."""
    experiment = programs.experiment
    theta = stored.get("ema", stored.theta)
    totals: dict[str, float] = collections.defaultdict(float)
    batches = experiment.task.eval_batches(
        global_batch=experiment.global_batch,
        rows=range(experiment.global_batch),
        max_batches=experiment.eval_batches,
    )
    for batch in batches:
        sums = programs.eval(theta, NestedMap(batch).map(lambda t: t.numpy()))
        for name, value in sums.items():
            totals[name] += float(value)
    return experiment.task.metrics(totals)


def _device_batches(programs: Programs, start_step: int) -> Iterator[NestedMap]:
    """Batches for one call of the main program after another."""
    experiment = programs.experiment
    batches = experiment.task.train_batches(
        start_step,
        global_batch=experiment.global_batch,
        rows=range(experiment.global_batch),
    )
    for stacked in batches.batch(experiment.steps_per_loop, drop_remainder=True):
        yield NestedMap(stacked).map(lambda t: t.numpy())


def format_metrics(metrics: dict[str, float]) -> str:
    """`name value` pairs on one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _progress_bar(start: int, total: int) -> tqdm.tqdm:
    # A log file gets a line now and then; a terminal a live bar.
    interval = 0.5 if sys.stderr.isatty() else 15.0
    return tqdm.tqdm(
        initial=start,
        total=total,
        unit="step",
        desc="compiling",
        mininterval=interval,
        dynamic_ncols=True,
    )


class _StopFlag:
    requested = False


@contextlib.contextmanager
def _termination_signal() -> Iterator[_StopFlag]:
    """Turns SIGTERM into a flag, so that the loop can save and leave cleanly."""
    flag = _StopFlag()

    def on_signal(signum, frame):
        flag.requested = True

    try:
        before = signal.signal(signal.SIGTERM, on_signal)
    except ValueError:  # Not in the main thread: the caller handles signals.
        yield flag
        return
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)


class _Profile:
    """Traces the calls that cover the asked-for steps, for xprof to open."""

    def __init__(self, run: Run, steps_per_loop: int):
        self._run = run
        self._steps_per_loop = steps_per_loop
        self._tracing = False

    def before(self, step: int) -> None:
        wanted = self._run.profile_steps
        if wanted and not self._tracing and wanted[0] < step + self._steps_per_loop:
            if step <= wanted[1]:
                jax.profiler.start_trace(self._run.model_dir)
                self._tracing = True

    def after(self, step: int, metrics: NestedMap) -> None:
        if self._tracing and step > self._run.profile_steps[1]:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
            self._run = dataclasses.replace(self._run, profile_steps=None)
