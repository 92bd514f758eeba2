"""Keras's optimizers for any task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.modeling.optimizers.optimizer import Optimizer, followed
from meshwright.framework.modeling.optimizers.schedules import Schedule, set_schedule
from meshwright.framework.nested_map import NestedMap

if TYPE_CHECKING:
    from meshwright.tasks.keras.keras_slots import BuiltOptimizer


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasOptimizer(Optimizer):
    """An optimizer of Keras 3; its slots have Keras's names.

    Its slots start afresh: the state of the given optimizer is not used.

    Args:
      optimizer: such as `keras.optimizers.AdamW(0.001)`. In gin, after `import keras`,
        `@keras.optimizers.AdamW()`.
      learning_rate: a schedule by step, or a number, in place of the optimizer's own;
        None for that.
      clip_global_norm: as of `Optimizer`, before what the optimizer clips.

    Raises:
      ValueError: it is no Keras optimizer, or of a kind that cannot be used.
    """

    optimizer: Any
    learning_rate: Schedule | float | None = instance(None, example="@LinearWarmup()")
    clip_global_norm: float | None = bounded(None, above=0)

    def __post_init__(self):
        from keras import optimizers

        given = self.optimizer
        if not isinstance(given, optimizers.Optimizer):
            raise ValueError(
                f"KerasOptimizer.optimizer is {given!r}; it must be a Keras optimizer, "
                "such as keras.optimizers.AdamW(0.001), in gin "
                "@keras.optimizers.AdamW() after `import keras`"
            )
        for refused, text in _refusals(given):
            if refused:
                raise ValueError(f"KerasOptimizer.optimizer {text}")
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", _own_rate(given))
        super().__post_init__()
        set_schedule(self, "learning_rate")

    def slots(self, specs):
        slots = NestedMap()
        for path, spec in self._built(specs).slots.items():
            slots.set_path(".".join(path), spec)
        return slots

    def apply(self, step, rate, grads, values, slots, specs):
        built = self._built(specs)
        paths = [path for path, spec in specs.items_by_path() if not spec.is_statistic]
        by_path = dict(zip(paths, built.trained, strict=True))
        given = {id(v): slots.get_path(".".join(p)) for p, v in built.variables.items()}
        given |= {id(v): values.get_path(path) for path, v in by_path.items()}
        iterations, learning_rate = built.step_and_rate
        given[id(iterations)] = tf.cast(step, iterations.dtype)
        given[id(learning_rate)] = rate
        new = built.applied(given, [grads.get_path(path) for path in paths])

        def weight(path, value, grad, spec):
            if spec.is_statistic:
                return followed(grad, value, spec)
            return new[id(by_path[path])]

        new_slots = [new[id(v)] for v in built.variables_in_order(slots)]
        return values.map_with_path(weight, grads, specs), slots.pack(new_slots)

    def _built(self, specs: NestedMap) -> BuiltOptimizer:
        """The optimizer with variables for these weights; they have no values."""
        items = tuple(
            (path, spec.shape, spec.dims, spec.dtype.name)
            for path, spec in specs.items_by_path()
            if not spec.is_statistic
        )
        from meshwright.tasks.keras.keras_slots import built

        return built(self.optimizer, items)


def _refusals(optimizer: Any) -> Iterator[tuple[bool, str]]:
    """What a Keras optimizer may be, or do, that is not for an update of ours."""
    from keras import optimizers

    yield (
        isinstance(optimizer, optimizers.LossScaleOptimizer),
        "scales the loss, as float16 needs it: give its inner optimizer, and compute "
        "in bfloat16 or float32",
    )
    yield (
        isinstance(optimizer, optimizers.MultiOptimizer),
        "is several optimizers: give a single one",
    )
    yield (
        bool(getattr(optimizer, "_exclude_from_weight_decay", None)),
        "excludes variables from weight decay by themselves: exclude them by var_names",
    )
    yield (
        bool(getattr(optimizer, "gradient_accumulation_steps", None)),
        "accumulates gradients: set Experiment.gradient_accumulation_steps instead",
    )
    yield (
        getattr(optimizer, "loss_scale_factor", None) is not None,
        "has a loss_scale_factor, and nothing scales the loss here: leave it out",
    )
    yield (
        bool(getattr(optimizer, "use_ema", None)),
        "keeps a moving average of the weights: set Experiment.ema = "
        "@ExponentialMovingAverage() instead",
    )


@dataclasses.dataclass(frozen=True)
class _KerasSchedule(Schedule):
    """A schedule of Keras's."""

    rate: Callable[[tf.Tensor], tf.Tensor]

    def __call__(self, step):
        return tf.cast(self.rate(step), tf.float32)


def _own_rate(optimizer: Any) -> Schedule | float:
    """The learning rate of a Keras optimizer."""
    from keras.optimizers.schedules import LearningRateSchedule

    rate = optimizer._learning_rate
    if isinstance(rate, LearningRateSchedule):
        return _KerasSchedule(rate)
    return float(rate.numpy())
