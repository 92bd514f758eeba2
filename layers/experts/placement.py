"""Where each token lies when tokens are sorted by expert, or by device.

Dims: N tokens of a device, k choices of a token, K queues (of experts, or of devices),
R rows, C rows of a block, U blocks, F features.

A choice is a number from 0 to N k - 1, token by token. All functions are those of a
single device, with sizes that do not depend on the choices.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Queues:
    """Choices in K queues, in the order of tokens.

    Args:
      keys: int32 [N k], the queue of each choice; K for none.
      order: int32 [N k], the choices, sorted by queue.
      places: int32 [N k], the place of each choice in its queue, from 0.
      counts: int32 [K], the lengths of the queues.
    """

    keys: tf.Tensor
    order: tf.Tensor
    places: tf.Tensor
    counts: tf.Tensor

    @classmethod
    def of(cls, keys: tf.Tensor, count: int) -> Queues:
        """`count` queues by `keys`."""
        order = tf.argsort(keys, stable=True)
        rank = tf.argsort(order, stable=True)
        is_in = tf.equal(keys[:, None], tf.range(count))
        counts = tf.reduce_sum(tf.cast(is_in, tf.int32), 0)
        starts = tf.cumsum(counts, exclusive=True)
        places = rank - tf.gather(starts, tf.minimum(keys, count - 1))
        return cls(keys, order, places, counts)

    def in_blocks(self, count: int, size: int) -> tuple[tf.Tensor, ...]:
        """Puts the choices in U blocks of `size` rows, each of one queue only.

        Returns:
          int32 [N k], the row of each choice; R for none.
          int32 [R], the choice of each row; N k for none.
          int32 [U], the queue of each block.
        """
        blocks = -(-self.counts // size)
        ends = tf.cumsum(blocks)
        begins = ends - blocks
        numbers = tf.range(count)
        queues = tf.reduce_sum(tf.cast(numbers[:, None] >= ends, tf.int32), 1)
        queues = tf.minimum(queues, self.counts.shape[0] - 1)
        places = (numbers - tf.gather(begins, queues))[:, None] * size + tf.range(size)
        choices = self._at(tf.repeat(queues, size), tf.reshape(places, [-1]))
        first = tf.gather(begins, tf.minimum(self.keys, self.counts.shape[0] - 1))
        rows = first * size + self.places
        return self._known(rows, True, count * size), choices, queues

    def window(self, number: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Puts places `number` * `size` and on in K `size` rows, `size` of each queue.

        Returns:
          The rows and the choices, as `in_blocks`.
        """
        count = self.counts.shape[0]
        places = self.places - number * size
        is_in = (places >= 0) & (places < size)
        rows = self._known(self.keys * size + places, is_in, count * size)
        queues = tf.repeat(tf.range(count), size)
        return rows, self._at(queues, tf.tile(tf.range(size) + number * size, [count]))

    def _at(self, queues: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """The choices at such places of queues; N k behind their ends."""
        total = self.order.shape[0]
        starts = tf.cumsum(self.counts, exclusive=True)
        index = tf.minimum(tf.gather(starts, queues) + places, total - 1)
        is_in = places < tf.gather(self.counts, queues)
        return tf.where(is_in, tf.gather(self.order, index), total)

    def _known(self, rows: tf.Tensor, is_in, count: int) -> tf.Tensor:
        return tf.where((self.keys < self.counts.shape[0]) & is_in, rows, count)


def blocks_for(choices: int, experts: int, size: int) -> int:
    """The most blocks of `size` rows that `choices` fill, each of one expert only."""
    return min(choices, (choices + experts * (size - 1)) // size)


def take(x: tf.Tensor, choices: tf.Tensor, k: int) -> tf.Tensor:
    """[R, ...]: the token of each row's choice, of `x` [N, ...]; zeros for none."""
    tokens = x.shape[0]
    taken = tf.gather(x, tf.minimum(choices // k, tokens - 1))
    is_one = _like(choices < tokens * k, taken)
    return tf.where(is_one, taken, tf.zeros([], x.dtype))


def put(y: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """[N, ...]: the sum, in float32, of each token's `rows` [N, k] of `y` [R, ...].

    Each of `take` and `put` is the other's gradient.
    """
    count = y.shape[0]
    total = tf.zeros([], tf.float32)
    for place in tf.unstack(rows, axis=1):
        taken = tf.cast(tf.gather(y, tf.minimum(place, count - 1)), tf.float32)
        total += tf.where(_like(place < count, taken), taken, 0.0)
    return tf.cast(total, y.dtype)


def _like(mask: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """`mask` of dim 0 with as many dims as `x`."""
    return tf.reshape(mask, [-1, *[1] * (x.shape.rank - 1)])
