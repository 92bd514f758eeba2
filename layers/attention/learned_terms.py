"""What is learned of attention besides projections: biases, vectors and sinks.

Dims: B batch, S sequence (query), T sequence (key), N heads, D head size, U blocks, C
tokens of a block; P and R as in `relative_positions.py`.
"""

from __future__ import annotations

import dataclasses
import enum

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.relative.relative_positions import (
    TABLE,
    DistanceVectors,
    TableRows,
)


@gin.constants_from_enum
class Sink(enum.Enum):
    """A logit of each head that joins the softmax's sum and has no value.

    NONE: there is none. LEARNED: a weight, as in gpt-oss (Agarwal et al. 2025, section
    2.2). ZERO: 0, so that a head may attend to nothing.
    """

    NONE = "none"
    LEARNED = "learned"
    ZERO = "zero"


TABLES = {"to_keys", "to_values"}
"""What is a table of vectors in blocks."""
BY_BATCH = {
    "bias": ("batch", "relative_buckets", "heads"),
    "shift": ("batch", "heads", "head_dim"),
    "sink": ("batch", "heads"),
    **dict.fromkeys(TABLES, ("batch", *TABLE)),
}
"""The dims of what loops over pairs of blocks read, with a batch dim for gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """What joins the logits of pairs, and their values.

    Args:
      bias: float32 [num_buckets, N], the weight of relative positions' biases.
      sink: float32 [N], logits of sinks.
      to_keys: vectors of relative positions that are added to keys.
      to_values: those that are added to values.
    """

    bias: tf.Tensor | None = None
    sink: tf.Tensor | None = None
    to_keys: DistanceVectors | None = None
    to_values: DistanceVectors | None = None

    @property
    def reach(self) -> int | None:
        """That of the vectors, see `DistanceVectors`."""
        return self.to_keys and self.to_keys.reach

    def in_blocks(self, ctx: Context, rows: TableRows) -> NestedMap:
        """The tensors of it that there are, vectors as tables of these rows."""
        vectors = {"to_keys": self.to_keys, "to_values": self.to_values}
        tensors = {
            name: each.table(ctx, rows) for name, each in vectors.items() if each
        }
        shift = self.to_keys and self.to_keys.shift
        more = {"bias": self.bias, "sink": self.sink, "shift": shift}
        return NestedMap(
            tensors | {name: t for name, t in more.items() if t is not None}
        )


def softmax(logits: tf.Tensor, sink: tf.Tensor | None) -> tf.Tensor:
    """The softmax [B, N, S, T] of logits, in whose sums the sink's [N] takes part."""
    if sink is None:
        return tf.nn.softmax(logits)
    sink = tf.cast(sink, logits.dtype)[:, None, None]
    largest = tf.maximum(tf.reduce_max(logits, -1, keepdims=True), sink)
    largest = tf.stop_gradient(largest)  # It cancels out.
    score = tf.exp(logits - largest)
    total = tf.reduce_sum(tf.cast(score, tf.float32), -1, keepdims=True)
    total += tf.cast(tf.exp(sink - largest), tf.float32)
    return score / tf.cast(total, score.dtype)


def by_batch(learned: NestedMap, q: tf.Tensor) -> NestedMap:
    """`learned`, all but tables for each row of `q` [U, B, N, C, D].

    Their gradients keep the batch dim in loops: split, a sum over it would be added up
    over devices for each pair.
    """
    batch = shape_of(q)[1]
    return learned.map_with_path(
        lambda name, t: (
            tf.broadcast_to(t, [batch, *t.shape]) if name not in TABLES else t
        )
    )


def no_gradients(ctx: Context, learned: NestedMap, q: tf.Tensor) -> NestedMap:
    """float32 zeros for the gradients of `by_batch`, a batch dim in front of each."""
    batch = shape_of(q)[1]

    def zeros(name: str, t: tf.Tensor) -> tf.Tensor:
        shape = [batch, *t.shape] if name in TABLES else t.shape
        return ctx.split(tf.zeros(shape), BY_BATCH[name])

    return learned.map_with_path(zeros)


def over_batch(gradients: NestedMap, learned: NestedMap) -> NestedMap:
    """`gradients`, see `no_gradients`, summed over rows, in the dtypes of `learned`."""
    return gradients.map(
        lambda t, like: tf.cast(tf.reduce_sum(t, 0), like.dtype), learned
    )
