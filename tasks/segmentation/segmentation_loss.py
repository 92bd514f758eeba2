"""Sums over voxels that losses and scores of segmentation are made of.

Dims: B batch, X Y Z the labelled part, K classes.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from meshwright.framework.nested_map import NestedMap

IGNORED = -1
"""The label of voxels that do not count: padding, or counted in another tile."""


def voxel_sums(logits: tf.Tensor, label: tf.Tensor) -> NestedMap:
    """The sums that cross-entropy and Dice need of a batch.

    It works class by class: with few classes in the last dim, TPUs would pad each voxel
    to 128 numbers, and keep sums over them with the batch padded likewise. So all is
    fused.

    Args:
      logits: [B, X, Y, Z, K], any float dtype.
      label: int32 [B, X, Y, Z], in [0, K) or `IGNORED`.

    Returns:
      float32 `nats` and `voxels`, scalars: the cross-entropy of all voxels that count,
      and their number. By class, [K]: `chance`, the sum of its probability, and
      `right`, the same where it is the label; `found`, voxels where it is the
      likeliest, and `overlap`, the same where it is the label; `truth`, voxels where it
      is the label. Counts beyond 2^24 may round.
    """
    values, largest, log_sum = _by_class(logits)
    counts = tf.cast(label != IGNORED, tf.float32)
    nats, by_class, seen = log_sum * counts, [], tf.zeros_like(counts)
    for k, value in enumerate(values):
        truth = tf.cast(label == k, tf.float32)
        chance = tf.exp(value - log_sum) * counts
        first = tf.cast(value == largest, tf.float32) * (1 - seen)  # Of equals.
        seen += first
        chosen = first * counts
        nats -= value * truth
        by_class.append(
            NestedMap(
                chance=chance,
                right=chance * truth,
                found=chosen,
                overlap=chosen * truth,
                truth=truth,
            ).map(tf.reduce_sum)
        )
    return NestedMap(
        nats=tf.reduce_sum(nats),
        voxels=tf.reduce_sum(counts),
        **{name: tf.stack([sums[name] for sums in by_class]) for name in by_class[0]},
    )


def chances(logits: tf.Tensor) -> tf.Tensor:
    """Softmax float32 [B, K, X, Y, Z], of logits [B, X, Y, Z, K]."""
    values, _, log_sum = _by_class(logits)
    return tf.stack([tf.exp(value - log_sum) for value in values], axis=1)


def _by_class(logits: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """float32 [B, X, Y, Z]: logits of each class, their largest, their log-sum-exp."""
    values = [tf.cast(logit, tf.float32) for logit in tf.unstack(logits, axis=-1)]
    largest = tf.stop_gradient(functools.reduce(tf.maximum, values))
    total = tf.add_n([tf.exp(value - largest) for value in values])
    return values, largest, largest + tf.math.log(total)
