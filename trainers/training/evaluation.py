"""Evaluation: metrics over held-out batches, and the model's predictions for some."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np
from etils import epath

from meshwright.framework.compiler.xla.processes import is_first_process, to_host
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sizes import number_text
from meshwright.tasks.task import DecodeResult, metrics_of
from meshwright.trainers.experiment.batches import eval_batches, readable
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.tensorboard.summaries import Summaries, metric_tags
from meshwright.trainers.training.stop_signals import StopRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of an evaluation.

    Args:
      metrics: by name.
      heat_maps: see `Task.heat_maps`.
      decoding: the decoded examples' scores, empty if none were decoded.
    """

    metrics: dict[str, float]
    heat_maps: dict[str, np.ndarray]
    decoding: DecodeResult


def check_held_out(experiment: Experiment) -> None:
    """Asks the task for held-out batches, and reads none.

    Raises:
      ValueError: there are no held-out examples.
    """
    rows = experiment.global_batch
    experiment.task.eval_batches(
        global_batch=rows, rows=range(rows), max_batches=experiment.eval_batches
    )


def evaluate(
    programs: StepPrograms, state: TrainState, stop: StopRequest, folder: str
) -> Evaluation | None:
    """Metrics over the held-out batches, by the moving average if there is one.

    None if stopped in the middle. The folder is for files of decoded examples.
    """
    experiment, task = programs.experiment, programs.experiment.task
    theta = state.weights()
    rows = programs.eval.arguments.local_rows(1, dim=0)
    batches = eval_batches(experiment, rows, experiment.eval_batches)
    decoding = DecodeResult(metrics={})
    try:
        totals = sums_over(programs, theta, _until_stopped(batches, stop), rows)
        if experiment.decode_batches != 0:
            decoding = _decode(programs, theta, stop, folder)
    except _StoppedError:
        return None
    return Evaluation(
        metrics=metrics_of(task, totals) | decoding.metrics,
        heat_maps=task.heat_maps(totals),
        decoding=decoding,
    )


def sums_over(
    programs: StepPrograms, theta: NestedMap, batches: Iterable[NestedMap], rows: range
) -> dict[str, np.ndarray]:
    """Totals over batches of the evaluation program's sums, float64, by path.

    Args:
      programs: the experiment's programs.
      theta: weights as `TrainState.weights` returns them.
      batches: NumPy arrays, these rows of the global batch.
      rows: see `Arguments.local_rows`.
    """
    totals: dict[str, np.ndarray] = collections.defaultdict(float)
    for batch in batches:
        placed = programs.eval.arguments.shard_rows(1, batch, rows, dim=0)
        for path, value in programs.eval(theta, placed).items_by_path():
            totals[path] += to_host(value).astype(np.float64)
    return totals


class _StoppedError(Exception):
    """The run is to end; raised through evaluation or decoding."""


def _until_stopped(
    batches: Iterable[NestedMap], stop: StopRequest
) -> Iterator[NestedMap]:
    for batch in batches:
        if stop.reached():
            raise _StoppedError
        yield batch


def _decode(
    programs: StepPrograms, theta: NestedMap, stop: StopRequest, folder: str
) -> DecodeResult:
    """The scores of the model's predictions for held-out examples.

    The folder gets the task's files once all are written.
    """
    experiment = programs.experiment
    decoding = experiment.task.decoding
    batches = decoding.batches(
        global_batch=experiment.global_batch, max_batches=experiment.decode_batches
    )
    pairs = (
        (batch, programs.decode(theta, batch).map(to_host))
        for batch in _until_stopped(readable(batches), stop)
    )
    with tempfile.TemporaryDirectory(prefix="predictions") as scratch:
        result = decoding.score(pairs, pathlib.Path(scratch))
        if is_first_process():
            _copy(pathlib.Path(scratch), epath.Path(folder))
    return result


def _copy(files: pathlib.Path, folder: epath.Path) -> None:
    for file in files.iterdir():
        folder.mkdir(parents=True, exist_ok=True)
        epath.Path(file).copy(folder / file.name, overwrite=True)


def summarize(summaries: Summaries, step: int, evaluation: Evaluation) -> None:
    summaries.scalars(step, metric_tags(evaluation.metrics))
    summaries.heat_maps(step, evaluation.heat_maps)
    summaries.pictures(step, evaluation.decoding.pictures)
    if evaluation.decoding.samples:
        summaries.text(step, "samples", evaluation.decoding.samples)
    summaries.note_complete(step)


def format_metrics(metrics: dict[str, float]) -> str:
    """`name value` pairs on one line."""
    return ", ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
