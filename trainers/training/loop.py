"""The training loop, and evaluation.

Read top to bottom: the main calls `train_and_evaluate` and `evaluate_latest`. Steps
count from 1: step n makes the n-th update, and checkpoint n holds its result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable

import jax

from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.xla.processes import to_host
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import Resume
from meshwright.trainers.checkpoints.checkpoint_initialize import (
    weights_from,
    with_weights,
)
from meshwright.trainers.checkpoints.checkpoints import Access, Checkpoints
from meshwright.trainers.checkpoints.trained_files import write_files
from meshwright.trainers.experiment import replication
from meshwright.trainers.experiment.batches import CallBatches, check_first
from meshwright.trainers.experiment.not_finite import NotFinite, NotFiniteError
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.tensorboard.summaries import Summaries
from meshwright.trainers.processes.peers import Peers
from meshwright.trainers.startup.messages import log_line
from meshwright.trainers.training.evaluation import (
    check_held_out,
    evaluate,
    format_metrics,
    summarize,
)
from meshwright.trainers.training.health import History
from meshwright.trainers.training.program_report import ProgramWriter
from meshwright.trainers.training.progress import Progress
from meshwright.trainers.training.saved_config import (
    note_changes,
    row_shapes,
    warn_of_other_rows,
    write_hyperparameters,
)
from meshwright.trainers.training.start_notes import start_notes, trace
from meshwright.trainers.training.step_histograms import write_histograms
from meshwright.trainers.training.step_profile import StepProfile
from meshwright.trainers.training.stop_signals import StopRequest, stop_on_signals
from meshwright.trainers.training.watchdog import Watchdog

log = logging.getLogger("absl")

_PAGE_SECONDS = 1.0
"""What a stop waits for the page to be abandoned, which slows saving if it is not."""


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
      write_program: whether to leave the plan and the page of the program for
        TensorBoard.
    """

    model_dir: str
    config: str = ""
    evaluate: bool = True
    profile_steps: tuple[int, int] | None = None
    write_program: bool = False

    @property
    def checkpoint_dir(self) -> str:
        return os.path.join(self.model_dir, "checkpoints")

    def predictions_dir(self, step: int) -> str:
        """The folder for files of the model's predictions for held-out examples."""
        return os.path.join(self.model_dir, "predictions", f"step_{step}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How training ended.

    Args:
      step: updates made, over all runs; the newest checkpoint holds them.
      stop: number of the signal that ended it early, or None.
      losses: the loss of each step of this run, by step.
      evaluation: metrics of the last evaluation, empty if there was none.
    """

    step: int
    stop: int | None
    losses: dict[int, float]
    evaluation: dict[str, float]


def train_and_evaluate(
    programs: StepPrograms,
    run: Run,
    peers: Peers | None = None,
    leave: Callable[[int], object] | None = None,
) -> TrainResult:
    """Trains from the newest checkpoint in the run's folder, or from the start.

    SIGTERM or Ctrl-C ends training after the call under way, and saves its state; of
    several processes all `peers` call this, and stop after the same step. Before the
    first step `leave` is called with the signal, if it is given and there are no
    `peers`, to end the process.

    Raises:
      TrainingError: a loss, gradient or weight is not finite; the state is not saved.
      CheckpointError: see `Checkpoints`.
      OSError: there is no data, or a folder cannot be written.
      ReplicationError: more is left replicated than the experiment's budget.
      ValueError: the checkpoint's step does not fit with `steps_per_loop`.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(peers, leave))
        keep = programs.experiment.keep_checkpoints
        how = {"orders": programs.layer_orders, "config": run.config}
        checkpoints = Checkpoints(run.checkpoint_dir, max_to_keep=keep, **how)
        loop = _Loop(programs, run, stack.enter_context(checkpoints), stop)
        return loop.run_to_end()


def evaluate_latest(
    programs: StepPrograms, run: Run, peers: Peers | None = None
) -> dict[str, float] | None:
    """Evaluates the newest checkpoint; writes summaries, and the task's predictions.

    None if a signal stopped the evaluation early; of several processes all `peers` call
    this.

    Raises:
      CheckpointError: there is none, or see `Checkpoints.restore`.
      OSError: there is no data, or a folder cannot be written.
    """
    how = {"orders": programs.layer_orders, "config": run.config}
    with Checkpoints(run.checkpoint_dir, access=Access.READ, **how) as checkpoints:
        abstract = TrainState.abstract(programs)
        state = TrainState(programs, checkpoints.restore(None, abstract))
        warn_of_other_rows(programs.experiment.task, checkpoints.metadata(state.step))
    log_line("evaluating step %d", state.step)
    with stop_on_signals(peers) as stop:
        evaluation = evaluate(programs, state, stop, run.predictions_dir(state.step))
    if evaluation is None:
        return None
    with contextlib.closing(Summaries(run.model_dir, "eval")) as summaries:
        summarize(summaries, state.step, evaluation)
    return evaluation.metrics


class _Loop:
    """One run of the training loop."""

    def __init__(
        self,
        programs: StepPrograms,
        run: Run,
        checkpoints: Checkpoints,
        stop: StopRequest,
    ):
        self.programs = programs
        self.experiment, self.run = programs.experiment, run
        self.checkpoints = checkpoints
        self.stop = stop
        self.fingerprint = {
            "Experiment.global_batch": self.experiment.global_batch,
            **self.experiment.task.data_fingerprint(),
        }
        self.profile = StepProfile(run.model_dir, run.profile_steps)
        self.program_writer = ProgramWriter(run.model_dir, run.config, stop)
        self.losses: dict[int, float] = {}
        self.evaluation: dict[str, float] = {}
        self.evaluated_step: int | None = None
        self.history = History()
        self.roll_backs_since_save = 0
        self.calls: CallBatches | None = None
        self.saved_input: NestedMap | None = None
        self.taken: dict[str, jax.Array] = {}

    def run_to_end(self) -> TrainResult:
        if self.run.evaluate:
            check_held_out(self.experiment)
        self.checkpoints.check_newest(TrainState.abstract(self.programs))
        self.taken = self._taken()  # Those that do not fit are refused at once.
        replicated, most = None, self.experiment.num_steps
        if (self.checkpoints.latest_step() or 0) < most:
            replicated = self._traced()
        state, folder = self._restored_or_initial(), self.run.model_dir
        if replicated is None and state.step < most:  # The newest is damaged.
            replicated = self._traced()
        # From here on the folder is this experiment's, to be written to.
        write_files(folder, self.experiment.task.trained_files())
        with (
            contextlib.closing(Summaries(folder, "train")) as self.summaries,
            contextlib.closing(Summaries(folder, "eval")) as self.eval_summaries,
            contextlib.closing(self.profile),
            contextlib.closing(self.program_writer),
        ):
            return self._run_from(state, replicated)

    def _run_from(self, state: TrainState, replicated: str | None) -> TrainResult:
        """Trains from a state; `replicated` is None if all its steps are made."""
        step = state.step
        self.summaries.gin_config(step, self.run.config)
        if self.run.config:
            write_hyperparameters(self.run.model_dir, self.run.config)
        if replicated is None:
            self.stop.leave = None  # All is trained, whatever stops the evaluation.
        else:
            self.summaries.text(step, "left replicated", replicated)
            self._report_updates(step)
        if step < self.experiment.num_steps and not self.stop.reached():
            step = self._train(state, step)
        self.stop.has_steps = False  # They are saved.
        self._evaluate(step, state)
        self.checkpoints.wait()
        return TrainResult(
            step=step,
            stop=self.stop.signal,
            losses=self.losses,
            evaluation=self.evaluation,
        )

    def _report_updates(self, step: int) -> None:
        """Logs which weight updates are sharded."""
        updates = self.programs.traced_main.updates
        if updates is not None:
            log_line("%s", updates.summary())
            self.summaries.text(step, "weight-update sharding", updates.text())
        elif self.experiment.weight_update_sharding is WeightUpdateSharding.ALL:
            log_line(
                "weight-update sharding (all): none, as no mesh axis splits the batch"
            )

    def _train(self, state: TrainState, step: int) -> int:
        """Trains from `step` on and saves; returns the last step."""
        experiment, steps = self.experiment, self.experiment.steps_per_loop
        if (experiment.num_steps - step) % steps:
            raise ValueError(
                f"from step {step} to {experiment.num_steps} is no multiple of "
                f"Experiment.steps_per_loop = {steps}: set it to 1 or to the value "
                "that the checkpoint was trained with"
            )
        self.profile.warn_unless_within(step + 1, experiment.num_steps)
        size = sum(s.size * s.dtype.size for s in self.programs.state_specs.leaves())
        self.checkpoints.check_space(experiment.num_steps, size)
        if experiment.task.input.resume is Resume.STATE:
            self._restore_input(step)  # It may refuse to, which compiling would delay.
        main = self._compiled_main()
        if self.stop.reached():
            return step
        self._make_up_for_evaluation(step, state)
        watchdog = Watchdog(
            os.path.join(self.run.model_dir, "stacks"), experiment.slow_step_factor
        )
        with watchdog:
            while True:
                try:
                    return self._make_steps(main, state, step, watchdog)
                except NotFiniteError as error:
                    watchdog.rest()
                    step = self._rolled_back(state, error)

    def _make_steps(self, main, state: TrainState, step: int, watchdog) -> int:
        """Trains from `step` on and saves; returns the last step."""
        experiment, steps = self.experiment, self.experiment.steps_per_loop
        self._find_batches(step)
        saved_step = step
        with Progress(
            experiment,
            self.summaries,
            step,
            losses=self.losses,
            history=self.history,
            watchdog=watchdog,
        ) as progress:
            while step < experiment.num_steps:
                # Read before this process's arrival, so that the others see who is
                # late.
                batches = next(self.calls)
                if self.stop.reached():
                    self.program_writer.close(_PAGE_SECONDS)
                    self.calls.put_back()
                    break
                batches = main.arguments.shard_rows(1, batches, self.rows, dim=1)
                if experiment.is_due(step + steps, experiment.histogram_interval):
                    progress.wait()
                    with progress.pause("counting for histograms"):
                        write_histograms(self.programs, self.summaries, state, batches)
                if self.profile.starts_in(step + 1, step + steps):
                    progress.wait()
                    self.profile.start()
                self.stop.leave = None
                with self.profile.call(step + 1):
                    out = main(state.stored(), batches)
                state.update(out["state"])
                step += steps
                self.stop.has_steps = True
                progress.add(step, out["metrics"])
                # One call stays in flight, so that devices need not wait for Python.
                progress.wait(in_flight=1)
                if self.profile.ends_by(step):
                    progress.wait()
                    with progress.pause("writing the trace"):
                        self.profile.close()
                if experiment.is_due(step, experiment.checkpoint_interval):
                    progress.wait()
                    with progress.pause("saving"):
                        self._save(step, state)
                    saved_step = step
                if experiment.is_due(step, experiment.eval_interval):
                    progress.wait()
                    with progress.pause("evaluating"):
                        self._evaluate(step, state)
            progress.wait()
            if step > saved_step:
                with progress.pause("saving"):
                    self._save(step, state)
        return step

    def _restore_input(self, step: int) -> None:
        """Brings the input to where it was after `step`, for all rows."""
        passed = step + self.history.batches_passed
        if step and self.saved_input is None:
            log.warning(
                "checkpoint step %d has no state of the input: reads %d batches and "
                "skips them",
                step,
                passed,
            )
        rows = range(self.experiment.global_batch)
        self.calls = CallBatches(self.experiment, passed, rows, self.saved_input)

    def _find_batches(self, step: int) -> None:
        """Finds the batches of the steps after `step`."""
        self.rows = self.programs.main.arguments.local_rows(1, dim=1)
        if self.experiment.task.input.resume is Resume.STATE:
            self.calls.give(self.rows)  # After a roll back too: what comes next.
        else:
            passed = step + self.history.batches_passed
            self.calls = CallBatches(self.experiment, passed, self.rows)

    def _compiled_main(self):
        size = self.experiment.plan.mesh.size
        log_line("compiling for %d device%s", size, "" if size == 1 else "s")
        start = time.perf_counter()
        main = self.programs.main
        seconds, megabytes = time.perf_counter() - start, main.memory().peak / 1e6
        log_line("compiled in %.0f s; takes %.1f MB on each device", seconds, megabytes)
        if self.run.write_program:
            self.program_writer.start(self.programs, seconds)
        replication.check_activations(
            self.programs, main, self.experiment.replicated_budget
        )
        if self.experiment.histogram_interval:
            log_line("compiling the program of histograms")
            _ = self.programs.histograms  # Before the steps, in case it does not fit.
        return main

    def _traced(self) -> str:
        """Traces `main`; returns a report on what of state and batch is replicated."""
        notes = check_first(self.experiment)
        trace(self.programs)
        tensors = replication.replicated_state(self.programs)
        lines = replication.report_lines(self.programs, tensors)
        for line in [*notes, *start_notes(self.programs), *lines]:
            log_line("%s", line)
        replication.check_budget(tensors, self.experiment.replicated_budget)
        return replication.report_text(tensors)

    def _restored_or_initial(self) -> TrainState:
        step = self.checkpoints.latest_step()
        if step is None:
            log_line("initializing weights")
            state = TrainState.initial(self.programs).logical()
            state, self.taken = with_weights(state, self.taken), {}
            return TrainState(self.programs, state)
        log_line("restoring step %d from %s", step, self.run.checkpoint_dir)
        abstract = TrainState.abstract(self.programs)
        # Restores an earlier step if that step is damaged.
        state = TrainState(self.programs, self.checkpoints.restore(None, abstract))
        metadata = self.checkpoints.metadata(state.step)
        task = self.experiment.task
        note_changes(state.step, metadata, self.fingerprint, self.run.config, task)
        self.history = History.of(metadata)
        if task.input.resume is Resume.STATE:
            self.saved_input = self.checkpoints.input_state(state.step)
        return state

    def _taken(self) -> dict[str, jax.Array]:
        """Weights of another model to start from, if there is nothing to go on from."""
        source, programs = self.experiment.initialize_from, self.programs
        if source is None or self.checkpoints.latest_step() is not None:
            return {}
        theta, orders = TrainState.abstract(programs).theta, programs.layer_orders
        return weights_from(source, theta, self.experiment.task, orders=orders)

    def _save(self, step: int, state: TrainState) -> None:
        """Saves the state in the background, or raises if it is not finite."""
        finite = to_host(self.programs.finite(state.stored()))
        paths = [path for path, _ in self.programs.state_specs.items_by_path()]
        bad = [path for path, good in zip(paths, finite, strict=True) if not good]
        if bad:
            raise NotFiniteError(
                step,
                f"after step {step}, {len(bad)} parts of the state are not finite, "
                f"among them {bad[-1]}",
            )
        metadata = {"config": self.run.config, "batches": self.fingerprint}
        metadata |= row_shapes(self.experiment.task) | self.history.metadata()
        saved_input = None
        if self.calls is not None:
            self.calls.check_same()
            if self.experiment.task.input.resume is Resume.STATE:
                saved_input = self.calls.state()
        self.checkpoints.save(
            step, state.logical(), metadata=metadata, input_state=saved_input
        )
        self.roll_backs_since_save = 0

    def _rolled_back(self, state: TrainState, error: NotFiniteError) -> int:
        """Goes back to the newest checkpoint; returns its step.

        Raises:
          TrainingError: the experiment does not roll back, or has done so too often.
        """
        is_first = self.checkpoints.latest_step() is None
        self.roll_backs_since_save += 1
        is_too_often = self.roll_backs_since_save > self.experiment.not_finite_limit
        if self.experiment.not_finite is not NotFinite.ROLL_BACK:
            raise self._explained(error) from None
        if is_first or is_too_often:
            why = "too early" if is_first else "after too many roll backs"
            raise self._explained(error, f" {why}") from None
        state.drop()
        abstract = TrainState.abstract(self.programs)
        state.replace(self.checkpoints.restore(None, abstract))
        saved, gone = state.step, self.history
        log.warning("%s: rolled back to step %d", error, saved)
        self.history = dataclasses.replace(
            History.of(self.checkpoints.metadata(saved)),
            batches_passed=gone.batches_passed + error.step - saved,
            roll_backs=gone.roll_backs + 1,
        )
        self.losses = {s: loss for s, loss in self.losses.items() if s <= saved}
        self.summaries.go_back()
        self.eval_summaries.go_back()
        self.eval_summaries.note_complete(0)
        self.evaluated_step = None
        return saved

    def _make_up_for_evaluation(self, step: int, state: TrainState) -> None:
        """Evaluates if an earlier run ended between saving `step` and evaluating it."""
        is_due = self.experiment.is_due(step, self.experiment.eval_interval)
        if is_due and self.eval_summaries.complete_step() < step:
            self._evaluate(step, state)

    def _evaluate(self, step: int, state: TrainState) -> None:
        if self.evaluated_step == step or not self.run.evaluate or self.stop.reached():
            return
        folder = self.run.predictions_dir(step)
        evaluation = evaluate(self.programs, state, self.stop, folder)
        if evaluation is None:
            return
        self.evaluation, self.evaluated_step = evaluation.metrics, step
        summarize(self.eval_summaries, step, evaluation)
        log_line("step %d: held-out %s", step, format_metrics(evaluation.metrics))

    def _explained(self, error: NotFiniteError, when: str = "") -> TrainingError:
        steps = ", ".join(map(str, self.checkpoints.steps()))
        kept, again = "nothing was saved before", ""
        if steps:
            kept = f"checkpoint {steps} is kept in {self.run.checkpoint_dir}"
            again = ", and run again to go on from the newest checkpoint"
        optimizer, clip = self.experiment.optimizer, ""
        if optimizer.clip_global_norm is None:
            clip = f" set {type(optimizer).__name__}.clip_global_norm,"
        return TrainingError(
            f"{error}{when}; {kept}. Lower the learning rate,{clip} or check the "
            f"data{again}"
        )
