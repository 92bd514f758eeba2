"""Learning-rate schedules: few pieces that compose.

A schedule maps the number of updates already made (an int32 scalar tensor, 0 at the
first update) to a float32 scalar tensor. All are traceable and computed in float32.
Wherever a schedule is expected a number stands for a constant schedule.

    LinearWarmup(steps=400, schedule=RsqrtDecay(peak=0.002, start_step=400))
    LinearWarmup(steps=100, schedule=CosineSchedule(
        start_value=3e-4, start_step=100, end_value=3e-5, end_step=1000))
    SequentialSchedule(boundaries=[900], schedules=[
        LinearWarmup(steps=100, schedule=3e-4),
        PolynomialSchedule(start_value=3e-4, end_value=0, end_step=100)])
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import (
    Checked,
    bounded,
    check_number,
    check_value,
)


class Schedule(Checked):
    """Base of schedules: subclass as a frozen, keyword-only dataclass."""

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The value at `step`.

        Args:
          step: integer scalar tensor, the number of updates already made.

        Returns:
          float32 scalar tensor.
        """
        raise NotImplementedError(f"{type(self).__name__}.__call__")


def set_schedule(config: object, field: str) -> None:
    """Makes `config.field` a schedule, if it is a number: a constant schedule.

    Raises:
      ValueError: it is neither, or a negative number.
    """
    name = f"{type(config).__name__}.{field}"
    object.__setattr__(config, field, as_schedule(name, getattr(config, field)))


def as_schedule(name: str, value: object) -> Schedule:
    """`value` if it is a schedule; of a number a constant schedule.

    Raises:
      ValueError: it is neither, or a negative number; `name` says whose value it is.
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        check_value(name, value, at_least=0)
        return ConstantSchedule(value=value)
    raise ValueError(
        f"{name} is {value!r}; it must be a number or a Schedule, such as 0.001 or "
        "CosineSchedule(...), in gin @CosineSchedule()"
    )


def check_boundaries(config: Schedule, field: str) -> None:
    """Raises unless `config.boundaries` increase, one less than entries of a field.

    Raises:
      ValueError: they do not.
    """
    kind, boundaries = type(config).__name__, config.boundaries
    entries = len(getattr(config, field))
    if entries != len(boundaries) + 1:
        raise ValueError(
            f"{kind}.{field} has {entries} entries for {len(boundaries)} boundaries; "
            "give one more than boundaries"
        )
    if list(boundaries) != sorted(set(boundaries)):
        raise ValueError(f"{kind}.boundaries is {boundaries!r}; it must increase")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantSchedule(Schedule):
    """`value` at every step.

    Raises:
      ValueError: `value` is negative.
    """

    value: float = bounded(at_least=0)

    def __call__(self, step):
        return tf.constant(self.value, tf.float32)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearWarmup(Schedule):
    """The smaller of `schedule` and a line from 0 to `schedule`'s value at step 0.

    Made for a schedule that does not rise. If that stays level for `steps` (by its own
    `start_step`), the line meets it where it starts to fall.

    Args:
      steps: updates until the line has the value of `schedule` at step 0.
      schedule: the schedule to follow from there.
      first_step: the number of the first update. 1, so that the update is not lost to a
        rate of zero; 0 for formulas that count from zero, whose first rate is zero.
        Lingvo's LinearRampupSqrtDecay counts 1, 1, 2, 3, ... instead.

    Raises:
      ValueError: `steps` is not positive, `first_step` is negative, or `schedule` is
        no schedule or number.
    """

    steps: int = bounded(above=0)
    schedule: Schedule | float
    first_step: int = bounded(1, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        set_schedule(self, "schedule")

    def __call__(self, step):
        count = tf.cast(step, tf.float32) + self.first_step
        peak = self.schedule(tf.constant(0, tf.int32))
        return tf.minimum(peak * (count / self.steps), self.schedule(step))


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RsqrtDecay(Schedule):
    """`peak * sqrt(start_step / n)` from update number n = `start_step` on.

    Until then it is `peak`. With `LinearWarmup` of `start_step` steps it is the
    schedule of "Attention Is All You Need" (section 5.3), of which `peak` is
    `1 / sqrt(model_dim * start_step)`.

    Args:
      peak: the value until `start_step`.
      start_step: the number of the update where decay starts.
      end_step: the number of the update that ends it; None for no end.
      first_step: the number of the first update, 1 or 0.

    Raises:
      ValueError: `peak` or `first_step` is negative, `start_step` not positive, or
        `end_step` not above `start_step`.
    """

    peak: float = bounded(at_least=0)
    start_step: int = bounded(above=0)
    end_step: int | None = None
    first_step: int = bounded(1, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.end_step is not None:
            check_number(self, "end_step", above=self.start_step)

    def __call__(self, step):
        count = tf.cast(step, tf.float32) + self.first_step
        count = tf.maximum(count, self.start_step)
        if self.end_step is not None:
            count = tf.minimum(count, self.end_step)
        return self.peak * math.sqrt(self.start_step) * tf.math.rsqrt(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Between(Schedule):
    """From `start_value` at `start_step` to `end_value` at `end_step`, level outside.

    Args:
      start_value: the value up to `start_step`.
      end_value: the value from `end_step` on.
      end_step: the step where the change ends.
      start_step: the step where it starts.

    Raises:
      ValueError: a value is negative, or `end_step` is not above `start_step`.
    """

    start_value: float = bounded(at_least=0)
    end_value: float = bounded(at_least=0)
    end_step: float
    start_step: float = bounded(0, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "end_step", above=self.start_step)

    def __call__(self, step):
        passed = tf.cast(step, tf.float32) - self.start_step
        fraction = passed / (self.end_step - self.start_step)
        return self._at(tf.clip_by_value(fraction, 0.0, 1.0))

    def _at(self, fraction: tf.Tensor) -> tf.Tensor:
        """The value after `fraction` (float32 scalar in [0, 1]) of the way."""
        raise NotImplementedError(f"{type(self).__name__}._at")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolynomialSchedule(_Between):
    """A line, or its `power`, between two values.

    The power is of the distance to the end with the lower value, so `power` above 1
    bends towards that end, rising or falling: a fall is `(1 - fraction) ** power`, the
    "poly" decay of segmentation papers. Lingvo takes the power of the distance from the
    start instead, where a fall of power 2 keeps near the higher value.

    Args:
      start_value: the value up to `start_step`.
      end_value: the value from `end_step` on.
      end_step: the step where the change ends.
      start_step: the step where it starts.
      power: 1 for a line.

    Raises:
      ValueError: a value is negative, `end_step` is not above `start_step`, or `power`
        is not positive.
    """

    power: float = bounded(1.0, above=0)

    def _at(self, fraction):
        low = min(self.start_value, self.end_value)
        high = max(self.start_value, self.end_value)
        rises = self.end_value > self.start_value
        from_low = fraction if rises else 1.0 - fraction
        return low + (high - low) * tf.pow(from_low, self.power)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineSchedule(_Between):
    """Half a cosine wave between two values (SGDR, section 3, without restarts).

    Args and errors are those of `PolynomialSchedule`, without `power`.
    """

    def _at(self, fraction):
        weight = 0.5 * (1.0 + tf.cos(math.pi * fraction))
        return self.end_value + (self.start_value - self.end_value) * weight


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialSchedule(_Between):
    """The geometric line between two positive values.

    For a half-life of h steps down to a floor: `end_step = start_step + h *
    log2(start_value / end_value)`; steps may be fractions.

    Args and errors are those of `PolynomialSchedule`, without `power`.
    """

    start_value: float = bounded(above=0)
    end_value: float = bounded(above=0)

    def _at(self, fraction):
        ratio = math.log(self.end_value / self.start_value)
        return self.start_value * tf.exp(ratio * fraction)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class StaircaseSchedule(Schedule):
    """`schedule`, evaluated only every `interval` steps and constant in between.

    Raises:
      ValueError: `interval` is not positive, or `schedule` is no schedule or number.
    """

    schedule: Schedule | float
    interval: int = bounded(above=0)

    def __post_init__(self):
        super().__post_init__()
        set_schedule(self, "schedule")

    def __call__(self, step):
        step = tf.cast(step, tf.int32)
        return self.schedule(step - step % int(self.interval))


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecewiseConstantSchedule(Schedule):
    """`values[i]` from step `boundaries[i - 1]` to the step before `boundaries[i]`.

    Args:
      boundaries: steps where the value changes, increasing.
      values: one more than there are boundaries.

    Raises:
      ValueError: the numbers do not match, boundaries do not increase, or a value is
        negative.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self):
        super().__post_init__()
        check_boundaries(self, "values")
        for i, value in enumerate(self.values):
            check_value(f"PiecewiseConstantSchedule.values[{i}]", value, at_least=0)

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        value = tf.constant(self.values[0], tf.float32)
        for boundary, later in zip(self.boundaries, self.values[1:], strict=True):
            value = tf.where(step >= boundary, tf.constant(later, tf.float32), value)
        return value


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSchedule(Schedule):
    """`value * (n / at_step) ** power` for update number n.

    Args:
      value: the value at update number `at_step`.
      power: negative for a fall: -0.5 is that of `RsqrtDecay`.
      at_step: see `value`.
      first_step: the number of the first update.

    Raises:
      ValueError: `value` is negative, or `at_step` or `first_step` not positive.
    """

    value: float = bounded(at_least=0)
    power: float = bounded()
    at_step: int = bounded(1, above=0)
    first_step: int = bounded(1, above=0)

    def __call__(self, step):
        count = tf.cast(step, tf.float32) + self.first_step
        return self.value * tf.pow(count / self.at_step, self.power)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfSeveral(Schedule):
    """Base of schedules made of several."""

    schedules: Sequence[Schedule | float]

    def __post_init__(self):
        super().__post_init__()
        name = f"{type(self).__name__}.schedules"
        if isinstance(self.schedules, Schedule | numbers.Real) or not self.schedules:
            raise ValueError(
                f"{name} is {self.schedules!r}; it must be a list of schedules or "
                "numbers, in gin [@CosineSchedule(), 0.001]"
            )
        made = (
            as_schedule(f"{name}[{i}]", value) for i, value in enumerate(self.schedules)
        )
        object.__setattr__(self, "schedules", tuple(made))


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialSchedule(_OfSeveral):
    """Schedules one after another; each counts its steps from its own beginning.

    Args:
      schedules: one more than there are boundaries.
      boundaries: the steps where the next schedule begins, increasing.

    Raises:
      ValueError: the numbers do not match, boundaries do not increase, or an entry is
        no schedule or number.
    """

    boundaries: Sequence[int]

    def __post_init__(self):
        super().__post_init__()
        check_boundaries(self, "schedules")

    def __call__(self, step):
        step = tf.cast(step, tf.int32)
        first, *others = self.schedules
        value = first(step)
        for boundary, schedule in zip(self.boundaries, others, strict=True):
            # Before its beginning a schedule is not asked for negative steps.
            later = schedule(tf.maximum(step - boundary, 0))
            value = tf.where(step >= boundary, later, value)
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Combined(_OfSeveral):
    """A single value made of those of one or more schedules, at each step.

    Raises:
      ValueError: an entry is no schedule or number.
    """

    combine: ClassVar[Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]

    def __call__(self, step):
        values = [schedule(step) for schedule in self.schedules]
        return functools.reduce(self.combine, values)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastSchedule(_Combined):
    """The smallest of the values of one or more `schedules`, at each step.

    Raises:
      ValueError: an entry is no schedule or number.
    """

    combine = staticmethod(tf.minimum)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductSchedule(_Combined):
    """The product of the values of one or more `schedules`, at each step.

    Raises:
      ValueError: an entry is no schedule or number.
    """

    combine = staticmethod(tf.multiply)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicSchedule(Schedule):
    """`schedule`, restarted after each cycle (SGDR, section 3: warm restarts).

    Args:
      schedule: a cycle, from its step 0 to `period`.
      period: the steps of the first cycle.
      growth: each cycle has so many times the steps of the one before, and runs
        through `schedule` so much slower, in fractions of steps.

    Raises:
      ValueError: `period` is not positive, `growth` is no whole number of 1 or more, or
        `schedule` is no schedule or number.
    """

    schedule: Schedule | float
    period: int = bounded(above=0)
    growth: int = bounded(1, at_least=1)

    def __post_init__(self):
        super().__post_init__()
        set_schedule(self, "schedule")

    def __call__(self, step):
        step = tf.cast(step, tf.int32)
        if self.growth == 1:
            return self.schedule(step % self.period)
        starts, length = [0], self.period
        while starts[-1] + length <= tf.int32.max:
            starts.append(starts[-1] + length)
            length *= self.growth
        cycle = tf.reduce_sum(tf.cast(step >= tf.constant(starts), tf.int32)) - 1
        passed = tf.cast(step - tf.gather(starts, cycle), tf.float32)
        slower = tf.pow(float(self.growth), tf.cast(cycle, tf.float32))
        return self.schedule(passed / slower)
