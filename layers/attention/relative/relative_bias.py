"""Biases of relative positions, by buckets of distances.

Dims: S sequence (query), T sequence (key), N heads.
"""

from __future__ import annotations

import math

import tensorflow as tf

from meshwright.framework.modeling.initializers import Normal
from meshwright.framework.modeling.layer import Context, WeightSpec
from meshwright.layers.attention.mask_rules import MaskKind
from meshwright.layers.attention.positions import PositionKind


def bias_spec(num_buckets: int, num_heads: int) -> WeightSpec:
    """The weight of biases, a number for each bucket and head."""
    return WeightSpec(
        shape=(num_buckets, num_heads),
        dims=("relative_buckets", "heads"),
        initializer=Normal(0.02),
    )


def check_shared(
    ctx: Context, positions: object, num_heads: int, bias: tf.Tensor | None
) -> None:
    """Checks a bias that layers share, and that attention reads it.

    Raises:
      ValueError: there is one and `positions` are not SHARED, or the reverse; it is of
        another number of heads.
    """
    if (positions is PositionKind.SHARED) != (bias is not None):
        given = "no" if bias is None else "a"
        raise ValueError(
            f"layer {ctx.path!r} has {positions} but was given {given} relative_bias "
            "that layers share: PositionKind.SHARED goes with a SharedRelativeBias "
            "around the stack, and the reverse"
        )
    if bias is not None and bias.shape[-1] != num_heads:
        raise ValueError(
            f"layer {ctx.path!r} has {num_heads} heads, but the relative_bias that "
            f"layers share is {bias.shape}: make its last dim that"
        )


def relative_bucket(
    relative: tf.Tensor,
    *,
    mask: MaskKind,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> tf.Tensor:
    """Buckets of relative positions (Raffel et al. 2020, T5).

    Small distances have a bucket each; larger distances share buckets that widen
    logarithmically up to `max_distance`; all beyond it are in the last bucket.

    Args:
      relative: int32, key position minus query position.
      mask: FULL gives later keys the upper half of the buckets; CAUSAL has no use for
        them and puts them in bucket 0.
      num_buckets: how many buckets there are.
      max_distance: all distances from here on share one bucket.

    Returns:
      int32 of the shape of `relative`, in [0, num_buckets).

    Raises:
      ValueError: no distance has its own bucket, or all up to `max_distance` have.
    """
    if mask is MaskKind.FULL:
        num_buckets //= 2
        start = tf.where(relative > 0, num_buckets, 0)
        distance = tf.abs(relative)
    else:
        start = tf.zeros_like(relative)
        distance = tf.maximum(-relative, 0)
    exact = num_buckets // 2
    if not 0 < exact < max_distance:
        raise ValueError(
            f"relative positions: distances below {exact} get a bucket each; that must "
            f"be 1 or more and below max_distance, which is {max_distance}: change "
            "num_buckets or max_distance"
        )
    # Never the logarithm of 0, not even in the branch that is not taken.
    ratio = tf.cast(tf.maximum(distance, exact), tf.float32) / exact
    fraction = tf.math.log(ratio) / math.log(max_distance / exact)
    wide = exact + tf.cast(fraction * (num_buckets - exact), tf.int32)
    wide = tf.minimum(wide, num_buckets - 1)
    return start + tf.where(distance < exact, distance, wide)


def relative_bias(
    weight: tf.Tensor,
    queries: int,
    keys: int,
    *,
    mask: MaskKind,
    max_distance: int = 128,
    offset: int | tf.Tensor = 0,
    stride: int = 1,
    relative: tf.Tensor | None = None,
) -> tf.Tensor:
    """A bias for each head and pair of tokens, by the bucket of their distance.

    Distances are those of indices: inside a packed segment, whose tokens are adjacent,
    they are distances of positions too.

    Args:
      weight: [..., num_buckets, N].
      queries: S.
      keys: T.
      mask: as in `relative_bucket`.
      max_distance: as in `relative_bucket`.
      offset: the position of the first key minus that of the first query.
      stride: the position of a key, or query, minus that of the one before it.
      relative: int32 [T], see `Logits`; None: keys and queries are in rows.

    Returns:
      [..., N, S, T], query before key, in the dtype of `weight`.
    """
    *lead, num_buckets, heads = weight.shape
    length = queries + keys
    if relative is None:
        # Entry k of a row of S + T is for distance k, or k - (S + T) after the first T.
        entry = tf.range(length)
        distances = tf.where(entry < keys, entry, entry - length) * stride + offset
    else:
        distances = relative
    bucket = relative_bucket(
        distances, mask=mask, num_buckets=num_buckets, max_distance=max_distance
    )
    one_hot = tf.one_hot(bucket, num_buckets, dtype=weight.dtype)
    row = tf.matmul(weight, one_hot, transpose_a=True, transpose_b=True)
    if relative is not None:
        return tf.broadcast_to(row[..., None, :], [*lead, heads, queries, keys])
    # Copies of the row end to end, read with a stride one short: each query's row is
    # the previous row shifted by one. A gather's gradient would be a scatter of S*T.
    rows = tf.broadcast_to(row[..., None, :], [*lead, heads, queries, length])
    ends = tf.reshape(rows, [*lead, heads, -1])[..., : queries * (length - 1)]
    return tf.reshape(ends, [*lead, heads, queries, length - 1])[..., :keys]
