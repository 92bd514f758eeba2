"""What a configuration's text says: for tables, and to note what has changed."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.task import Task
from meshwright.trainers.planning.tensorboard.summaries import Summaries
from meshwright.trainers.startup.gin_text import (
    is_rounds_of_pipeline,
    parameters,
    shown,
)
from meshwright.trainers.startup.messages import log_line

log = logging.getLogger("absl")

_MOST_SHOWN = 10
_ROWS = "rows"
_SET_ROWS = (
    "set SOURCE_LENGTH, TARGET_LENGTH, SEQUENCE_LENGTH or the like to those of the\n"
    "  training, unless the model is meant to read others"
)


def hyperparameters(text: str) -> dict[str, bool | float | str]:
    """The parameters as TensorBoard's HParams table takes them: numbers and texts."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) else repr(value)
        for name, value in parameters(text).items()
    }


def changes(before: str, now: str) -> str:
    """The differences of two configurations, on one line; "" if there are none."""
    return _differences(parameters(before), parameters(now))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    differ = [
        f"{name}: {shown(old, name)} -> {shown(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if shown(old, name) != shown(new, name)
    ]
    more = len(differ) - _MOST_SHOWN
    rest = [f"and {more} more"] if more > 0 else []
    return "; ".join([*differ[:_MOST_SHOWN], *rest])


def note_changes(
    step: int,
    saved: Mapping[str, Any],
    batches: Mapping[str, Any],
    config: str,
    task: Task,
) -> None:
    """Logs, in one message, what has changed since a checkpoint was saved.

    Args:
      step: the checkpoint's.
      saved: the metadata of the checkpoint.
      batches: what the order of training batches depends on, now.
      config: the operative configuration now; "" if it is not known.
      task: what is trained now.

    Raises:
      ValueError: a pipeline has another number of rounds, and so its layers another
        order in weights of the same shape.
    """
    notes = []
    if rows := _other_rows(task, saved):
        notes.append(f"rows (trained -> now: {rows}): {_SET_ROWS}")
    known = saved.get("batches")
    known = known if isinstance(known, Mapping) else {}
    if changed := [k for k, v in batches.items() if known.get(k) != v]:
        notes.append(
            f"training data ({', '.join(changed)}): examples now come in another order"
        )
    log_notes = log.warning if notes else log_line
    if changed := _changes_of_config(step, saved.get("config"), config):
        notes.append(f"configuration ({changed})")
    if notes:
        lines = "".join(f"\n  {note}" for note in notes)
        log_notes("changed since checkpoint step %d:%s", step, lines)


def _changes_of_config(step: int, before: Any, now: str) -> str:
    """The differences of two configurations; "" if there are none, or none are known.

    Raises:
      ValueError: as `note_changes`.
    """
    if not now or not before:
        return ""  # Not built by gin.
    try:
        old, new = parameters(before), parameters(now)
        changed = _differences(old, new)
    except (ValueError, TypeError):
        log.warning("the configuration in checkpoint step %d cannot be read", step)
        return ""
    for name in sorted(old.keys() & new.keys()):
        if is_rounds_of_pipeline(name) and old[name] != new[name]:
            raise ValueError(
                f"{name} is {new[name]}, but checkpoint step {step} was saved with "
                f"{old[name]}, by which its layers are in another order: set it to "
                f"{old[name]}, or start anew in another model_dir"
            )
    return changed


def row_shapes(task: Task) -> dict[str, dict[str, list[int]]]:
    """The entry for a checkpoint's metadata: the shapes of a batch's rows, by path."""
    rows = NestedMap(task.batch_spec(1)).items_by_path()
    return {_ROWS: {path: spec.shape[1:].as_list() for path, spec in rows}}


def warn_of_other_rows(task: Task, saved: Mapping[str, Any]) -> None:
    """Warns if weights were trained on rows of other shapes than the task's.

    They fit all the same: nothing else would tell that a text is cut where it was not
    in training, or that the model meets positions that it has never seen. Tensors that
    differ alike are named by the first of them.

    Args:
      task: of the configuration that is to use the weights.
      saved: the metadata of their checkpoint, which may have no shapes.
    """
    if rows := _other_rows(task, saved):
        log.warning(
            "the weights were trained on rows of other lengths or sizes\n"
            "  (trained -> now: %s):\n  %s",
            rows,
            _SET_ROWS,
        )


def _other_rows(task: Task, saved: Mapping[str, Any]) -> str:
    """How the rows that weights were trained on differ from the task's; or ""."""
    before, now = saved.get(_ROWS), row_shapes(task)[_ROWS]
    before = before if isinstance(before, Mapping) else {}
    differ = collections.defaultdict(list)
    for path, shape in now.items():
        if before.get(path, shape) != shape:
            differ[f"{before[path]} -> {shape}"].append(path)
    return "; ".join(f"{_first_of(paths)} {how}" for how, paths in differ.items())


def _first_of(paths: Sequence[str]) -> str:
    rest = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return paths[0] + rest


def write_hyperparameters(model_dir: str, config: str) -> None:
    """Writes a run's row of the HParams tab, from its operative gin configuration.

    The row belongs to the folder above "train" and "eval", whose curves the tab shows
    beside it. Of several rows of a folder the tab shows the first.
    """
    # The empty sub-folder is the run itself.
    summaries = Summaries(model_dir, "")
    with contextlib.closing(summaries):
        summaries.hyperparameters(hyperparameters(config))
