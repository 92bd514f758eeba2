"""Positions of tokens: rotary, relative and sinusoidal positions.

Dims: B batch, S sequence, N heads, D head size.
"""

from __future__ import annotations

import enum
import math

import gin
import tensorflow as tf

from meshwright.layers.attention.mask_rules import MaskKind
from meshwright.layers.attention.rotary_scaling import RotaryScaling


@gin.constants_from_enum
class PositionKind(enum.Enum):
    """How positions enter attention."""

    NONE = "none"
    ROTARY = "rotary"
    RELATIVE = "relative"


@gin.constants_from_enum
class InputPositions(enum.Enum):
    """What is added to embeddings, to tell positions apart."""

    NONE = "none"
    SINUSOIDS = "sinusoids"


def check_rotary(
    positions: object, head_dim: int, scaling: RotaryScaling | None
) -> None:
    """Checks what rotary positions need, and that they are there to be scaled.

    Raises:
      ValueError: an odd head size; a scaling of other positions.
    """
    if positions is PositionKind.ROTARY and head_dim % 2:
        raise ValueError(
            f"rotary positions turn pairs of features, but head_dim is {head_dim}: "
            "make it even"
        )
    if positions is not PositionKind.ROTARY and scaling is not None:
        raise ValueError(
            f"MultiHeadAttention.rotary_scaling is {scaling}, but positions are "
            f"{positions}, which it does not change: make them PositionKind.ROTARY, or "
            "leave it out"
        )


def rotate(
    x: tf.Tensor,
    positions: tf.Tensor,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
) -> tf.Tensor:
    """Rotary positions (Su et al. 2021): feature pairs turned by angles of position.

    Feature i of the first half pairs with feature i of the second; the pair turns by
    position * base^(-2i/D). The dot product of two rotated vectors depends on the
    difference of their positions only. The halves are those of published weights of
    Llama and its like; the paper pairs neighbours.

    Args:
      x: [B, S, N, D], D even.
      positions: int32 [B, S] or [1, S].
      base: sets the longest wave length, 2 pi * base.
      scaling: what changes the frequencies, for long contexts.

    Returns:
      `x` rotated, in its dtype; angles are computed in float32.
    """
    half = x.shape[-1] // 2
    frequency = tf.exp(tf.range(half, dtype=tf.float32) * (-math.log(base) / half))
    if scaling is not None:
        frequency = scaling.scaled(frequency, base=base)
    angle = tf.cast(positions, tf.float32)[:, :, None, None] * frequency
    cos, sin = tf.cos(angle), tf.sin(angle)
    if scaling is not None:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    first, second = tf.split(tf.cast(x, tf.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return tf.cast(tf.concat(turned, axis=-1), x.dtype)


def sinusoids(
    positions: tf.Tensor, dims: int, *, max_timescale: float = 10000.0
) -> tf.Tensor:
    """Sines and then cosines of positions (Vaswani et al. 2017, section 3.5).

    Args:
      positions: numbers of any shape.
      dims: M, even.
      max_timescale: wave lengths go from 2 pi up to near 2 pi times this.

    Returns:
      float32 [..., M].
    """
    half = dims // 2
    slowing = -math.log(max_timescale) / half
    frequency = tf.exp(tf.range(half, dtype=tf.float32) * slowing)
    angle = tf.cast(positions, tf.float32)[..., None] * frequency
    return tf.concat([tf.sin(angle), tf.cos(angle)], axis=-1)


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

    Returns:
      [..., N, S, T], query before key, in the dtype of `weight`.
    """
    *lead, num_buckets, heads = weight.shape
    length = queries + keys
    # Entry k of a row of S + T is for distance k, or k - (S + T) after the first T.
    entry = tf.range(length)
    bucket = relative_bucket(
        tf.where(entry < keys, entry, entry - length) * stride + offset,
        mask=mask,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    one_hot = tf.one_hot(bucket, num_buckets, dtype=weight.dtype)
    row = tf.matmul(weight, one_hot, transpose_a=True, transpose_b=True)
    # Copies of the row end to end, read with a stride one short: each query's row is
    # the previous row shifted by one. A gather's gradient would be a scatter of S*T.
    rows = tf.broadcast_to(row[..., None, :], [*lead, heads, queries, length])
    ends = tf.reshape(rows, [*lead, heads, -1])[..., : queries * (length - 1)]
    return tf.reshape(ends, [*lead, heads, queries, length - 1])[..., :keys]
