"""Histograms of tensors, counted where the tensors are.

A split tensor is never gathered: each device counts its own elements, and the counts
are added up. Edges are spread evenly over the finite values of all of a tensor, as in
`tf.summary.histogram`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.nested_map import NestedMap

BUCKETS = 30

# An int32 counts fewer elements than this.
_INT32_LIMIT = 2**31


def histograms_of(tensors: Sequence[tf.Tensor]) -> NestedMap:
    """Histograms of T floating-point tensors, with K = `BUCKETS` buckets each.

    Buckets hold their left edge, the last one its right edge too. Values that are not
    finite are in none. Without finite values all edges are 0, and with a single value
    all edges are that value, whose count is the last bucket's.

    Returns:
      `edges`, float32 [T, K + 1], rising; `counts`, float32 [T, K], exact up to 2**24;
      `not_finite`, float32 [T], how many values are infinite or NaN.
    """
    tensors = [tf.cast(x, tf.float32) for x in tensors]
    edges = tf.stack([_edges(x) for x in tensors])
    lasts = edges[:, -1:]
    # The upper limits of buckets; the last one's is no edge.
    uppers = tf.concat([edges[:, 1:-1], tf.fill(lasts.shape, math.inf)], axis=1)

    def bucket(i: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        column = []
        for t, x in enumerate(tensors):
            inside = (x >= edges[t, i]) & (x < uppers[t, i]) & (x <= lasts[t, 0])
            column.append(_count(inside))
        at = tf.one_hot(i, BUCKETS)
        return i + 1, counts + tf.stack(column)[:, None] * at

    # A loop: compared with all edges at once, a tensor takes BUCKETS times its memory
    # on CPUs.
    _, counts = tf.while_loop(
        lambda i, _: i < BUCKETS,
        bucket,
        (tf.constant(0), tf.zeros([len(tensors), BUCKETS])),
    )
    bad = [_count(~tf.math.is_finite(x)) for x in tensors]
    return NestedMap(edges=edges, counts=counts, not_finite=tf.stack(bad))


def _edges(x: tf.Tensor) -> tf.Tensor:
    """The edges of a tensor's buckets, float32 [BUCKETS + 1]."""
    finite, most = tf.math.is_finite(x), tf.float32.max
    low = tf.reduce_min(tf.where(finite, x, most))
    high = tf.reduce_max(tf.where(finite, x, -most))
    some = low <= high
    low, high = tf.where(some, low, 0.0), tf.where(some, high, 0.0)
    # Of halves, as the difference of two finite values may be infinite. Both ends are
    # exact, and rounding never makes an edge smaller than the one before.
    shares = tf.range(BUCKETS + 1, dtype=tf.float32) / BUCKETS
    inner = 2 * (low / 2 + (high / 2 - low / 2) * shares[1:-1])
    return tf.concat([[low], tf.clip_by_value(inner, low, high), [high]], axis=0)


def _count(mask: tf.Tensor) -> tf.Tensor:
    """How many elements are true, a float32 scalar."""
    ones = tf.cast(mask, tf.int32)
    if math.prod(mask.shape) < _INT32_LIMIT:
        return tf.cast(tf.reduce_sum(ones), tf.float32)
    longest = max(range(mask.shape.rank), key=lambda dim: mask.shape[dim])
    others = [dim for dim in range(mask.shape.rank) if dim != longest]
    return tf.reduce_sum(tf.cast(tf.reduce_sum(ones, axis=others), tf.float32))
