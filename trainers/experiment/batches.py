"""The batches of a task's input, and its errors in the task's words."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment.experiment import Experiment

# How tf.data reports an exception in a Python function: with a copy of the traceback,
# and as an InvalidArgumentError or the like.
_RAISED = re.compile(
    r"(?P<kind>[A-Z]\w*Error): (?P<message>.*?)\s*Traceback \(most recent call last\)",
    re.DOTALL,
)
_RAISED_AGAIN = (ValueError, OSError, ImportError)


def call_batches(
    experiment: Experiment, start_step: int, rows: range
) -> Iterator[NestedMap]:
    """Batches for one call of the main program after another, as NumPy arrays.

    Args:
      experiment: the experiment.
      start_step: number of batches that come before.
      rows: the rows of the global batch to read.
    """
    batches = experiment.task.train_batches(
        start_step, global_batch=experiment.global_batch, rows=rows
    )
    yield from arrays(batches.batch(experiment.steps_per_loop, drop_remainder=True))


def arrays(batches: tf.data.Dataset) -> Iterator[NestedMap]:
    """Batches as NumPy arrays; raises what `readable` does."""
    for batch in readable(batches):
        yield NestedMap(batch).map(lambda tensor: tensor.numpy())


def readable(batches: Iterable[Any]) -> Iterator[Any]:
    """`batches`, with the errors that their Python functions raised.

    Raises:
      ValueError, OSError, ImportError: a function raised it, with this message.
    """
    try:
        yield from batches
    except tf.errors.OpError as error:
        raised = _RAISED.search(error.message)
        kind = getattr(builtins, raised["kind"], None) if raised else None
        if not (isinstance(kind, type) and issubclass(kind, _RAISED_AGAIN)):
            raise
        if issubclass(kind, UnicodeError):  # Some take five arguments.
            kind = ValueError
        raise kind(raised["message"]) from error
