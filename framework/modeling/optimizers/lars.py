"""LARS: each weight's rate follows from its norm and that of its gradient."""

from __future__ import annotations

import dataclasses
import enum

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.modeling.optimizers.optimizer import (
    Optimizer,
    WeightUpdate,
    slot_spec,
)
from meshwright.framework.nested_map import NestedMap


@gin.constants_from_enum
class MomentumOf(enum.Enum):
    """What momentum adds up: updates, each at the rate of its step, or gradients.

    With gradients, the current step's rate scales all of them. As long as no rate
    changes both are the same.
    """

    UPDATES = "updates"
    GRADIENTS = "gradients"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, algorithm 1).

    A weight of two dims or more, besides stacked ones, has the rate

        learning_rate * trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)

    with L2 norms over the weight, and is moved along g + weight_decay * w. Where |w| or
    |g| is 0 its rate is `learning_rate`. Biases and normalization scales always have
    that rate, and no decay.

    Args:
      learning_rate: a schedule by step, or a number.
      clip_global_norm: limit of the gradients' global norm.
      momentum: in [0, 1).
      momentum_of: `UPDATES` as in the paper, m = momentum * m + rate * along; or
        `GRADIENTS`, m = momentum * m + along, and a step of rate * m: TensorFlow's
        (tf.contrib.opt.LARSOptimizer), with which Google ran MLPerf 0.6.
      trust_coefficient: the paper's eta.
      weight_decay: the paper's beta.
      epsilon: see above.

    Raises:
      ValueError: a field is out of range.
    """

    momentum: float = bounded(0.9, at_least=0, below=1)
    momentum_of: MomentumOf = MomentumOf.UPDATES
    trust_coefficient: float = bounded(0.001, above=0)
    weight_decay: float = bounded(0.0, at_least=0)
    epsilon: float = bounded(0.0, at_least=0)

    def slots_of(self, spec):
        return NestedMap(m=slot_spec(spec))

    def rule(self, step, rate):
        def update(grad, weight, slots, spec):
            own_rate, along = rate, grad
            if spec.is_matrix:
                own_rate *= self._trust(grad, weight, spec)
                along += self.weight_decay * weight
            if self.momentum_of is MomentumOf.UPDATES:
                m = change = self.momentum * slots.m + own_rate * along
            else:
                m = self.momentum * slots.m + along
                change = own_rate * m
            return WeightUpdate(weight=weight - change, slots=NestedMap(m=m))

        return update

    def _trust(self, grad: tf.Tensor, weight: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
        """The factor that scales the rate; broadcasts to the weight's shape."""
        size, slope = _norm(weight, spec), _norm(grad, spec)
        over = slope + self.weight_decay * size + self.epsilon
        trust = self.trust_coefficient * tf.math.divide_no_nan(size, over)
        return tf.where((size > 0) & (slope > 0), trust, 1.0)


def _norm(tensor: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    """The norm of each stacked layer separately; its dims are kept with size 1."""
    dims = list(range(spec.stack_rank, len(spec.shape)))
    return tf.sqrt(tf.reduce_sum(tf.square(tensor), dims, keepdims=True))
