"""Normalization, with float32 statistics: over features, rows or the entire batch.

Dims: B batch, M model, G groups.
"""

from __future__ import annotations

import dataclasses
import math

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    as_gradient,
)
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import check_trailing_dims, per_feature
from meshwright.layers.basic.masks import zero_padding


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + epsilon) * (offset + scale) (Zhang and Sennrich 2019).

    Args:
      model_dims: M.
      epsilon: added to the mean square.
      offset: added to the scale, which starts at 1 - offset; 1 in Gemma.
    """

    model_dims: int = bounded(at_least=1)
    epsilon: float = bounded(1e-6, at_least=0)
    offset: float = 0.0

    def weights(self) -> NestedMap:
        return NestedMap(scale=per_feature(self.model_dims, 1.0 - self.offset))

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Normalizes `x` [..., M]; the result is in the activation dtype.

        `mask` is there for this norm to replace others, and has no effect.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        del mask
        check_trailing_dims(ctx, x, [self.model_dims])
        x = tf.cast(x, tf.float32)
        scale = self.offset + theta.scale if self.offset else theta.scale
        return ctx.cast(_over_rms(x, self.epsilon) * scale)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al. 2016).

    Args:
      model_dims: M.
      epsilon: added to the variance.
    """

    model_dims: int = bounded(at_least=1)
    epsilon: float = bounded(1e-6, at_least=0)

    def weights(self) -> NestedMap:
        return NestedMap(
            bias=per_feature(self.model_dims),
            scale=per_feature(self.model_dims, 1.0),
        )

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Normalizes `x` [..., M]; the result is in the activation dtype.

        `mask` is there for this norm to replace others, and has no effect.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        del mask
        check_trailing_dims(ctx, x, [self.model_dims])
        x = tf.cast(x, tf.float32)
        centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        return ctx.cast(_over_rms(centred, self.epsilon) * theta.scale + theta.bias)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupNorm(Layer):
    """LayerNorm over all places of a row and the features of a group (Wu and He 2018).

    Args:
      model_dims: M.
      num_groups: G, which divides M.
      epsilon: added to the variance.

    Raises:
      ValueError: G does not divide M.
    """

    model_dims: int = bounded(at_least=1)
    num_groups: int = bounded(at_least=1)
    epsilon: float = bounded(1e-6, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.model_dims % self.num_groups:
            raise ValueError(
                f"GroupNorm.num_groups is {self.num_groups}, which does not divide "
                f"model_dims {self.model_dims}: choose a divisor of it"
            )

    def weights(self) -> NestedMap:
        return NestedMap(
            bias=per_feature(self.model_dims),
            scale=per_feature(self.model_dims, 1.0),
        )

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Normalizes `x` [B, ..., M]; the result is in the activation dtype.

        `mask` is bool [B, ...], True at what is real; the rest has no part in the
        statistics.

        Raises:
          ValueError: the last dim of `x` is not M; the mask is not bool or does not
            fit.
        """
        check_trailing_dims(ctx, x, [self.model_dims])
        x = zero_padding(ctx, tf.cast(x, tf.float32), mask)
        places = list(range(1, x.shape.rank - 1))
        centred = zero_padding(ctx, x - self._means(x, mask, places), mask)
        variance = self._means(tf.square(centred), mask, places)
        y = centred * tf.math.rsqrt(variance + self.epsilon)
        return ctx.cast(y * theta.scale + theta.bias)

    def _means(self, x: tf.Tensor, mask, places: list[int]) -> tf.Tensor:
        """The means of each row's groups, at each of their features: [B, 1, ..., M]."""
        # Places first: features may be split unlike groups, and the tensor that is then
        # left to reshard is small.
        means = tf.reduce_sum(x, places) / _count(x, mask, places)
        means = tf.reshape(means, [shape_of(x)[0], self.num_groups, -1])
        mean = tf.reduce_mean(means, axis=-1, keepdims=True)
        wide = tf.broadcast_to(mean, shape_of(means))
        return tf.reshape(wide, [shape_of(x)[0], *[1] * len(places), self.model_dims])


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (Ioffe and Szegedy 2015).

    In training mean and variance are those of each feature over the entire batch, on
    however many devices; in evaluation, running averages of them. These are weights
    that no optimizer trains, see `WeightSpec.statistic_decay`; so a layer is used once
    a step. In a pipeline each microbatch has its own mean and variance, and the
    averages take the microbatches' mean; so they do with groups of rows.

    Args:
      model_dims: M.
      decay: the decay of the running averages, in [0, 1).
      epsilon: added to the variance.
      group_size: how many consecutive rows share statistics; None: all rows do.
        Groups that lie on one device each need no communication.

    Raises:
      ValueError: the decay or the group size is out of range.
    """

    model_dims: int = bounded(at_least=1)
    decay: float = bounded(0.99, at_least=0, below=1)
    epsilon: float = bounded(1e-5, at_least=0)
    group_size: int | None = bounded(None, at_least=1)

    def weights(self) -> NestedMap:
        def running(value):
            spec = per_feature(self.model_dims, value)
            return dataclasses.replace(spec, statistic_decay=self.decay)

        return NestedMap(
            bias=per_feature(self.model_dims),
            scale=per_feature(self.model_dims, 1.0),
            mean=running(0.0),
            variance=running(1.0),
        )

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Normalizes `x` [B, ..., M]; the result is in the activation dtype.

        `mask` is bool [B, ...], True at what is real; the rest has no part in the
        statistics.

        Raises:
          ValueError: the last dim of `x` is not M; the mask is not bool or does not
            fit; in training, groups do not divide B.
        """
        check_trailing_dims(ctx, x, [self.model_dims])
        x = zero_padding(ctx, tf.cast(x, tf.float32), mask)
        mean, variance = theta.mean, theta.variance
        if ctx.mode is Mode.TRAIN:
            mean = self._means(ctx, x, mask)
            square = tf.square(zero_padding(ctx, x - mean, mask))
            variance = self._means(ctx, square, mask)
        y = (x - mean) * tf.math.rsqrt(variance + self.epsilon)
        y = y * theta.scale + theta.bias
        if ctx.mode is Mode.TRAIN:
            y = as_gradient(y, theta.mean, self._over_groups(mean))
            y = as_gradient(y, theta.variance, self._over_groups(variance))
        return ctx.cast(y)

    def _means(self, ctx: Context, x: tf.Tensor, mask) -> tf.Tensor:
        """Of each feature: of all rows, [M], or of each row's group, [B, 1, ..., M]."""
        places = list(range(x.shape.rank - 1))
        if self.group_size is None:
            return tf.reduce_sum(x, places) / _count(x, mask, places)
        rows, size = x.shape[0], self.group_size
        if rows % size:
            raise ValueError(
                f"{ctx.path}: groups of {size} rows do not divide the {rows} of the "
                "batch; choose a group_size that does, or None for one group"
            )
        x = tf.reshape(x, [rows // size, size, *x.shape[1:]])
        if mask is not None:
            mask = tf.reshape(mask, [rows // size, size, *mask.shape[1:]])
        places = list(range(1, x.shape.rank - 1))
        means = tf.reduce_sum(x, places) / _count(x, mask, places)
        wide = [rows // size, size, self.model_dims]
        means = tf.broadcast_to(means[:, None], wide)
        return tf.reshape(means, [rows, *[1] * (len(places) - 1), self.model_dims])

    def _over_groups(self, means: tf.Tensor) -> tf.Tensor:
        """The mean of what `_means` gives: groups are of one size."""
        if self.group_size is None:
            return means
        return tf.reduce_mean(tf.reshape(means, [-1, self.model_dims]), 0)


def _over_rms(x: tf.Tensor, epsilon: float) -> tf.Tensor:
    mean_square = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
    return x * tf.math.rsqrt(mean_square + epsilon)


def _count(x: tf.Tensor, mask: tf.Tensor | None, places: list[int]) -> tf.Tensor:
    """How many places are real, at least 1: float32, [B, 1] or, over rows too, [1]."""
    if mask is None:
        return tf.constant(float(math.prod(x.shape[i] for i in places)))
    count = tf.reduce_sum(tf.cast(mask, tf.float32), places)
    return tf.maximum(count, 1.0)[..., None]
