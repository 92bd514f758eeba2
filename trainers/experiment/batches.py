"""The batches of a task's input, and its errors in the task's words."""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.xla.processes import gather_from_processes
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import Resume
from meshwright.tasks.input.packed_rows import PackedRows
from meshwright.trainers.experiment.experiment import Experiment

log = logging.getLogger("absl")

_FIRST_ROWS = 256
# How tf.data reports an exception in a Python function: with a copy of the traceback,
# and as an InvalidArgumentError or the like.
_RAISED = re.compile(
    r"(?P<kind>[A-Z]\w*Error): (?P<message>.*?)\s*Traceback \(most recent call last\)",
    re.DOTALL,
)
_RAISED_AGAIN = (ValueError, OSError, ImportError)
# Its data follow each other in brackets.
_ASSERTED = re.compile(r"assertion failed: (\[.*\])")
_CANNOT_BE_SAVED = (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError)
# The files of a checkpoint of TF.
_FILES = {"index": ".index", "data": ".data-00000-of-00001"}


def check_first(experiment: Experiment) -> list[str]:
    """Reads some training batches of tokens that a pipeline of the user's made.

    Their ids may be none of the model's, which is better told before compiling. Other
    inputs make their ids themselves. A pipeline that begins anew may hand out each row
    once, such as a `tf.data` service; nothing is taken from it.

    Returns:
      Lines that say how much of the batches is padding.

    Raises:
      ValueError: the input refuses them.
    """
    task, rows = experiment.task, experiment.global_batch
    given = task.input
    if not isinstance(given, PackedRows) or given.resume is Resume.ANEW:
        return []
    batches = task.train_batches(0, global_batch=rows, rows=range(rows))
    first = [*arrays(batches.take(-(-_FIRST_ROWS // rows)))]
    for line in given.doubts(first):
        log.warning("%s", line)
    return given.fullness(first)


class CallBatches:
    """Batches for one call of the main program after another, as NumPy arrays.

    An endless iterator. Where the numbers of steps do not say which examples they hold,
    processes read all rows, so that they can see whether they read the same.

    Args:
      experiment: the experiment.
      start_step: number of batches that come before.
      rows: the rows of the global batch to give; `give` may name others.
      saved: the input's `state` when they had been read, if its `resume` has one.

    Raises:
      ValueError: the input has no state to save, or `saved` is of another input.
    """

    def __init__(
        self,
        experiment: Experiment,
        start_step: int,
        rows: range,
        saved: NestedMap | None = None,
    ):
        task = experiment.task
        self._batch, self._steps = experiment.global_batch, experiment.steps_per_loop
        self._reading = _Reading(experiment, rows, "train")
        self._iterator = iter(
            task.train_batches(
                start_step, global_batch=self._batch, rows=self._reading.rows
            )
        )
        self._batches = arrays(self._iterator)
        self._number = start_step
        self._spec = str(self._iterator.element_spec)
        self._taken: list[NestedMap] = []
        self._unused: list[NestedMap] = []
        self._has_read = False
        if task.input.resume is Resume.STATE:
            self.state()  # Raises now what it would raise at the first checkpoint.
            if saved is not None:
                self._restore(saved)
            else:
                for _ in range(start_step):
                    next(self._batches)

    def __iter__(self) -> CallBatches:
        return self

    def __next__(self) -> NestedMap:
        self._taken = [self._next() for _ in range(self._steps)]
        given = [self._reading.given(batch) for batch in self._taken]
        if not self._has_read:
            self._has_read = True
            self.check_same()
        return given[0].map(lambda *leaves: np.stack(leaves), *given[1:])

    def _next(self) -> NestedMap:
        if self._unused:
            return self._unused.pop(0)
        self._number += 1
        try:
            return next(self._batches)
        except ValueError as error:
            raise ValueError(
                f"{error} (batch {self._number:,} of the training data)"
            ) from error

    def give(self, rows: range) -> None:
        """Gives these rows of what is read, where all rows are."""
        self._reading.give(rows)

    def put_back(self) -> None:
        """Takes back the batches of the last call, which was not made."""
        self._unused, self._taken = self._taken + self._unused, []

    def check_same(self) -> None:
        """Checks that all processes have read the same so far; all call this.

        Raises:
          ValueError: they have not.
        """
        self._reading.check_same()

    def state(self) -> NestedMap:
        """The state of the input after the calls that were made, as NumPy arrays.

        It is that of `tf.data`'s iterator, and the batches that were put back.

        Raises:
          ValueError: the dataset has ops whose state `tf.data` does not save.
        """
        with tempfile.TemporaryDirectory() as folder:
            prefix = os.path.join(folder, "iterator")
            try:
                tf.train.Checkpoint(iterator=self._iterator).write(prefix)
            except _CANNOT_BE_SAVED as error:
                raise ValueError(
                    "the state of the dataset that DatasetInput.train returns cannot "
                    f"be saved ({error.message.partition('}} ')[2] or error.message}): "
                    "have it draw random numbers by tf.random.stateless_* with seeds "
                    "from Dataset.counter or Dataset.random, and without Python "
                    "functions; or leave DatasetInput.resume at %Resume.STEP"
                ) from error
            files = {
                name: np.fromfile(prefix + suffix, np.uint8)
                for name, suffix in _FILES.items()
            }
        state = NestedMap(
            iterator=NestedMap(files),
            global_batch=np.array(self._batch),
            spec=np.frombuffer(self._spec.encode(), np.uint8),
        )
        unused = {f"batch_{n}": batch for n, batch in enumerate(self._unused)}
        return NestedMap(state | {"unused": NestedMap(unused)}) if unused else state

    def _restore(self, saved: NestedMap) -> None:
        if (batch := int(saved.global_batch)) != self._batch:
            raise ValueError(
                f"the state of the input was saved with Experiment.global_batch = "
                f"{batch}, and holds batches of that size: it cannot be "
                f"{self._batch} now. Set it back, or DatasetInput.resume to "
                "%Resume.STEP or %Resume.ANEW"
            )
        if (spec := bytes(np.asarray(saved.spec)).decode()) != self._spec:
            # TF would hand on what is in its buffers.
            raise self._another_dataset(f"of {spec}, now {self._spec}")
        with tempfile.TemporaryDirectory() as folder:
            prefix = os.path.join(folder, "iterator")
            for name, suffix in _FILES.items():
                np.asarray(saved.iterator[name]).tofile(prefix + suffix)
            with self._of_another_dataset():
                reader = tf.train.Checkpoint(iterator=self._iterator)
                reader.read(prefix).assert_consumed()
        unused = saved.get("unused", NestedMap())
        self._unused = [unused[f"batch_{n}"] for n in range(len(unused))]
        with self._of_another_dataset():
            self._unused.append(next(self._batches))  # It may fail only here.

    @contextlib.contextmanager
    def _of_another_dataset(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            raise self._another_dataset(error.message) from error

    def _another_dataset(self, why: str) -> ValueError:
        return ValueError(
            "the state of the input was saved for another dataset than "
            f"DatasetInput.train returns now ({why}): set back what was changed, or "
            "DatasetInput.resume to %Resume.STEP or %Resume.ANEW"
        )


def eval_batches(
    experiment: Experiment, rows: range, max_batches: int | None
) -> Iterator[NestedMap]:
    """Held-out batches as NumPy arrays; see `Task.eval_batches`.

    Raises:
      ValueError: at the end, if processes have read different examples.
    """
    reading = _Reading(experiment, rows, "held_out")
    batches = experiment.task.eval_batches(
        global_batch=experiment.global_batch, rows=reading.rows, max_batches=max_batches
    )
    for batch in arrays(batches):
        yield reading.given(batch)
    reading.check_same()


class _Reading:
    """Which rows a process reads, of which it gives some.

    Args:
      experiment: the experiment.
      rows: the rows to give.
      field: the field of `DatasetInput` that the examples are of.
    """

    def __init__(self, experiment: Experiment, rows: range, field: str):
        self._field = field
        is_by_number = experiment.task.input.is_by_number
        self.rows = rows if is_by_number else range(experiment.global_batch)
        self._chosen = None
        self._digest = 0
        if not is_by_number:
            self.give(rows)

    def give(self, rows: range) -> None:
        """Gives other rows of those that are read."""
        self._chosen = slice(rows.start, rows.stop, rows.step)

    def given(self, batch: NestedMap) -> NestedMap:
        """The rows to give, of a batch that was read."""
        if self._chosen is None:
            return batch
        if jax.process_count() > 1:
            for leaf in batch.leaves():
                self._digest = zlib.crc32(np.ascontiguousarray(leaf), self._digest)
        return batch.map(lambda leaf: leaf[self._chosen])

    def check_same(self) -> None:
        """Checks that all processes have read the same so far; all call this.

        Raises:
          ValueError: they have not.
        """
        if self._chosen is None:
            return
        if len(set(gather_from_processes(self._digest & 0x7FFFFFFF))) > 1:
            raise ValueError(
                "processes read different examples, or in different orders, so that a "
                "batch has some of them twice and others not: have the function of "
                f"DatasetInput.{self._field} return the same examples in the same "
                "order in each process (seed what draws numbers in NumPy and Python)"
            )


def arrays(batches: tf.data.Dataset) -> Iterator[NestedMap]:
    """Batches as NumPy arrays; raises what `readable` does."""
    for batch in readable(batches):
        yield NestedMap(batch).map(lambda tensor: tensor.numpy())


def readable(batches: Iterable[Any]) -> Iterator[Any]:
    """`batches`, with the errors that their Python functions raised.

    Raises:
      ValueError, OSError, ImportError: a function raised it, with this message.
      ValueError: a TensorFlow assertion of the input failed.
    """
    try:
        yield from batches
    except tf.errors.OpError as error:
        if asserted := _ASSERTED.search(error.message):
            raise ValueError(f"the input is refused: {asserted[1]}") from error
        raised = _RAISED.search(error.message)
        kind = getattr(builtins, raised["kind"], None) if raised else None
        if not (isinstance(kind, type) and issubclass(kind, _RAISED_AGAIN)):
            raise
        if issubclass(kind, UnicodeError):  # Some take five arguments.
            kind = ValueError
        raise kind(raised["message"]) from error
