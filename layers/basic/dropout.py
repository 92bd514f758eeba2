"""Dropout from random numbers that partition."""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context, Layer, Mode
from meshwright.framework.nested_map import NestedMap


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropout(Layer):
    """Zeroes elements at random in training and scales the others to keep the mean.

    Args:
      rate: the probability of a zero, in [0, 1).

    Raises:
      ValueError: the rate is out of range.
    """

    rate: float = bounded(0.0, at_least=0, below=1)

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """`x` of any static shape and float dtype, with some elements dropped.

        Which elements are dropped depends only on the context's key. In `Mode.EVAL`, or
        at rate 0, the result is `x` itself and no key is needed.

        Raises:
          ValueError: dropout is to happen but the context has no key.
        """
        del theta
        if ctx.mode is Mode.EVAL or self.rate == 0:
            return x
        keep = random.bernoulli(ctx.random_key(), 1 - self.rate, x.shape)
        # In float32: rounded to 16 bits, the scale would shift the mean.
        scale = tf.cast(keep, tf.float32) / (1 - self.rate)
        return tf.cast(tf.cast(x, tf.float32) * scale, x.dtype)
