"""The kinds of gating: top-k by token, by expert, by hash, by optimal transport.

Dims: G groups, S tokens of a group, M model, E experts, C slots of an expert.

Gatings that look at an entire group at once (`ExpertChoice`, and `Sinkhorn` in
training) let a token's expert depend on later tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import gin
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.experts.gating import (
    GSE,
    Capacity,
    Choices,
    Gating,
    in_turn,
    probabilities,
)

_TINY = 1e-30


@gin.constants_from_enum
class GateScale(enum.Enum):
    """What the gates of a token's experts are divided by."""

    RAW = "raw"
    """Nothing: they are probabilities among all experts."""
    CHOSEN = "chosen"
    """Their sum over the experts that the token chose, dropped or not (Algorithm 1)."""
    KEPT = "kept"
    """Their sum over the experts that have a slot for the token."""


@gin.constants_from_enum
class SecondExpert(enum.Enum):
    """Whether a token goes to its second expert too; g2 is its gate, g1 + g2 = 1."""

    IN_PROPORTION = "in_proportion"
    """With probability min(g2 / threshold, 1). In `Mode.EVAL` always."""
    ABOVE_THRESHOLD = "above_threshold"
    """If g2 > threshold."""
    ALWAYS = "always"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Top2(Gating):
    """The two likeliest experts: GShard's Algorithm 1.

    As in the algorithm, a second choice that is rejected at random still counts towards
    the capacity. A second choice below the threshold does not.

    Args:
      second_expert: whether a token goes to its second expert.
      threshold: see `SecondExpert`; 0.5 is Algorithm 1's 2 g2 > uniform(0, 1).
      gate_scale: what the two gates are divided by.

    Raises:
      ValueError: less than two experts, an unknown policy or scale, a threshold out of
        range; see `Gating`.
    """

    second_expert: SecondExpert = SecondExpert.IN_PROPORTION
    threshold: float = bounded(0.5, at_least=0, below=1)
    gate_scale: GateScale = GateScale.CHOSEN

    def __post_init__(self):
        super().__post_init__()
        _check_enough_experts(self, 2)

    def choose(self, ctx, logits, valid, token_ids, slots) -> Choices:
        probs = probabilities(ctx, logits)
        first, second = _likeliest(ctx, probs, 2, valid)
        chosen = first + second
        wanted = self._wanted(ctx, probs, first, second)
        if self.second_expert is SecondExpert.ABOVE_THRESHOLD:
            second = second * wanted
        (place1, kept1), (place2, kept2) = in_turn([first, second], slots)
        kept = kept1 + kept2 * wanted
        return Choices(
            gates=_scaled(probs, chosen=chosen, kept=kept, scale=self.gate_scale),
            kept=kept,
            places=place1 * first + place2 * second,
            first=first,
        )

    def _wanted(self, ctx: Context, probs, first, second) -> tf.Tensor:
        """float32 [G, S, 1], 1 where the token is to go to its second expert."""
        g1 = tf.reduce_sum(probs * first, axis=-1, keepdims=True)
        g2 = tf.reduce_sum(probs * second, axis=-1, keepdims=True)
        g2 = tf.math.divide_no_nan(g2, g1 + g2)
        if self.second_expert is SecondExpert.ABOVE_THRESHOLD:
            return tf.cast(g2 > self.threshold, tf.float32)
        always = self.second_expert is SecondExpert.ALWAYS
        if always or ctx.mode is Mode.EVAL or self.threshold == 0:
            return tf.ones_like(g2)
        chance = random.uniform(ctx.random_key(), g2.shape)
        return tf.cast(g2 > self.threshold * chance, tf.float32)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch(Gating):
    """The likeliest expert, scaled by its probability (Fedus et al. 2021).

    Args:
      capacity: its factor is 1.25 by default.
    """

    capacity: Capacity = instance(Capacity(factor=1.25), example="Capacity(factor=2.0)")

    def choose(self, ctx, logits, valid, token_ids, slots) -> Choices:
        probs = probabilities(ctx, logits)
        (first,) = _likeliest(ctx, probs, 1, valid)
        ((places, kept),) = in_turn([first], slots)
        return Choices(gates=probs, kept=kept, places=places, first=first)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Gating):
    """The k likeliest experts (Shazeer et al. 2017, without its noise).

    All first choices have priority over all second choices, and so on.

    Args:
      k: experts per token.
      gate_scale: what the k gates are divided by.

    Raises:
      ValueError: k < 1, more than there are experts, or 1 with gates that are divided
        by their sum; see `Gating`.
    """

    k: int = bounded(at_least=1)
    gate_scale: GateScale = GateScale.CHOSEN

    def __post_init__(self):
        super().__post_init__()
        _check_enough_experts(self, self.k)
        if self.k == 1 and self.gate_scale is not GateScale.RAW:
            raise ValueError(
                f"TopK.k is 1 and TopK.gate_scale {self.gate_scale}: a gate divided by "
                "itself is 1 and learns nothing; use GateScale.RAW, or Switch"
            )

    def choose(self, ctx, logits, valid, token_ids, slots) -> Choices:
        probs = probabilities(ctx, logits)
        choices = _likeliest(ctx, probs, self.k, valid)
        turns = in_turn(choices, slots)
        kept = tf.add_n([kept for _, kept in turns])
        pairs = zip(turns, choices, strict=True)
        return Choices(
            gates=_scaled(
                probs, chosen=tf.add_n(choices), kept=kept, scale=self.gate_scale
            ),
            kept=kept,
            places=tf.add_n([places * chosen for (places, _), chosen in pairs]),
            first=choices[0],
        )


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice(Gating):
    """Each expert takes the C likeliest tokens of a group (Zhou et al. 2022).

    Every expert is full, unless the group has fewer tokens; a token may have several
    experts or none. Of equally likely tokens the earlier are taken.
    """

    needs_whole_groups = True

    def choose(self, ctx, logits, valid, token_ids, slots) -> Choices:
        probs = probabilities(ctx, logits)
        score = tf.stop_gradient(probs)
        score = tf.where(valid[..., None] > 0, score, -1.0)
        # A sort along an unsplit dim partitions; a top_k may gather the others.
        ranked = tf.sort(tf.transpose(score, [0, 2, 1]), direction="DESCENDING")
        least = ranked[:, None, :, slots - 1]  # [G, 1, E]
        above = tf.cast(score > least, tf.float32)
        equal = tf.cast(score == least, tf.float32)
        room = slots - tf.reduce_sum(above, axis=1, keepdims=True)
        turn = tf.cumsum(equal, axis=1, exclusive=True)
        kept = above + equal * tf.cast(turn < room, tf.float32)
        kept *= valid[..., None]
        places = tf.cumsum(kept, axis=1, exclusive=True)
        return Choices(gates=probs, kept=kept, places=places, first=None)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hash(Gating):
    """The expert given by a hash of the token's id (Roller et al. 2021).

    The layer has no weights, and every gate is 1.

    Args:
      seed: another seed is another hash, for layers that should not agree.
    """

    seed: int = 0

    def weights(self) -> NestedMap:
        return NestedMap()

    def logits(self, ctx, theta, x) -> None:
        return None

    def choose(self, ctx, logits, valid, token_ids, slots) -> Choices:
        if token_ids is None:
            raise ValueError(
                f"layer {ctx.path!r} hashes token ids but was given none: pass "
                "token_ids= to the layer, or use another gating"
            )
        expert = _hashed(token_ids, self.seed) % self.num_experts
        chosen = tf.one_hot(expert, self.num_experts) * valid[..., None]
        ((places, kept),) = in_turn([chosen], slots)
        return Choices(gates=chosen, kept=kept, places=places, first=None)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinkhorn(Gating):
    """One expert a token, by a balanced assignment (Clark et al. 2022).

    In training the gates of a group are scaled, by expert and by token in turn, until
    the experts have about equal shares; a token goes to the expert with the largest.
    In `Mode.EVAL` it goes to the expert with the largest unscaled gate, which does not
    depend on other tokens. The output is weighted by the unscaled probability either
    way.

    Args:
      capacity: its factor is 1.25 by default.
      iterations: how often to scale.

    Raises:
      ValueError: `iterations` < 1; see `Gating`.
    """

    capacity: Capacity = instance(Capacity(factor=1.25), example="Capacity(factor=2.0)")
    iterations: int = bounded(8, at_least=1)

    def choose(self, ctx, logits, valid, token_ids, slots) -> Choices:
        probs = probabilities(ctx, logits)
        scores = tf.stop_gradient(probs)
        if ctx.mode is Mode.TRAIN:
            scores *= self._scales(scores, valid)
        (first,) = _likeliest(ctx, scores, 1, valid)
        ((places, kept),) = in_turn([first], slots)
        return Choices(gates=probs, kept=kept, places=places, first=first)

    def _scales(self, probs: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
        """[G, 1, E] to multiply gates by; factors by token would change no choice.

        With them, and each token's sum made 1 again, all experts sum to tokens / E.
        """
        share = tf.reduce_sum(valid, axis=1)[:, None] / self.num_experts
        by_token = valid
        for _ in range(self.iterations):
            total = tf.einsum("gse,gs->ge", probs, by_token)
            by_expert = share / tf.maximum(total, _TINY)
            total = tf.einsum("gse,ge->gs", probs, by_expert)
            by_token = valid / tf.maximum(total, _TINY)
        return by_expert[:, None, :]


def _check_enough_experts(gating: Gating, k: int) -> None:
    if k > gating.num_experts:
        name = type(gating).__name__
        raise ValueError(
            f"{name} sends a token to {k} experts but {name}.num_experts is "
            f"{gating.num_experts}: have more experts, or a smaller k"
        )


def _likeliest(
    ctx: Context, scores: tf.Tensor, k: int, valid: tf.Tensor
) -> list[tf.Tensor]:
    """Each token's k best experts, best first: float32 [G, S, E] one-hot, 0 at padding.

    Found by argmax and one-hot, which are local to a token under any partitioner. Of
    equally good experts the first is taken.
    """
    scores, choices = tf.stop_gradient(scores), []
    for _ in range(k):
        best = tf.argmax(scores, axis=-1, output_type=tf.int32)
        one_hot = tf.one_hot(best, scores.shape[-1])
        scores = tf.where(one_hot > 0, -math.inf, scores)
        choices.append(ctx.split(one_hot * valid[..., None], GSE))
    return choices


def _scaled(probs, *, chosen, kept, scale: GateScale) -> tf.Tensor:
    """Gates [G, S, E] of the chosen experts."""
    if scale is GateScale.RAW:
        return probs
    gates = probs * (chosen if scale is GateScale.CHOSEN else kept)
    total = tf.reduce_sum(gates, axis=-1, keepdims=True)
    return tf.math.divide_no_nan(gates, total)


def _hashed(ids: tf.Tensor, seed: int) -> tf.Tensor:
    """int32 >= 0 that mixes all bits of `ids` (the finalizer of MurmurHash3)."""
    bits = tf.bitcast(ids, tf.uint32) + tf.constant(seed & 0xFFFFFFFF, tf.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        shifted = tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        bits = tf.bitwise.bitwise_xor(bits, shifted)
        bits *= tf.constant(factor, tf.uint32)
    half = tf.bitwise.right_shift(bits, tf.constant(1, tf.uint32))
    return tf.cast(half, tf.int32)
