"""What a user sees of training: progress bar, log lines, points, bad values."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time

import numpy as np
import tqdm

from meshwright.framework.compiler.xla.processes import is_first_process, to_host
from meshwright.framework.devices.hardware import peak_flops
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sizes import number_text
from meshwright.tasks.task import metrics_of
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.not_finite import NotFinite, NotFiniteError
from meshwright.trainers.planning.tensorboard.summaries import Summaries, metric_tags
from meshwright.trainers.startup.messages import is_live, progress_bar
from meshwright.trainers.training.health import History
from meshwright.trainers.training.watchdog import Watchdog

log = logging.getLogger("absl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of the main program whose metrics have not been waited for yet."""

    last_step: int
    metrics: NestedMap


class Progress(contextlib.AbstractContextManager):
    """Follows the calls of the main program; a context, which closes the bar.

    Args:
      experiment: the experiment that is trained.
      summaries: get the points.
      start: number of updates made before.
      losses: gets the loss of each step.
      history: gets the seconds of steps, and the number of skipped steps.
      watchdog: gets the time of each call.
    """

    def __init__(
        self,
        experiment: Experiment,
        summaries: Summaries,
        start: int,
        *,
        losses: dict[int, float],
        history: History,
        watchdog: Watchdog,
    ):
        self._losses = losses
        self._experiment = experiment
        self._summaries = summaries
        self._history = history
        self._watchdog = watchdog
        self._skipped_in_a_row = 0
        self._in_flight: collections.deque[_Call] = collections.deque()
        self._peak_flops = peak_flops(experiment.plan.mesh.size)
        self._bar = progress_bar(
            experiment.num_steps,
            "training",
            initial=start,
            disable=not is_first_process(),
        )
        self._start_window()

    def __exit__(self, *exc_info) -> None:
        self._bar.close()

    def add(self, last_step: int, metrics: NestedMap) -> None:
        """Adds a call just made, whose results may be long in coming."""
        self._in_flight.append(_Call(last_step=last_step, metrics=metrics))

    def wait(self, *, in_flight: int = 0) -> None:
        """Waits for calls and reports them until only `in_flight` are left.

        Raises:
          NotFiniteError: a loss or gradient is not finite.
        """
        while len(self._in_flight) > in_flight:
            self._report(self._in_flight.popleft())

    @contextlib.contextmanager
    def pause(self, doing: str):
        """A context for doing something else, when no call is in flight."""
        self._bar.set_description_str(doing, refresh=is_live())
        self._watchdog.rest()
        before = time.perf_counter()
        yield
        self._bar.set_description_str("training", refresh=is_live())
        self._clock = time.perf_counter()
        if not self._bar.disable:  # The time to go is that of steps.
            self._bar.last_print_t += self._clock - before
        self._watchdog.resume()

    def _start_window(self) -> None:
        """Starts the window that the next point of step time and tokens/s covers."""
        self._clock, self._seconds, self._steps = time.perf_counter(), 0.0, 0

    def _report(self, call: _Call) -> None:
        metrics = call.metrics.map(to_host)  # Waits.
        experiment, steps = self._experiment, self._experiment.steps_per_loop
        before, self._clock = self._clock, time.perf_counter()
        self._seconds += self._clock - before
        self._steps += steps
        for i in range(steps):
            step = call.last_step - steps + i + 1
            self._check_finite(step, metrics.loss[i], metrics.grad_norm[i])
            self._losses[step] = float(metrics.loss[i])
        self._history.productive += self._clock - before
        self._watchdog.ended(call.last_step, self._clock - before)
        seconds = self._seconds / self._steps
        rate = experiment.task.tokens(experiment.global_batch) / seconds
        # The log says at the start what the training loss has that others have not.
        name = "training loss" if experiment.task.loss_extras else "loss"
        self._bar.set_postfix_str(
            f"{name}={number_text(metrics.loss[-1])}, "
            f"{tqdm.tqdm.format_sizeof(rate)} {experiment.task.token_name}/s",
            refresh=False,
        )
        self._bar.update(steps)
        if experiment.is_due(call.last_step, experiment.summary_interval):
            self._write_scalars(call.last_step, metrics, seconds)
            self._start_window()

    def _check_finite(self, step: int, loss: np.ndarray, grad_norm: np.ndarray) -> None:
        values = {"loss": loss, "grad_norm": grad_norm}
        bad = [name for name, value in values.items() if not np.isfinite(value)]
        if not bad:
            self._skipped_in_a_row = 0
            return
        problem = f"{bad[0]} is {values[bad[0]]} at step {step}"
        if self._experiment.not_finite is not NotFinite.SKIP:
            raise NotFiniteError(step, problem)
        self._history.skipped_steps += 1
        self._skipped_in_a_row += 1
        log.warning("%s: skipped", problem)
        if self._skipped_in_a_row > self._experiment.not_finite_limit:
            raise NotFiniteError(
                step, f"{problem}, the {self._skipped_in_a_row}th step skipped in a row"
            )

    def _write_scalars(self, step: int, metrics: NestedMap, seconds: float) -> None:
        task, batch = self._experiment.task, self._experiment.global_batch
        sums = {path: v[-1] for path, v in metrics.sums.items_by_path()}
        shown = {"loss": float(metrics.loss[-1])} | metrics_of(task, sums)
        scalars = metric_tags(shown)
        rest = {k: v for k, v in metrics.items() if k not in ("sums", "loss")}
        scalars |= {f"optimizer/{k}": float(v[-1]) for k, v in rest.items()}
        scalars |= self._history.scalars(self._experiment.not_finite)
        scalars["speed/step_time_s"] = seconds
        scalars["speed/tokens_per_s"] = task.tokens(batch) / seconds
        if self._peak_flops and task.train_flops(batch):
            rate = task.train_flops(batch) / seconds
            scalars["speed/model_flops_utilization"] = rate / self._peak_flops
        self._summaries.scalars(step, scalars)
        self._summaries.heat_maps(step, task.heat_maps(sums))
