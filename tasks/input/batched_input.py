"""Batches by step number, for all tasks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.example_order import BatchRows

_PARALLEL_BATCHES = 4
_READY_BATCHES = 8


@gin.constants_from_enum
class Resume(enum.Enum):
    """Where a run that resumes goes on in the training batches."""

    STEP = "step"
    """At its step's batch: which batch that is depends on the step's number alone."""
    STATE = "state"
    """Where the iterator was, whose state is in the checkpoint."""
    ANEW = "anew"
    """At the first batch of a new pass, in an order of its own."""


class BatchedInput(Checked):
    """Base of inputs: subclass as a frozen, keyword-only dataclass.

    The state of an input is the step number alone, unless `resume` says otherwise. A
    subclass describes its batches, and reads those of given steps.
    """

    resume: ClassVar[Resume] = Resume.STEP
    """Where a run that resumes goes on."""
    is_by_number: ClassVar[bool] = True
    """Whether the numbers of steps and rows say which examples they hold; else each
    process has to read all rows, and to see the same ones."""

    def fingerprint(self) -> dict[str, str | int]:
        """What the order of training batches depends on, by name, as far as known."""
        return {}

    def element_spec(self, batch: int | None) -> NestedMap:
        """The `tf.TensorSpec` of each tensor in a batch of `batch` rows."""
        raise NotImplementedError(f"{type(self).__name__}.element_spec")

    def read_train(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        """The training batch of each of `steps`, in order."""
        raise NotImplementedError(f"{type(self).__name__}.read_train")

    def held_out_rows(self, global_batch: int) -> int:
        """The number of rows of one pass over the held-out examples."""
        raise NotImplementedError(f"{type(self).__name__}.held_out_rows")

    def read_held_out(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        """The held-out batch of each of `steps`, in order."""
        raise NotImplementedError(f"{type(self).__name__}.read_held_out")

    def train_batches(
        self, start_step: int, *, global_batch: int, rows: range
    ) -> tf.data.Dataset:
        """Endless batches from `start_step` on, reached without reading earlier ones.

        Args:
          start_step: number of the first batch.
          global_batch: rows of a step, over all processes.
          rows: the rows to read here; processes may read the same rows.

        Raises:
          ValueError: the rows are not of a batch of that size.
        """
        steps = tf.data.Dataset.range(start_step, tf.int64.max)
        return self.read_train(steps, BatchRows(global_batch, rows))

    def held_out_batches(
        self, *, global_batch: int, rows: range, max_batches: int | None = None
    ) -> tf.data.Dataset:
        """One pass over the held-out examples, in order; padding fills the last batch.

        Args:
          global_batch: rows of a step, over all processes.
          rows: the rows to read here.
          max_batches: number of batches to read at most, spread evenly over all.

        Raises:
          ValueError: the rows are not of a batch of that size.
        """
        given = BatchRows(global_batch, rows)
        count = self.held_out_rows(global_batch)
        return self.read_held_out(pass_steps(count, global_batch, max_batches), given)


class TokenInput(BatchedInput):
    """Base of inputs of tokens from one vocabulary."""

    vocab_size: int
    """V, above every id: a field or a property of a subclass."""


def pass_steps(
    rows: int, global_batch: int, max_batches: int | None
) -> tf.data.Dataset:
    """Numbers of the batches of one pass, or of `max_batches` spread evenly over it."""
    total = -(-rows // global_batch)
    count = total if max_batches is None else min(total, max_batches)
    return tf.data.Dataset.range(count).map(lambda n: n * total // count)


def read_batches(
    steps: tf.data.Dataset,
    batch: Callable[[tf.Tensor], NestedMap],
    *,
    ready: int = _READY_BATCHES,
) -> tf.data.Dataset:
    """The result of `batch` for each of `steps`, in order, `ready` of them ahead."""
    batches = steps.map(
        batch, num_parallel_calls=min(ready, _PARALLEL_BATCHES), deterministic=True
    )
    return read_ahead(batches, ready)


def read_ahead(batches: tf.data.Dataset, ready: int) -> tf.data.Dataset:
    """`batches`, of which `ready` are read ahead of need."""
    options = tf.data.Options()
    # On a busy machine an iterator waited up to a minute for its tuner to end.
    options.autotune.enabled = False
    return batches.prefetch(ready).with_options(options)
