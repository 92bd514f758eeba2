"""The order of examples: which examples a batch holds, from its number alone.

A stateless permutation reorders the training examples in every epoch; held-out examples
come in their given order. A run resumes at any step, with any number of processes, from
nothing saved.

B batch rows.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib

import numpy as np
import tensorflow as tf

SEEDS = {"at_least": 0, "below": 2**63 - 1}
"""Bounds of the seed of an order; that of an order within it may be one more."""


class Split(enum.Enum):
    """Which examples: those for training, or those kept for evaluation."""

    TRAIN = "train"
    HELD_OUT = "held_out"

    @classmethod
    def by_hash(cls, key: bytes, held_out_one_in: int) -> Split:
        """The split of the example with this key, whatever other examples there are."""
        digest = hashlib.sha256(key).digest()
        held_out = int.from_bytes(digest[:8], "big") % held_out_one_in == 0
        return cls.HELD_OUT if held_out else cls.TRAIN


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """Rows of a global batch, such as those that a process reads.

    Args:
      global_batch: rows of a batch over all processes.
      rows: the rows of the batch; processes may read the same rows.

    Raises:
      ValueError: the rows are not of a batch of that size.
    """

    global_batch: int
    rows: range

    def __post_init__(self):
        rows = self.rows
        if not rows or min(rows) < 0 or max(rows) >= self.global_batch:
            raise ValueError(
                f"rows {rows} are not part of a global batch of {self.global_batch} "
                "rows"
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def within(self) -> np.ndarray:
        """int64 [B], the index of each row in the global batch."""
        return np.array(self.rows, np.int64)

    def indices(self, step: tf.Tensor) -> tf.Tensor:
        """int64 [B], the index of each row of a step among the rows of all steps."""
        return step * self.global_batch + self.within


def epoch_length(count: int | tf.Tensor) -> tf.Tensor:
    """How many indices an epoch of so many examples takes: int64, of the same shape."""
    count = tf.convert_to_tensor(count, tf.int64)
    # TF 2.21 repeats one example and skips another where the largest number is a power
    # of 4 from 2^16 up: an extra example of padding avoids that.
    is_power = tf.equal(tf.bitwise.bitwise_and(count - 1, count - 2), 0)
    return count + tf.cast((count > 2**16) & is_power, tf.int64)


def shuffled_examples(
    index: tf.Tensor, *, count: int | tf.Tensor, seed: int
) -> tf.Tensor:
    """Numbers of the examples at some indices of the endless training order.

    Each epoch is a permutation of its own. `tf.random.experimental.index_shuffle` takes
    one seed per call only, and its 4 rounds leave epochs alike: in half of the bits,
    most examples differ by one constant.

    Args:
      index: int64 [B].
      count: number of examples; int64 [B] if the indices are of several orders.
      seed: seed of the order.

    Returns:
      int64 [B], below `count`; some are equal to it if there are 2^16 and more.
    """
    count = epoch_length(count)
    epoch = index // count
    return tf.raw_ops.RandomIndexShuffle(
        index=index % count,
        # Of each of three words, the cipher uses the lowest 8 bits or more.
        seed=tf.pad(epoch[:, None], [[0, 0], [2, 0]]) + [seed, seed >> 8, 0],
        max_index=count - 1,
        rounds=8,
    )


def group_turns(
    index: tf.Tensor, *, shares: np.ndarray, seed: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Which group an order of several takes its example from, at some indices.

    Args:
      index: int64 [B].
      shares: int64 [groups + 1], from 0: the indices of a cycle that each group gets,
        added up.
      seed: seed of the order.

    Returns:
      int64 or int32 [B], the group; int64 [B], how often it has come before; bool [B],
      whether the index is padding, for which the first two are those of another.
    """
    length = int(shares[-1])
    slot = shuffled_examples(index, count=length, seed=seed)
    is_padding = slot == length
    slot = tf.minimum(slot, length - 1)
    group = tf.searchsorted(shares, slot, side="right") - 1
    cycle = index // epoch_length(length)
    turn = cycle * tf.gather(np.diff(shares), group) + slot - tf.gather(shares, group)
    return group, turn, is_padding
