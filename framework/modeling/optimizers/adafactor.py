"""Adafactor: second moments kept as the outer product of a row and a column."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.modeling.optimizers.optimizer import (
    Optimizer,
    WeightUpdate,
    one_minus_power,
    slot_spec,
)
from meshwright.framework.nested_map import NestedMap

_SQUARE_FLOOR = 1e-30
"""The paper's epsilon 1, added to squared gradients."""

_SCALE_FLOOR = 1e-3
"""The paper's epsilon 2, the least scale of a weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactoredDims:
    """The two dims of a weight whose squared gradients are factored.

    `v_row` is averaged over `largest`, `v_col` over `second`.
    """

    largest: int
    second: int


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern 2018, algorithms 4 and 5).

    For a weight of two or more dims (besides stacked ones) the mean V of squared
    gradients is kept as averages R and C over its two largest dims and read as
    R C / mean(R); other dims hold independent matrices. The mean of R is over the dim
    that C was averaged over, as in the paper's section 3. Lingvo takes it over the last
    dim of R, which is a different dim if a weight's largest dim does not come last;
    such weights get other updates there.

    Args:
      learning_rate: a schedule by step, or a number; relative to the weight's scale
        with `multiply_by_parameter_scale`. The paper's is
        min(0.01, 1 / sqrt(step + 1)).
      clip_global_norm: limit of the gradients' global norm.
      beta1: decay of the mean of updates, in [0, 1); 0 keeps none, as in the paper.
      beta2: decay of V in (0, 1), constant but for Adam's bias correction, which makes
        it beta2 (1 - beta2 ** (t - 1)) / (1 - beta2 ** t) (section 7.1); None for the
        paper's 1 - t ** -decay_exponent (section 7.2).
      decay_exponent: see `beta2`.
      decay_offset: t is the number of updates, including the present one, minus this
        offset, and at least 1. If it is the step at which fine-tuning starts, V starts
        over.
      clipping_threshold: updates of a weight are scaled down to at most this root mean
        square (section 6); None for no clipping.
      multiply_by_parameter_scale: multiply updates by the root mean square of the
        weight, or by 0.001 if that is larger (section 8).
      min_dim_size_to_factor: factor only if the two largest dims have at least this
        size; None to factor no weight.

    Raises:
      ValueError: a field is out of range.
    """

    reads_dims: ClassVar[bool] = True

    beta1: float = bounded(0.0, at_least=0, below=1)
    beta2: float | None = bounded(None, above=0, below=1)
    decay_exponent: float = bounded(0.8, above=0)
    decay_offset: int = bounded(0)
    clipping_threshold: float | None = bounded(1.0, above=0)
    multiply_by_parameter_scale: bool = True
    min_dim_size_to_factor: int | None = bounded(128, at_least=1)

    def slots_of(self, spec):
        factored = self.factored_dims(spec)
        if factored is None:
            slots = NestedMap(v=slot_spec(spec))
        else:
            slots = NestedMap(
                v_row=slot_spec(spec, without_dim=factored.largest),
                v_col=slot_spec(spec, without_dim=factored.second),
            )
        if self.beta1:
            slots.m = slot_spec(spec)
        return slots

    def factored_dims(self, spec: WeightSpec) -> FactoredDims | None:
        """The two largest dims that do not stack layers, the later of equals first.

        None if there are fewer than two, or if they are smaller than
        `min_dim_size_to_factor`.
        """
        dims = range(spec.stack_rank, len(spec.shape))
        if len(dims) < 2 or self.min_dim_size_to_factor is None:
            return None
        second, largest = sorted(dims, key=lambda dim: (spec.shape[dim], dim))[-2:]
        if spec.shape[second] < self.min_dim_size_to_factor:
            return None
        return FactoredDims(largest=largest, second=second)

    def rule(self, step, rate):
        decay = self._decay(step)

        def update(grad, weight, slots, spec):
            new_slots = self._second_moments(decay, grad, slots, spec)
            along = grad * self._rsqrt(new_slots, spec)
            if self.clipping_threshold is not None:
                excess = _root_mean_square(along, spec) / self.clipping_threshold
                along /= tf.maximum(excess, 1.0)
            if self.multiply_by_parameter_scale:
                along *= tf.maximum(_root_mean_square(weight, spec), _SCALE_FLOOR)
            along *= rate
            if self.beta1:
                along = self.beta1 * slots.m + (1.0 - self.beta1) * along
                new_slots.m = along
            return WeightUpdate(weight=weight - along, slots=new_slots)

        return update

    def _decay(self, step: tf.Tensor) -> tf.Tensor:
        """Decay of the second moments, a float32 scalar."""
        count = tf.cast(step, tf.float32) + (1 - self.decay_offset)
        count = tf.maximum(count, 1.0)
        if self.beta2 is not None:
            before = one_minus_power(self.beta2, count - 1.0)
            return self.beta2 * before / one_minus_power(self.beta2, count)
        return 1.0 - tf.pow(count, -self.decay_exponent)

    def _second_moments(
        self, decay: tf.Tensor, grad: tf.Tensor, slots: NestedMap, spec: WeightSpec
    ) -> NestedMap:
        square = tf.square(grad) + _SQUARE_FLOOR
        factored = self.factored_dims(spec)
        if factored is None:
            return NestedMap(v=_mix(decay, slots.v, square))
        row = tf.reduce_mean(square, factored.largest)
        col = tf.reduce_mean(square, factored.second)
        return NestedMap(
            v_row=_mix(decay, slots.v_row, row), v_col=_mix(decay, slots.v_col, col)
        )

    def _rsqrt(self, slots: NestedMap, spec: WeightSpec) -> tf.Tensor:
        """1 / sqrt(V); broadcasts to the weight's shape."""
        factored = self.factored_dims(spec)
        if factored is None:
            return tf.math.rsqrt(slots.v)
        row = tf.expand_dims(slots.v_row, factored.largest)
        col = tf.expand_dims(slots.v_col, factored.second)
        mean = tf.reduce_mean(row, factored.second, keepdims=True)
        return tf.math.rsqrt(row / mean) * tf.math.rsqrt(col)


def _mix(decay: tf.Tensor, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    return decay * old + (1.0 - decay) * new


def _root_mean_square(tensor: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    """The RMS of each stacked layer separately; its dims are kept with size 1."""
    dims = list(range(spec.stack_rank, len(spec.shape)))
    return tf.sqrt(tf.reduce_mean(tf.square(tensor), dims, keepdims=True))
