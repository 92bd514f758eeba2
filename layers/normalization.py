"""Normalization over the model dim, with float32 statistics.

Dims: M model.
"""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.linear import check_trailing_dims


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich 2019).

    Args:
      model_dims: M.
      epsilon: added to the mean square.
    """

    model_dims: int
    epsilon: float = 1e-6

    def weights(self) -> NestedMap:
        return NestedMap(scale=_per_feature(self.model_dims, 1.0))

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes `x` [..., M]; the result is in the activation dtype.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        check_trailing_dims(ctx, x, [self.model_dims])
        x = tf.cast(x, tf.float32)
        return ctx.cast(_over_rms(x, self.epsilon) * theta.scale)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al. 2016).

    Args:
      model_dims: M.
      epsilon: added to the variance.
    """

    model_dims: int
    epsilon: float = 1e-6

    def weights(self) -> NestedMap:
        return NestedMap(
            bias=_per_feature(self.model_dims, 0.0),
            scale=_per_feature(self.model_dims, 1.0),
        )

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes `x` [..., M]; the result is in the activation dtype.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        check_trailing_dims(ctx, x, [self.model_dims])
        x = tf.cast(x, tf.float32)
        centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        return ctx.cast(_over_rms(centred, self.epsilon) * theta.scale + theta.bias)


def _per_feature(model_dims: int, value: float) -> WeightSpec:
    # A name of its own: split like a matrix's model dim it would move between the mesh
    # axes of weights and of activations at every use, to save a few bytes.
    return WeightSpec(
        shape=(model_dims,), dims=("features",), initializer=Constant(value)
    )


def _over_rms(x: tf.Tensor, epsilon: float) -> tf.Tensor:
    mean_square = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
    return x * tf.math.rsqrt(mean_square + epsilon)
