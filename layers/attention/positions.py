"""Positions of tokens: rotary positions and what slows them, and sinusoids.

Slower rotary positions are for contexts longer than those of the first training.

Dims: B batch, S sequence, N heads, D head size.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked, bounded


@gin.constants_from_enum
class PositionKind(enum.Enum):
    """How positions enter attention.

    RELATIVE: a bias by head and distance, a weight of each layer. SHARED: one of all
    layers, which `SharedRelativeBias` gives them.
    """

    NONE = "none"
    ROTARY = "rotary"
    RELATIVE = "relative"
    SHARED = "shared"


@gin.constants_from_enum
class InputPositions(enum.Enum):
    """What is added to embeddings, to tell positions apart."""

    NONE = "none"
    SINUSOIDS = "sinusoids"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling(Checked):
    """Base of what changes the frequencies of rotary positions."""

    def scaled(self, frequency: tf.Tensor, *, base: float) -> tf.Tensor:
        """The frequencies to use.

        Args:
          frequency: float32 [D / 2], falling: base^(-2i/D) radians a position.
          base: of rotary positions.

        Returns:
          float32 [D / 2].
        """
        raise NotImplementedError(f"{type(self).__name__}.scaled")

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by, each."""
        return 1.0


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(RotaryScaling):
    """Positions divided by a factor (Chen et al. 2023, section 2.3).

    Args:
      factor: how many times as long the context is.

    Raises:
      ValueError: a factor below 1.
    """

    factor: float = bounded(at_least=1)

    def scaled(self, frequency: tf.Tensor, *, base: float) -> tf.Tensor:
        del base
        return frequency / self.factor


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3.1's: only frequencies with few turns in the first context are slowed.

    A pair of features turns original_length * frequency / 2 pi times within the first
    context. At `high_turns` or more its frequency stays, at `low_turns` or fewer it is
    divided by `factor`, and in between it goes linearly from one to the other.

    Args:
      factor: what low frequencies are divided by.
      low_turns: published as `low_freq_factor`.
      high_turns: published as `high_freq_factor`.
      original_length: tokens of the first training's contexts.

    Raises:
      ValueError: a field is out of range; `high_turns` not above `low_turns`.
    """

    factor: float = bounded(8.0, at_least=1)
    low_turns: float = bounded(1.0, above=0)
    high_turns: float = bounded(4.0, above=0)
    original_length: int = bounded(8192, at_least=1)

    def __post_init__(self):
        super().__post_init__()
        _check_falls("Llama3Scaling", "high_turns", "low_turns", self)

    def scaled(self, frequency: tf.Tensor, *, base: float) -> tf.Tensor:
        del base
        turns = self.original_length * frequency / (2 * math.pi)
        kept = (turns - self.low_turns) / (self.high_turns - self.low_turns)
        return _mixed(frequency, self.factor, kept)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(RotaryScaling):
    """YaRN: low frequencies slowed, and attention sharpened (Peng et al. 2023, 3.4).

    Pairs of features that turn `fast_turns` times or more within the first context keep
    their frequency, those of `slow_turns` or fewer have it divided by `factor`; in
    between it goes linearly in the number of the pair, from whole number to whole one.

    Args:
      factor: what low frequencies are divided by.
      original_length: tokens of the first training's contexts.
      fast_turns: the paper's beta.
      slow_turns: the paper's alpha.
      attention_factor: what rotated queries and keys are multiplied by; None: the
        paper's 0.1 ln(factor) + 1.

    Raises:
      ValueError: a field is out of range; `fast_turns` not above `slow_turns`.
    """

    factor: float = bounded(at_least=1)
    original_length: int = bounded(at_least=1)
    fast_turns: float = bounded(32.0, above=0)
    slow_turns: float = bounded(1.0, above=0)
    attention_factor: float | None = bounded(None, above=0)

    def __post_init__(self):
        super().__post_init__()
        _check_falls("YarnScaling", "fast_turns", "slow_turns", self)

    def scaled(self, frequency: tf.Tensor, *, base: float) -> tf.Tensor:
        half = frequency.shape[0]

        def pair(turns: float) -> float:
            """The number, not whole, of the pair that turns so often."""
            length = self.original_length / (2 * math.pi * turns)
            return half * math.log(length) / math.log(base)

        first = max(math.floor(pair(self.fast_turns)), 0)
        last = min(math.ceil(pair(self.slow_turns)), 2 * half - 1)
        # Where both are the same pair, it is the last to be kept.
        width = max(last - first, 1e-3)
        number = tf.range(half, dtype=tf.float32)
        return _mixed(frequency, self.factor, 1 - (number - first) / width)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


def check_rotary(
    positions: object, head_dim: int, scaling: RotaryScaling | None
) -> None:
    """Checks what rotary positions need, and that they are there to be scaled.

    Raises:
      ValueError: an odd head size; a scaling of other positions.
    """
    if positions is PositionKind.ROTARY and head_dim % 2:
        raise ValueError(
            f"rotary positions turn pairs of features, but head_dim is {head_dim}: "
            "make it even"
        )
    if positions is not PositionKind.ROTARY and scaling is not None:
        raise ValueError(
            f"MultiHeadAttention.rotary_scaling is {scaling}, but positions are "
            f"{positions}, which it does not change: make them PositionKind.ROTARY, or "
            "leave it out"
        )


def rotate(
    x: tf.Tensor,
    positions: tf.Tensor,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
) -> tf.Tensor:
    """Rotary positions (Su et al. 2021): feature pairs turned by angles of position.

    Feature i of the first half pairs with feature i of the second; the pair turns by
    position * base^(-2i/D). The dot product of two rotated vectors depends on the
    difference of their positions only. The halves are those of published weights of
    Llama and its like; the paper pairs neighbours.

    Args:
      x: [B, S, N, D], D even.
      positions: int32 [B, S] or [1, S].
      base: sets the longest wave length, 2 pi * base.
      scaling: what changes the frequencies, for long contexts.

    Returns:
      `x` rotated, in its dtype; angles are computed in float32.
    """
    half = x.shape[-1] // 2
    frequency = tf.exp(tf.range(half, dtype=tf.float32) * (-math.log(base) / half))
    if scaling is not None:
        frequency = scaling.scaled(frequency, base=base)
    angle = tf.cast(positions, tf.float32)[:, :, None, None] * frequency
    cos, sin = tf.cos(angle), tf.sin(angle)
    if scaling is not None:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    first, second = tf.split(tf.cast(x, tf.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return tf.cast(tf.concat(turned, axis=-1), x.dtype)


def sinusoids(
    positions: tf.Tensor, dims: int, *, max_timescale: float = 10000.0
) -> tf.Tensor:
    """Sines and then cosines of positions (Vaswani et al. 2017, section 3.5).

    Args:
      positions: numbers of any shape.
      dims: M, even.
      max_timescale: wave lengths go from 2 pi up to near 2 pi times this.

    Returns:
      float32 [..., M].
    """
    half = dims // 2
    slowing = -math.log(max_timescale) / half
    frequency = tf.exp(tf.range(half, dtype=tf.float32) * slowing)
    angle = tf.cast(positions, tf.float32)[..., None] * frequency
    return tf.concat([tf.sin(angle), tf.cos(angle)], axis=-1)


def _mixed(frequency: tf.Tensor, factor: float, kept: tf.Tensor) -> tf.Tensor:
    """Frequencies of which a part in [0, 1] is kept, and the rest divided."""
    kept = tf.clip_by_value(kept, 0.0, 1.0)
    return frequency * (kept + (1 - kept) / factor)


def _check_falls(name: str, above: str, below: str, config: RotaryScaling) -> None:
    high, low = getattr(config, above), getattr(config, below)
    if high <= low:
        raise ValueError(
            f"{name}.{above} is {high}, but must be above {name}.{below}, which is "
            f"{low}: raise it"
        )
