"""Evaluation: metrics over held-out batches, and what the model says of some."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
from etils import epath

from meshwright.framework.compiler.processes import is_first_process, to_host
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.task import Decoding
from meshwright.trainers.batches import readable
from meshwright.trainers.programs import Programs
from meshwright.trainers.state import TrainState
from meshwright.trainers.stop_signals import StopRequest
from meshwright.trainers.summaries import Summaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation finds.

    Args:
      metrics: by name.
      heat_maps: see `Task.heat_maps`.
      decoding: what was decoded, if anything.
    """

    metrics: dict[str, float]
    heat_maps: dict[str, np.ndarray]
    decoding: Decoding


def evaluate(
    programs: Programs, state: TrainState, stop: StopRequest, folder: str
) -> Evaluation | None:
    """Metrics over the held-out batches, by the moving average if there is one.

    None if stopped in the middle. The folder is for files of what is decoded.
    """
    experiment = programs.experiment
    theta = state.weights()
    totals: dict[str, np.ndarray] = collections.defaultdict(float)
    rows = programs.eval.arguments.local_rows(1, dim=0)
    batches = experiment.task.eval_batches(
        global_batch=experiment.global_batch,
        rows=rows,
        max_batches=experiment.eval_batches,
    )
    for batch in readable(batches):
        if stop.reached():
            return None
        values = NestedMap(batch).map(lambda t: t.numpy())
        placed = programs.eval.arguments.shard_rows(1, values, rows, dim=0)
        for path, value in programs.eval(theta, placed).items_by_path():
            totals[path] += to_host(value).astype(np.float64)
    task, decoding = experiment.task, Decoding(metrics={})
    metrics = task.metrics(totals)
    if experiment.decode_batches != 0:
        decoding = _decode(programs, theta, stop, folder)
        if decoding is None:
            return None
    return Evaluation(
        metrics=metrics | decoding.metrics,
        heat_maps=task.heat_maps(totals),
        decoding=decoding,
    )


class _StoppedError(Exception):
    """The run is to end; raised through what decodes."""


def _decode(
    programs: Programs, theta: NestedMap, stop: StopRequest, folder: str
) -> Decoding | None:
    """What the model says of held-out examples; None if stopped in the middle.

    The folder gets the task's files when all are there.
    """
    experiment = programs.experiment

    def pairs() -> Iterator[tuple[NestedMap, NestedMap]]:
        batches = experiment.task.decode_batches(
            global_batch=experiment.global_batch, max_batches=experiment.decode_batches
        )
        for batch in readable(batches):
            if stop.reached():
                raise _StoppedError
            yield batch, programs.decode(theta, batch).map(to_host)

    with tempfile.TemporaryDirectory(prefix="predictions") as scratch:
        try:
            found = experiment.task.decoded(pairs(), pathlib.Path(scratch))
        except _StoppedError:
            return None
        if is_first_process():
            _copy(pathlib.Path(scratch), epath.Path(folder))
    return found


def _copy(files: pathlib.Path, folder: epath.Path) -> None:
    for file in files.iterdir():
        folder.mkdir(parents=True, exist_ok=True)
        epath.Path(file).copy(folder / file.name, overwrite=True)


def summarize(summaries: Summaries, step: int, found: Evaluation) -> None:
    summaries.scalars(step, found.metrics)
    summaries.heat_maps(step, found.heat_maps)
    summaries.pictures(step, found.decoding.pictures)
    if found.decoding.samples:
        summaries.text(step, "samples", found.decoding.samples)
    summaries.note_complete(step)


def format_metrics(metrics: dict[str, float]) -> str:
    """`name value` pairs on one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
