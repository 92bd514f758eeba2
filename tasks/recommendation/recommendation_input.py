"""Interactions as batches of pairs; the state of the input is the step number.

Beside each real pair, some are read that do not exist, with items drawn anew each time:
negatives. A held-out item is ranked among negatives of its user.

Dims: B batch rows, P training pairs, N negatives per pair, K negatives that a held-out
item is ranked among.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded, check_number, instance
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import (
    BatchedInput,
    pass_steps,
    read_batches,
)
from meshwright.tasks.input.example_order import SEEDS, BatchRows, shuffled_examples
from meshwright.tasks.recommendation.interactions import InteractionFiles, Interactions

# A step and a user of the same number have different draws.
_TRAINED, _HELD_OUT = 0, 1


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecommendationInput(BatchedInput):
    """Batches of pairs. Construction does not touch the file system.

    A batch is a nested map of tensors [rows]:
      user: int32.
      item: int32.
      label: float32, 1 where the user took the item, 0 for a negative.
      weight: float32, 1, and 0 in rows that fill up a batch.

    Args:
      files: the source of interactions: `RatingsFile` or `SyntheticInteractions`.
      negatives: N; each is an item that the user did not take in training.
      held_out_negatives: K, at least N; distinct items that the user never took, the
        same in every evaluation.
      seed: seed of the training order and of negatives.

    Raises:
      ValueError: a number out of range.
    """

    files: InteractionFiles = instance(example="@RatingsFile()")
    negatives: int = bounded(4, at_least=1)
    held_out_negatives: int = 99
    seed: int = bounded(0, **SEEDS)

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "held_out_negatives", at_least=self.negatives)

    def element_spec(self, batch: int | None) -> NestedMap:
        ids, numbers = tf.TensorSpec([batch], tf.int32), tf.TensorSpec([batch])
        return NestedMap(user=ids, item=ids, label=numbers, weight=numbers)

    def ranked_spec(self, batch: int) -> NestedMap:
        """The `tf.TensorSpec`s of a batch of `ranked_batches`."""
        return NestedMap(
            user=tf.TensorSpec([batch], tf.int32),
            ranked=tf.TensorSpec([batch, 1 + self.held_out_negatives], tf.int32),
        )

    def interactions(self) -> Interactions:
        """All interactions.

        Raises:
          FileNotFoundError, ValueError: see `RatingsFile.read`.
          ValueError: a user took so many items that too few are left; the message names
            the user.
        """
        interactions = self.files.read()
        counts = np.diff(interactions.bounds) + 1
        most = int(counts.argmax())
        left = interactions.item_count - int(counts[most])
        if left < self.held_out_negatives:
            raise ValueError(
                f"RecommendationInput.held_out_negatives is {self.held_out_negatives}, "
                f"but user number {most} took all but {left} of the "
                f"{interactions.item_count} items: lower it to that"
            )
        return interactions

    def read_train(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        """Each epoch reads every pair once, with N negatives of its user, shuffled."""
        interactions = self.interactions()
        count = len(interactions.user) * (1 + self.negatives)

        def read(step: np.ndarray, example: np.ndarray):
            example, weight = _within(example, count)
            positive, slot = np.divmod(example, 1 + self.negatives)
            user, item = interactions.user[positive], interactions.item[positive]
            rng = np.random.default_rng([self.seed, _TRAINED, int(step)])
            todo = np.flatnonzero(slot)
            while len(todo):
                # All processes draw for all rows, and thus draw the same.
                draws = rng.integers(
                    interactions.item_count, size=rows.global_batch, dtype="int32"
                )
                item[todo] = draws[rows.within[todo]]
                todo = todo[interactions.are_trained_on(user[todo], item[todo])]
            return _rows(user, item, slot, weight)

        def batch(step):
            index = rows.indices(step)
            example = shuffled_examples(index, count=count, seed=self.seed)
            return _tensors(read, [step, example], self.element_spec(len(rows)))

        return read_batches(steps, batch)

    def held_out_rows(self, global_batch: int) -> int:
        return self.interactions().user_count * (1 + self.negatives)

    def read_held_out(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        """Each user's held-out item and the first N of the K negatives, once."""
        interactions = self.interactions()
        count = interactions.user_count * (1 + self.negatives)

        def read(example: np.ndarray):
            example, weight = _within(example, count)
            user, slot = np.divmod(example, 1 + self.negatives)
            users, which = np.unique(user, return_inverse=True)
            item = self._ranked(interactions, users)[which, slot]
            return _rows(user, item, slot, weight)

        def batch(step):
            return _tensors(read, [rows.indices(step)], self.element_spec(len(rows)))

        return read_batches(steps, batch)

    def ranked_batches(
        self, *, global_batch: int, max_batches: int | None = None
    ) -> tf.data.Dataset:
        """Users and the items to rank for them, each user once.

        Args:
          global_batch: B, users of a batch.
          max_batches: number of batches to read at most, spread evenly over all.

        Returns:
          `user` int32 [B], -1 in rows that fill up a batch, and `ranked` int32
          [B, 1 + K]: the held-out item and K negatives.
        """
        interactions, rows = (
            self.interactions(),
            BatchRows(global_batch, range(global_batch)),
        )

        def read(number: np.ndarray):
            user, weight = _within(number, interactions.user_count)
            ranked = self._ranked(interactions, user)
            return NestedMap(user=np.where(weight > 0, user, -1), ranked=ranked)

        def batch(step):
            return _tensors(read, [rows.indices(step)], self.ranked_spec(global_batch))

        steps = pass_steps(interactions.user_count, global_batch, max_batches)
        return read_batches(steps, batch)

    def _ranked(self, interactions: Interactions, users: np.ndarray) -> np.ndarray:
        """int32 [users, 1 + K]: held-out items, and items that the user never took."""
        every, rows = np.arange(interactions.item_count, dtype=np.int32), []
        for user in users:
            left = np.delete(every, interactions.taken_by(user))
            rng = np.random.default_rng([self.seed, _HELD_OUT, int(user)])
            negatives = rng.choice(left, self.held_out_negatives, replace=False)
            rows.append(np.append(interactions.held_out[user], negatives))
        return np.stack(rows)


def _within(number: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers limited to below `count`, and weights: 0 where a number was not."""
    return np.minimum(number, count - 1), np.float32(number < count)


def _rows(user, item, slot, weight) -> NestedMap:
    return NestedMap(user=user, item=item, label=slot == 0, weight=weight)


def _tensors(
    read: Callable[..., NestedMap], inputs: list[tf.Tensor], spec: NestedMap
) -> NestedMap:
    """The result of `read` for `inputs`, as tensors of `spec`."""

    def arrays(*inputs: np.ndarray) -> list[np.ndarray]:
        dtypes = spec.map(lambda s: s.dtype.as_numpy_dtype)
        return read(*inputs).map(lambda a, dtype: a.astype(dtype), dtypes).leaves()

    kinds = [s.dtype for s in spec.leaves()]
    values = tf.numpy_function(arrays, inputs, kinds, stateful=False)
    return spec.pack(values).map(lambda t, s: tf.ensure_shape(t, s.shape), spec)
