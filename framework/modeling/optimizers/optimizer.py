"""Optimizers: pure functions of step, gradients, weights and slots.

Slots are what an optimizer remembers of each weight. They are described by the same
`WeightSpec`s as weights, with the same logical dim names, so one sharding plan splits
both. Leading `STACK_DIM`, `STAGE_DIM` and `EXPERT_DIM` dims stack weights of equal
layers: reductions over a weight are made for each stacked layer separately, so that
stacking changes no result. Adafactor is in `adafactor.py`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.modeling.optimizers.schedules import Schedule, set_schedule
from meshwright.framework.nested_map import NestedMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerUpdate:
    """The result of an update.

    Args:
      theta: the new weights, in the weights' dtypes.
      slots: the new slots, float32.
      metrics: float32 scalars: `learning_rate`; `grad_norm`, over all gradients, before
        clipping; `weight_norm`, over all weights, after the update. Running statistics
        count in neither.
    """

    theta: NestedMap
    slots: NestedMap
    metrics: NestedMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """The result of an update for a single weight."""

    weight: tf.Tensor
    slots: NestedMap


_TO_DEFINE = "an optimizer defines slots_of(spec) and rule(step, rate)"
WeightRule = Callable[[tf.Tensor, tf.Tensor, NestedMap, WeightSpec], WeightUpdate]
"""(gradient, weight, slots, spec) -> WeightUpdate; all tensors are float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Checked):
    """Base of optimizers: subclasses define a weight's slots (`slots_of`) and `rule`.

    Both are for trained weights only: running statistics
    (`WeightSpec.statistic_decay`) have no slots and follow their own rule.

    Args:
      learning_rate: a schedule by step, or a number.
      clip_global_norm: gradients are scaled by min(1, clip_global_norm / norm), where
        norm is the L2 norm of all of them together; None for no clipping.

    Raises:
      ValueError: `learning_rate` is no schedule or number, or `clip_global_norm` is
        not positive.
    """

    reads_dims: ClassVar[bool] = False
    """Whether an update depends on how a weight's elements are divided into dims."""

    learning_rate: Schedule | float
    clip_global_norm: float | None = bounded(None, above=0)

    def __post_init__(self):
        super().__post_init__()
        set_schedule(self, "learning_rate")

    def slots(self, specs: NestedMap) -> NestedMap:
        """Nested map with a `NestedMap` of slot specs under each weight's path.

        Raises:
          ValueError: a slot would begin with its weight's random numbers.
        """

        def of(path: str, spec: WeightSpec) -> NestedMap:
            slots = NestedMap() if spec.is_statistic else self.slots_of(spec)
            for name, slot in slots.items():
                if slot is spec:
                    raise ValueError(
                        f"{type(self).__name__}.slots_of returned for {path!r} the "
                        f"weight's own spec as slot {name!r}, which would begin with "
                        "random numbers: return mw.slot_spec(spec)"
                    )
            return slots

        return specs.map_with_path(of)

    def update(
        self,
        step: tf.Tensor,
        grads: NestedMap,
        theta: NestedMap,
        slots: NestedMap,
        specs: NestedMap,
    ) -> OptimizerUpdate:
        """An update, computed in float32.

        Args:
          step: int32 scalar, the number of updates already made.
          grads: gradients of the loss, one for each weight.
          theta: the weights.
          slots: their slots, as described by `slots(specs)`.
          specs: the specs of the weights.

        Raises:
          TypeError: `rule` returned something other than a `WeightUpdate` of tensors.
          ValueError: a weight has no gradient, the maps do not match, or `rule`
            returned other slots, or another shape or dtype of a weight or slot.
        """
        with tf.name_scope("optimizer"):
            grads = grads.map_with_path(_float32_gradient)
            values = theta.map(lambda w: tf.cast(w, tf.float32))
            rate = self.learning_rate(step)
            metrics = NestedMap(
                learning_rate=rate,
                grad_norm=global_norm(_trained(grads, specs)),
            )
            if self.clip_global_norm is not None:
                # The maximum keeps the factor at 1 for a norm of zero and hides no NaN.
                limit = self.clip_global_norm
                factor = limit / tf.maximum(metrics.grad_norm, limit)
                grads = grads.map(
                    lambda g, s: g if s.is_statistic else g * factor, specs
                )
            new, new_slots = self.apply(step, rate, grads, values, slots, specs)
            # Of the new weights: where nothing orders a read of the old ones before the
            # update, XLA's CPU compiler copies them all.
            metrics.weight_norm = global_norm(_trained(new, specs))
            return OptimizerUpdate(
                theta=new.map(_stored, theta, specs), slots=new_slots, metrics=metrics
            )

    def apply(
        self,
        step: tf.Tensor,
        rate: tf.Tensor,
        grads: NestedMap,
        values: NestedMap,
        slots: NestedMap,
        specs: NestedMap,
    ) -> tuple[NestedMap, NestedMap]:
        """New values and slots of all weights; arguments as of `update`, in float32."""
        rule = self.rule(step, rate)

        def update_weight(path, value, grad, slot, spec):
            # The path names the ops, here and in the compiled program.
            with tf.name_scope(path.replace(".", "/")):
                if spec.is_statistic:
                    return WeightUpdate(weight=followed(grad, value, spec), slots=slot)
                update = rule(grad, value, slot, spec)
                self._check_update(path, update, value, slot)
                return update

        updates = values.map_with_path(update_weight, grads, slots, specs)
        return updates.map(lambda u: u.weight), updates.map(lambda u: u.slots)

    def _check_update(
        self, path: str, update: Any, weight: tf.Tensor, slots: NestedMap
    ) -> None:
        """Checks what a rule returned for the weight `path`.

        Raises:
          TypeError: it is no `WeightUpdate` of a tensor and a nested map of tensors.
          ValueError: it has other slots than `slots_of`, or a tensor has another shape
            or dtype than before.
        """
        rule = f"{type(self).__name__}.rule"
        if not isinstance(update, WeightUpdate):
            raise TypeError(
                f"{rule} returned a {type(update).__name__} for {path!r}; return "
                "WeightUpdate(weight=, slots=)"
            )
        if not isinstance(update.slots, NestedMap):
            raise TypeError(
                f"{rule} returned a {type(update.slots).__name__} as the slots of "
                f"{path!r}; return a NestedMap"
            )
        new, old = (dict(s.items_by_path()) for s in (update.slots, slots))
        if new.keys() != old.keys():
            raise ValueError(
                f"{rule} returned the slots {sorted(new)} for {path!r}; slots_of has "
                f"{sorted(old)}"
            )
        _check_like(update.weight, weight, f"{rule} returned the weight {path!r}")
        for name, slot in new.items():
            what = f"{rule} returned the slot {name!r} of {path!r}"
            _check_like(slot, old[name], what, ", or let slots_of describe it so")

    def slots_of(self, spec: WeightSpec) -> NestedMap:
        """Specs of the slots of a weight."""
        raise NotImplementedError(f"{type(self).__name__}.slots_of: {_TO_DEFINE}")

    def rule(self, step: tf.Tensor, rate: tf.Tensor) -> WeightRule:
        """The update rule of a weight, for values that depend only on the step."""
        raise NotImplementedError(f"{type(self).__name__}.rule: {_TO_DEFINE}")


def _check_like(new: Any, old: tf.Tensor, what: str, otherwise: str = "") -> None:
    """Checks that `new` has the shape and dtype of `old`; `what` begins messages."""
    if not tf.is_tensor(new):
        raise TypeError(f"{what} as a {type(new).__name__}; return a tensor")
    if new.dtype != old.dtype or not old.shape.is_compatible_with(new.shape):
        was, now = (f"{t.dtype.name}{t.shape.as_list()}" for t in (old, new))
        raise ValueError(
            f"{what} as {now}, but it was {was}: an update keeps shapes and dtypes; "
            f"return {was}{otherwise}"
        )


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The L2 norm over all elements of all tensors, a float32 scalar."""
    squares = [tf.reduce_sum(tf.square(t)) for t in tensors]
    return tf.sqrt(tf.add_n(squares))


def slot_spec(spec: WeightSpec, without_dim: int | None = None) -> WeightSpec:
    """A float32 slot that starts at zero, like `spec` or like it without a dim.

    Args:
      spec: of the weight.
      without_dim: number of the dim that the slot lacks, negative ones from the end;
        None: it has all.

    Raises:
      ValueError: the weight has no such dim.
      TypeError: `without_dim` is no integer.
    """
    rank = len(spec.shape)
    left_out = None if without_dim is None else operator.index(without_dim)
    if left_out is not None and not -rank <= left_out < rank:
        raise ValueError(
            f"slot_spec: without_dim is {without_dim}, but the weight has {rank} dims, "
            f"({', '.join(map(str, spec.dims))}): give a number from {-rank} to "
            f"{rank - 1}"
        )
    kept = [i for i in range(rank) if left_out is None or i != left_out % rank]
    return WeightSpec(
        shape=tuple(spec.shape[i] for i in kept),
        dims=tuple(spec.dims[i] for i in kept),
        initializer=Constant(0.0),
    )


def one_minus_power(beta: float, count: tf.Tensor) -> tf.Tensor:
    """1 - beta ** count, for Adam's bias correction; beta in [0, 1), float32 count."""
    # A plain subtraction leaves float32 few digits while the power is near 1.
    return -tf.math.expm1(count * math.log(beta)) if beta else tf.ones([])


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent, optionally with momentum m = momentum * m + grad.

    Args:
      learning_rate: a schedule by step, or a number.
      clip_global_norm: limit of the gradients' global norm.
      momentum: in [0, 1); 0 needs no slots.
      nesterov: step along momentum * m + grad, instead of along m.

    Raises:
      ValueError: a field is out of range, or `nesterov` without momentum.
    """

    momentum: float = bounded(0.0, at_least=0, below=1)
    nesterov: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("SGD.nesterov needs momentum; set SGD.momentum above 0")

    def slots_of(self, spec):
        return NestedMap(m=slot_spec(spec)) if self.momentum else NestedMap()

    def rule(self, step, rate):
        def update(grad, weight, slots, spec):
            if not self.momentum:
                return WeightUpdate(weight=weight - rate * grad, slots=NestedMap())
            m = self.momentum * slots.m + grad
            along = self.momentum * m + grad if self.nesterov else m
            return WeightUpdate(weight=weight - rate * along, slots=NestedMap(m=m))

        return update


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) with AdamW's decoupled weight decay.

    `weight_decay` subtracts learning rate * weight_decay * weight (Loshchilov & Hutter
    2019, algorithm 2), from weights with at least two dims besides stacked ones: not
    from biases and normalization scales.

    Args:
      learning_rate: a schedule by step, or a number.
      clip_global_norm: limit of the gradients' global norm.
      beta1: decay of the mean of gradients, in [0, 1).
      beta2: decay of the mean of their squares, in [0, 1).
      epsilon: added to the root of the mean of squares.
      weight_decay: 0 is plain Adam.

    Raises:
      ValueError: a field is out of range.
    """

    beta1: float = bounded(0.9, at_least=0, below=1)
    beta2: float = bounded(0.999, at_least=0, below=1)
    epsilon: float = bounded(1e-8, above=0)
    weight_decay: float = bounded(0.0, at_least=0)

    def slots_of(self, spec):
        return NestedMap(m=slot_spec(spec), v=slot_spec(spec))

    def rule(self, step, rate):
        count = tf.cast(step, tf.float32) + 1.0
        m_scale = 1.0 / one_minus_power(self.beta1, count)
        v_scale = 1.0 / one_minus_power(self.beta2, count)

        def update(grad, weight, slots, spec):
            m = self.beta1 * slots.m + (1.0 - self.beta1) * grad
            v = self.beta2 * slots.v + (1.0 - self.beta2) * tf.square(grad)
            along = m_scale * m / (tf.sqrt(v_scale * v) + self.epsilon)
            if self.weight_decay and spec.is_matrix:
                along += self.weight_decay * weight
            return WeightUpdate(weight=weight - rate * along, slots=NestedMap(m=m, v=v))

        return update


def _trained(tensors: NestedMap, specs: NestedMap) -> list[tf.Tensor]:
    """The tensors of weights that are no running statistics."""
    pairs = zip(tensors.leaves(), specs.leaves(), strict=True)
    return [tensor for tensor, spec in pairs if not spec.is_statistic]


def followed(grad: tf.Tensor, value: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    """The new value of a running statistic, whose "gradient" is its newest value."""
    if spec.statistic_decay in (0, 1):  # Such a product with infinity is not a number.
        return value if spec.statistic_decay else grad
    return spec.statistic_decay * value + (1.0 - spec.statistic_decay) * grad


def _stored(value: tf.Tensor, weight: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    """A new value as the weight has it."""
    if spec.constraint is not None:
        value = spec.constraint(value)
    return tf.cast(value, weight.dtype)


def _float32_gradient(path: str, grad: tf.Tensor | None) -> tf.Tensor:
    if grad is None:
        raise ValueError(
            f"weight {path!r} has no gradient: the loss does not depend on it; use the "
            "weight or remove it from the weights to train"
        )
    return tf.cast(grad, tf.float32)
