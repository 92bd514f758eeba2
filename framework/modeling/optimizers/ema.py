"""A moving average of the weights, for evaluation and export."""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.nested_map import NestedMap


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialMovingAverage(Checked):
    """average = d * average + (1 - d) * weight after every update.

    d is `decay`, or less in early steps, so that the average soon forgets the first
    values: min(decay, (1 + step) / (warmup + step)).

    The average has the structure, shapes and shardings of the weights and starts as
    their first value. Keep it in float32: the small steps are lost in bfloat16.

    Args:
      decay: in [0, 1).
      warmup: 10 as in TF and Lingvo; None for a constant decay.

    Raises:
      ValueError: `decay` is not in [0, 1) or `warmup` is below 1.
    """

    decay: float = bounded(0.9999, at_least=0, below=1)
    warmup: float | None = bounded(10.0, at_least=1)

    def decay_at(self, step: tf.Tensor) -> tf.Tensor:
        """d, a float32 scalar, after `step` (an int32 scalar) earlier updates."""
        decay = tf.constant(self.decay, tf.float32)
        if self.warmup is None:
            return decay
        step = tf.cast(step, tf.float32)
        return tf.minimum(decay, (1.0 + step) / (self.warmup + step))

    def update(
        self, step: tf.Tensor, ema_theta: NestedMap, theta: NestedMap, specs: NestedMap
    ) -> NestedMap:
        """The average after the update that made `theta`, in `ema_theta`'s dtypes.

        Args:
          step: int32 scalar, the number of updates made before that update.
          ema_theta: the average so far.
          theta: the new weights.
          specs: their specs; running statistics are averages already, and are copied.
        """
        fresh = 1.0 - self.decay_at(step)

        def move(average, weight, spec):
            if spec.is_statistic:
                return tf.cast(weight, average.dtype)
            old = tf.cast(average, tf.float32)
            new = old + fresh * (tf.cast(weight, tf.float32) - old)
            return tf.cast(new, average.dtype)

        return ema_theta.map(move, theta, specs)
