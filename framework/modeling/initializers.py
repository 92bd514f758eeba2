"""First values of weights, from random numbers that partition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling import random


class Initializer:
    """A frozen description of how a weight starts."""

    def __call__(
        self, key: tf.Tensor, shape: Sequence[int], dtype: tf.DType, stack_rank: int = 0
    ) -> tf.Tensor:
        """The first value.

        Args:
          key: uint32 [2] random key.
          shape: the weight's shape.
          dtype: the weight's dtype.
          stack_rank: leading dims that stack equal layers; not part of the fan-in.
        """
        raise NotImplementedError


@gin.register
@dataclasses.dataclass(frozen=True)
class Constant(Initializer):
    """Every element is `value`."""

    value: float = 0.0

    def __call__(self, key, shape, dtype, stack_rank=0):
        return tf.fill(shape, tf.cast(self.value, dtype))


@gin.register
@dataclasses.dataclass(frozen=True)
class Normal(Initializer):
    """Gaussian with standard deviation `stddev`."""

    stddev: float = 1.0

    def __call__(self, key, shape, dtype, stack_rank=0):
        return tf.cast(self.stddev * random.normal(key, shape), dtype)


@gin.register
@dataclasses.dataclass(frozen=True)
class FanIn(Initializer):
    """Gaussian with variance `scale / fan_in`.

    Args:
      scale: 1 keeps the variance of a linear layer's input.
      in_dims: how many leading dims (after stacked ones) are contracted with the input.
    """

    scale: float = 1.0
    in_dims: int = 1

    def __call__(self, key, shape, dtype, stack_rank=0):
        fan_in = math.prod(shape[stack_rank : stack_rank + self.in_dims])
        stddev = math.sqrt(self.scale / fan_in)
        return tf.cast(stddev * random.normal(key, shape), dtype)
