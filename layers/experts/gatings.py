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
from meshwright.framework.modeling.layer import Context, Mode, as_gradient
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import per_feature
from meshwright.layers.experts.gating import (
    GSE,
    Capacity,
    Choices,
    GateScale,
    Gating,
    Picks,
    TokenGating,
    probabilities,
)

_TINY = 1e-30


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
class Top2(TokenGating):
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

    @property
    def experts_per_token(self) -> int:
        return 2

    def pick(self, ctx, theta, logits, valid, token_ids) -> Picks:
        probs = probabilities(ctx, logits)
        first, second = _likeliest(ctx, probs, 2, valid)
        wanted = self._wanted(ctx, probs, first, second)
        return Picks(
            choices=[first, second],
            scores=probs,
            scale=self.gate_scale,
            goes=[None, wanted],
            rejected_count=self.second_expert is not SecondExpert.ABOVE_THRESHOLD,
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
class Switch(TokenGating):
    """The likeliest expert, scaled by its probability (Fedus et al. 2021).

    Args:
      capacity: its factor is 1.25 by default.
    """

    capacity: Capacity = instance(Capacity(factor=1.25), example="Capacity(factor=2.0)")

    def pick(self, ctx, theta, logits, valid, token_ids) -> Picks:
        probs = probabilities(ctx, logits)
        return _only(*_likeliest(ctx, probs, 1, valid), probs)


@gin.constants_from_enum
class Scores(enum.Enum):
    """What a gating makes of its logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    """Of each expert by itself (DeepSeek-V3)."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(TokenGating):
    """The k best experts (Shazeer et al. 2017, without its noise).

    All first choices have priority over all second choices, and so on. With SIGMOID, a
    `bias_rate` and sets of experts it is the routing of DeepSeek-V3 (2024, 2.1.2).

    Args:
      k: experts per token.
      gate_scale: what the k gates are divided by.
      scores: what the gates are.
      gate_factor: the gates are multiplied by it in the end.
      expert_sets: the experts are this many sets of consecutive ones, such as those of
        a host's devices.
      sets_per_token: a token chooses among the experts of so many sets, those with the
        largest sums of their k / sets_per_token best scores (rounded up).
      bias_rate: balances without a loss (Wang et al. 2024, arXiv:2408.15664). Experts
        are chosen by score + bias, gates are without it. A training step adds so much
        to the biases of experts with less than the mean load of the batch, and takes it
        from those with more; in a pipeline it moves them by the mean of what each
        microbatch would do. 0: there are no biases.

    Raises:
      ValueError: k < 1, more than there are experts, or 1 with gates that are
        divided by their sum; sets that do not divide the experts or have less than k
        for a token; a number out of range; see `Gating`.
    """

    k: int = bounded(at_least=1)
    gate_scale: GateScale = GateScale.CHOSEN
    scores: Scores = Scores.SOFTMAX
    gate_factor: float = bounded(1.0, above=0)
    expert_sets: int = bounded(1, at_least=1)
    sets_per_token: int = bounded(1, at_least=1)
    bias_rate: float = bounded(0.0, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        _check_enough_experts(self, self.k)
        if self.k == 1 and self.gate_scale is not GateScale.RAW:
            raise ValueError(
                f"TopK.k is 1 and TopK.gate_scale {self.gate_scale}: a gate divided by "
                "itself is 1 and learns nothing; use GateScale.RAW, or Switch"
            )
        experts, sets = self.num_experts, self.expert_sets
        if experts % sets or self.sets_per_token > sets:
            raise ValueError(
                f"TopK.expert_sets is {sets} and TopK.sets_per_token "
                f"{self.sets_per_token}, of {experts} experts: let expert_sets divide "
                "num_experts, and sets_per_token be at most expert_sets"
            )
        if self.k > (reachable := experts // sets * self.sets_per_token):
            raise ValueError(
                f"TopK.k is {self.k} but a token may choose among {reachable} experts "
                f"of {self.sets_per_token} of {sets} sets: let it choose more sets by "
                "TopK.sets_per_token, or set a smaller k"
            )

    @property
    def experts_per_token(self) -> int:
        return self.k

    def weights(self) -> NestedMap:
        specs = super().weights()
        if self.bias_rate:
            # What it is to be next is returned as its gradient.
            spec = per_feature(self.num_experts)
            specs.bias = dataclasses.replace(spec, statistic_decay=0.0)
        return specs

    def pick(self, ctx, theta, logits, valid, token_ids) -> Picks:
        if self.scores is Scores.SIGMOID:
            scores = ctx.split(tf.sigmoid(logits), GSE)
        else:
            scores = probabilities(ctx, logits)
        wanted = tf.stop_gradient(scores)
        if self.bias_rate:
            wanted += tf.stop_gradient(theta.bias)
        if self.sets_per_token < self.expert_sets:
            wanted = self._of_best_sets(ctx, wanted)
        choices = _likeliest(ctx, wanted, self.k, valid)
        if self.bias_rate and ctx.mode is Mode.TRAIN:
            load = tf.reduce_sum(tf.add_n(choices), axis=[0, 1])
            # Of integers: a mean that is rounded would move experts that have it.
            error = tf.sign(tf.reduce_sum(load) - self.num_experts * load)
            scores = as_gradient(
                scores, theta.bias, theta.bias + self.bias_rate * error
            )
        return Picks(
            choices=choices,
            scores=scores,
            scale=self.gate_scale,
            factor=self.gate_factor,
            goes=[None] * self.k,
        )

    def _of_best_sets(self, ctx: Context, scores: tf.Tensor) -> tf.Tensor:
        """`scores` [G, S, E], -inf at experts of other sets than a token's best."""
        G, S, E = shape_of(scores)
        by_set = tf.reshape(scores, [G, S, self.expert_sets, -1])
        best = -(-self.k // self.sets_per_token)
        ranked = tf.sort(by_set, direction="DESCENDING")
        totals = tf.reduce_sum(ranked[..., :best], -1)
        ones = tf.ones([G, S], scores.dtype)
        chosen = tf.add_n(_likeliest(ctx, totals, self.sets_per_token, ones))
        open_sets = tf.broadcast_to(chosen[..., None] > 0, shape_of(by_set))
        return tf.where(tf.reshape(open_sets, [G, S, E]), scores, -math.inf)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice(Gating):
    """Each expert takes the C likeliest tokens of a group (Zhou et al. 2022).

    Every expert is full, unless the group has fewer tokens; a token may have several
    experts or none. Of equally likely tokens the earlier are taken.
    """

    needs_whole_groups = True

    def choose(self, ctx, theta, logits, valid, token_ids, slots) -> Choices:
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
class Hash(TokenGating):
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

    def pick(self, ctx, theta, logits, valid, token_ids) -> Picks:
        if token_ids is None:
            raise ValueError(
                f"layer {ctx.path!r} hashes token ids but was given none: pass "
                "token_ids= to the layer, or use another gating"
            )
        expert = _hashed(token_ids, self.seed) % self.num_experts
        chosen = tf.one_hot(expert, self.num_experts) * valid[..., None]
        return _only(chosen, chosen)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinkhorn(TokenGating):
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

    def pick(self, ctx, theta, logits, valid, token_ids) -> Picks:
        probs = probabilities(ctx, logits)
        scores = tf.stop_gradient(probs)
        if ctx.mode is Mode.TRAIN:
            scores *= self._scales(scores, valid)
        return _only(*_likeliest(ctx, scores, 1, valid), probs)

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


def _only(choice: tf.Tensor, scores: tf.Tensor) -> Picks:
    """The picks of a gating with one expert a token, weighed by its score."""
    return Picks(choices=[choice], scores=scores, scale=GateScale.RAW, goes=[None])


def _hashed(ids: tf.Tensor, seed: int) -> tf.Tensor:
    """int32 >= 0 that mixes all bits of `ids` (the finalizer of MurmurHash3)."""
    bits = tf.bitcast(ids, tf.uint32) + tf.constant(seed & 0xFFFFFFFF, tf.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        shifted = tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        bits = tf.bitwise.bitwise_xor(bits, shifted)
        bits *= tf.constant(factor, tf.uint32)
    half = tf.bitwise.right_shift(bits, tf.constant(1, tf.uint32))
    return tf.cast(half, tf.int32)
