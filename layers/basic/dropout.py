"""Dropout from random numbers that partition."""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context, Layer, Mode
from meshwright.framework.modeling.recompute import (
    computed_once,
    gradient_computed_once,
)
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

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        read_by_products: bool = False,
        dead_at_zero: bool = False,
    ) -> tf.Tensor:
        """`x` of any static shape and float dtype, with some elements dropped.

        Which elements are dropped depends only on the context's key. In `Mode.EVAL`, or
        at rate 0, the result is `x` itself and no key is needed.

        Args:
          ctx: context.
          theta: no weights.
          x: the tensor.
          read_by_products: whether products read the result; otherwise they read its
            gradient, as those of `x` are that made it. Either is computed once, and
            not again in each of them.
          dead_at_zero: whether what made `x` has no gradient where `x` is 0, as a ReLU
            or a softmax. Then the result tells what was dropped, and the backward
            pass draws no numbers.

        Raises:
          ValueError: dropout is to happen but the context has no key.
        """
        del theta
        if not self.drops(ctx):
            return x
        if not read_by_products:
            x = gradient_computed_once(x)

        def dropped(x):
            keep = random.keep_mask(ctx.random_key(), self.rate, x.shape)
            y = self.scaled(x, keep)
            y = computed_once(y)[0] if read_by_products else y
            return y, lambda dy: self.scaled(dy, y != 0)

        return tf.custom_gradient(dropped)(x) if dead_at_zero else dropped(x)[0]

    def drops(self, ctx: Context) -> bool:
        """Whether anything is dropped."""
        return ctx.mode is not Mode.EVAL and self.rate > 0

    def scaled(self, x: tf.Tensor, keep: tf.Tensor) -> tf.Tensor:
        """`x` with zeros where `keep` is False, scaled to keep the mean."""
        # In float32: rounded to 16 bits, the scale would shift the mean.
        scaled = tf.cast(tf.cast(x, tf.float32) * (1 / (1 - self.rate)), x.dtype)
        return tf.where(keep, scaled, tf.zeros([], x.dtype))
