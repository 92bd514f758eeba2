"""Decoding of a model's output token by token: beam search, greedy, sampling.

A search is a loop with static shapes. Rows finish at different lengths; the loop ends
when all rows are done. It can stop between two tokens and go on in another program, so
that a host sees tokens as they come.

Dims: B batch, K beams, T length, V vocabulary, J candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.shapes import shape_of, take_rows
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.beams import KINDS, BeamCaches, Beams

Step = Callable[
    [tf.Tensor, NestedMap, tf.Tensor],
    tuple[tf.Tensor, NestedMap],
]
"""(ids int32 [B, K], cache, position) -> (logits [B, K, V], cache)."""

# Below every sum of log probabilities, but finite: 0 times it is 0.
_NEVER = -1e9


def _reordered(cache: NestedMap, beam: tf.Tensor) -> NestedMap:
    return cache.map(lambda t: take_rows(t, beam, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenModel:
    """A model of how likely each next token is.

    Args:
      step: computes logits of the tokens after `ids`.
      cache: the cache of `step`, as before the first token.
      batch: B, or a scalar tensor.
      length: T.
      start_id: the id before the first token, or int32 [B], one for each row.
      end_id: the id after the last token.
      reordered: (cache, beams int32 [B, K]) -> the cache of those beams; by default
        for tensors [B * K, ...].
    """

    step: Step
    cache: NestedMap
    batch: int | tf.Tensor
    length: int
    start_id: int | tf.Tensor
    end_id: int
    reordered: Callable[[NestedMap, tf.Tensor], NestedMap] = _reordered

    def starts(self, beams: int) -> tf.Tensor:
        """int32 [B, K], the ids before the first token."""
        start = tf.reshape(tf.convert_to_tensor(self.start_id, tf.int32), [-1, 1])
        return tf.broadcast_to(start, [self.batch, beams])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """The results of each row, the best first.

    Args:
      ids: int32 [B, K, T], up to and including the end; then 0.
      scores: float32 [B, K], log probabilities in nats over their length penalties.
    """

    ids: tf.Tensor
    scores: tf.Tensor


class Decoder(Checked):
    """Base of searches: subclass as a frozen, keyword-only dataclass.

    A subclass gives `start`, `choose`, `is_done` and `result`.
    """

    beams: int
    """K."""
    caches: BeamCaches = BeamCaches.REORDERED

    def hypotheses(self, **sizes: Any) -> Beams:
        """Where the hypotheses have their tokens; `sizes` are all but `Beams.count`."""
        return KINDS[self.caches](count=self.beams, **sizes)

    def decode(self, ctx: Context, model: TokenModel) -> Decoded:
        """Searches from the model's `start_id` on.

        Args:
          ctx: the context: its plan splits the batch, and samplers use its random key.
          model: predicts the next token, with a cache for K beams.
        """
        state = self.begin(ctx, model)
        return self.result(self.go_on(ctx, model, state, model.length))

    def begin(self, ctx: Context, model: TokenModel) -> NestedMap:
        """The state before the first token.

        Its `position` is how many tokens there are, int32 scalar, its `cache` the
        model's; other tensors are [B, ...].
        """
        state = self.start(model).map(_split(ctx))
        return NestedMap(state, position=tf.constant(0), cache=model.cache)

    def go_on(
        self,
        ctx: Context,
        model: TokenModel,
        state: NestedMap,
        until: int | tf.Tensor,
    ) -> NestedMap:
        """The state when all rows are done, or have `until` tokens.

        Args:
          ctx: as for `decode`.
          model: as for `decode`; its `cache` is not read.
          state: as `begin` or `go_on` returned it.
          until: int32 scalar, T or less.
        """

        def body(state):
            logits, cache = model.step(state.last, state.cache, state.position)
            new, beam = self.choose(ctx, model, state, tf.cast(logits, tf.float32))
            if beam is not None:
                cache = model.reordered(cache, beam)
            new = new.map(_split(ctx))
            return [NestedMap(new, position=state.position + 1, cache=cache)]

        def goes_on(state):
            return (state.position < until) & ~tf.reduce_all(self.is_done(state))

        return tf.while_loop(goes_on, body, [state])[0]

    def start(self, model: TokenModel) -> NestedMap:
        """What `choose` keeps, before the first token; `last` are the last tokens."""
        raise NotImplementedError(f"{type(self).__name__}.start")

    def choose(
        self, ctx: Context, model: TokenModel, state: NestedMap, logits: tf.Tensor
    ) -> tuple[NestedMap, tf.Tensor | None]:
        """The next token of each beam.

        Args:
          ctx: as for `decode`.
          model: as for `decode`.
          state: the state, with `position`.
          logits: float32 [B, K, V] of the next token.

        Returns:
          What is kept, as `start` has it, and the beams [B, K] that go on, or None for
          all as they are.
        """
        raise NotImplementedError(f"{type(self).__name__}.choose")

    def is_done(self, state: NestedMap) -> tf.Tensor:
        """bool [B], the rows whose search has ended."""
        raise NotImplementedError(f"{type(self).__name__}.is_done")

    def result(self, state: NestedMap) -> Decoded:
        """What was found up to a state; rows that are not done count as cut there."""
        raise NotImplementedError(f"{type(self).__name__}.result")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Decoder):
    """Draws each token from the model's distribution.

    Args:
      temperature: the distribution's temperature; 0 is greedy: always the likeliest.
      top_k: draws among so many tokens, the likeliest (Fan et al. 2018, section 5.1),
        and those as likely as the last of them; 1 is greedy. None: among all.
      top_p: draws among the fewest tokens, the likeliest, that together have this
        probability at the temperature and among `top_k` (Holtzman et al. 2020, section
        3.1), and those as likely as the last of them.

    Raises:
      ValueError: the temperature is below 0, or above 0 and no normal float32; `top_k`
        is below 1, or `top_p` not in (0, 1].
    """

    temperature: float = bounded(1.0, at_least=0)
    top_k: int | None = bounded(None, at_least=1)
    top_p: float = bounded(1.0, above=0, at_most=1)

    beams: ClassVar[int] = 1
    caches: ClassVar[BeamCaches] = BeamCaches.REORDERED

    def __post_init__(self):
        super().__post_init__()
        least = float(np.finfo(np.float32).tiny)
        if 0 < self.temperature < least:  # XLA takes it for 0, and divides by it.
            raise ValueError(
                f"Sampling.temperature is {self.temperature}; it must be 0, which is "
                f"greedy, or at least {least}"
            )

    def start(self, model: TokenModel) -> NestedMap:
        batch = model.batch
        return NestedMap(
            last=model.starts(1),
            ids=tf.zeros([batch, model.length], tf.int32),
            score=tf.zeros([batch]),
            ended=tf.zeros([batch], tf.bool),
        )

    def choose(
        self, ctx: Context, model: TokenModel, state: NestedMap, logits: tf.Tensor
    ) -> tuple[NestedMap, None]:
        logits = _split(ctx)(logits[:, 0])
        chosen = self._chosen(ctx, logits, state.position)
        gain = _pick(tf.nn.log_softmax(logits), chosen)
        chosen = tf.where(state.ended, 0, chosen)
        return NestedMap(
            last=chosen[:, None],
            ids=_put(state.ids, chosen, state.position),
            score=state.score + tf.where(state.ended, 0.0, gain),
            ended=state.ended | (chosen == model.end_id),
        ), None

    def is_done(self, state: NestedMap) -> tf.Tensor:
        return state.ended

    def result(self, state: NestedMap) -> Decoded:
        return Decoded(ids=state.ids[:, None], scores=state.score[:, None])

    def _chosen(self, ctx: Context, logits: tf.Tensor, position) -> tf.Tensor:
        """int32 [B], a token for each row of `logits` [B, V]."""
        if self.temperature == 0 or self.top_k == 1:
            return tf.argmax(logits, -1, tf.int32)
        if None in logits.shape:
            raise ValueError(
                f"Sampling.temperature is {self.temperature}, but an exported model "
                "takes batches of any size, for which nothing can be drawn: set it to "
                "0, or use BeamSearch"
            )
        key = random.fold_in(ctx.random_key(), position)
        return _drawn(self.allowed(logits), random.uniform(key, logits.shape[:1]))

    def allowed(self, logits: tf.Tensor) -> tf.Tensor:
        """Logits [B, V] at the temperature; -1e9 where `top_k` or `top_p` forbid it."""
        logits -= tf.reduce_max(logits, -1, keepdims=True)
        logits /= self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = _largest(logits, tf.ones_like(logits), float(self.top_k))
        if self.top_p < 1:
            logits = _largest(logits, tf.nn.softmax(logits), self.top_p)
        return logits


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch(Decoder):
    """Keeps the K likeliest beginnings; a beginning that ends is set aside.

    A row is done when K beginnings have ended, or at length T, where all count as
    ended. They are ranked by log probability over ((5 + length) / 6) ** alpha (Wu et
    al. 2016). One beam is greedy search.

    Args:
      beams: K.
      alpha: how much length is rewarded; 0 means not at all.
      caches: REORDERED: each beam has a cache; FLAT: those of a row share one.

    Raises:
      ValueError: K is below 1 or alpha below 0.
    """

    beams: int = bounded(4, at_least=1)
    alpha: float = bounded(0.6, at_least=0)
    caches: BeamCaches = BeamCaches.REORDERED

    def start(self, model: TokenModel) -> NestedMap:
        batch, K = model.batch, self.beams
        return NestedMap(
            last=model.starts(K),
            ids=tf.zeros([batch, K, model.length], tf.int32),
            # All beams are equal at first: one counts.
            score=tf.fill([batch, K], _NEVER) * tf.cast(tf.range(K) > 0, tf.float32),
            ended_ids=tf.zeros([batch, K, model.length], tf.int32),
            ended_score=tf.fill([batch, K], _NEVER),
        )

    def choose(
        self, ctx: Context, model: TokenModel, state: NestedMap, logits: tf.Tensor
    ) -> tuple[NestedMap, tf.Tensor]:
        K = self.beams
        gains = tf.nn.log_softmax(logits)
        score, beam, token = _best(state.score[:, :, None] + gains, 2 * K)
        ids = _put(_take(state.ids, beam), token, state.position)
        is_end = token == model.end_id
        # Beginnings below the K best do not end: they would cut off likelier ones.
        # Rows that are done stay so, whatever other rows of the batch still do.
        ends = is_end & (tf.range(2 * K) < K) & ~self.is_done(state)[:, None]
        ended = _merge(
            state.ended_ids,
            state.ended_score,
            ids,
            tf.where(ends, score / self._penalty(state.position + 1), _NEVER),
        )
        live, at, _ = _best(tf.where(is_end, _NEVER, score)[:, :, None], K)
        return NestedMap(
            last=_take(token, at),
            ids=_take(ids, at),
            score=live,
            ended_ids=ended.ids,
            ended_score=ended.scores,
        ), _take(beam, at)

    def is_done(self, state: NestedMap) -> tf.Tensor:
        return tf.reduce_min(state.ended_score, -1) > _NEVER / 2

    def result(self, state: NestedMap) -> Decoded:
        # Where rows are not done, all have as many tokens as there are.
        cut = state.score / self._penalty(state.position)
        cut = tf.where(self.is_done(state)[:, None], _NEVER, cut)
        return _merge(state.ended_ids, state.ended_score, state.ids, cut)

    def _penalty(self, length) -> tf.Tensor:
        return ((5.0 + tf.cast(length, tf.float32)) / 6.0) ** self.alpha


def _split(ctx: Context):
    """Annotates tensors [B, ...] along the batch alone."""
    return lambda t: ctx.split(t, ("batch", *[None] * (t.shape.rank - 1)))


def _largest(logits: tf.Tensor, weights: tf.Tensor, wanted: float) -> tf.Tensor:
    """The fewest largest logits [B, V] whose weights add up to `wanted`, or all.

    The others are -1e9. The least that stays is found bit by bit, in 32 sums over V:
    sorting would gather a batch that is split.
    """
    bits = tf.bitcast(logits, tf.int32)
    # Integers in the order of the floats.
    order = tf.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def suffices(least):
        kept = tf.where(order >= least[:, None], weights, 0.0)
        return tf.reduce_sum(kept, -1) >= wanted

    def body(i, least):
        more = least + tf.bitwise.left_shift(1, 30 - i)
        return i + 1, tf.where(suffices(more), more, least)

    zeros = tf.zeros_like(order[:, 0])
    least = tf.where(suffices(zeros), zeros, tf.int32.min)
    _, least = tf.while_loop(lambda i, _: i < 31, body, [tf.constant(0), least])
    return tf.where(order >= least[:, None], logits, _NEVER)


def _drawn(logits: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
    """int32 [B], tokens of the distributions `logits` [B, V].

    A row's is the first up to which probabilities add up to more than `uniform` [B].
    It is found bit by bit, in sums over V. (Gumbel's trick takes V draws and an argmax
    of them, into which XLA's CPU compiler fuses their arithmetic for minutes.)
    """
    size = logits.shape[-1]
    probs = tf.exp(logits - tf.reduce_max(logits, -1, keepdims=True))
    wanted = uniform * tf.reduce_sum(probs, -1)

    def body(i, passed):
        more = passed + tf.bitwise.left_shift(1, bits - 1 - i)
        first = tf.where(tf.range(size) < more[:, None], probs, 0.0)
        is_passed = (more < size) & (tf.reduce_sum(first, -1) <= wanted)
        return i + 1, tf.where(is_passed, more, passed)

    bits = (size - 1).bit_length()
    passed = tf.zeros_like(wanted, tf.int32)
    _, passed = tf.while_loop(lambda i, _: i < bits, body, [tf.constant(0), passed])
    # Sums are rounded, each in its own way: none of them may reach what is wanted.
    last = tf.reduce_max(tf.where(probs > 0, tf.range(size), 0), -1)
    return tf.minimum(passed, last)


def _put(ids: tf.Tensor, chosen: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    """`ids` [..., T] with `chosen` [...] at `position`."""
    return tf.where(tf.range(ids.shape[-1]) == position, chosen[..., None], ids)


def _pick(values: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """From [..., N], the values at index [...]; a sum, which a split N partitions."""
    here = tf.range(values.shape[-1]) == index[..., None]
    return tf.reduce_sum(tf.where(here, values, 0), -1)


def _best(scores: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The largest of scores [B, K, V], the first of equals first.

    It takes `count` maxima: `top_k` would gather a batch that is split.

    Returns:
      Scores, beams and tokens, each [B, count].
    """
    _, beams, size = scores.shape
    scores = tf.reshape(scores, [-1, beams * size])
    maxima = []
    for _ in range(count):
        at = tf.argmax(scores, -1, tf.int32)
        maxima.append((tf.reduce_max(scores, -1), at))
        here = tf.range(beams * size) == at[:, None]
        scores = tf.where(here, 2 * _NEVER, scores)
    best, at = (tf.stack(values, -1) for values in zip(*maxima, strict=True))
    return best, at // size, at % size


def _take(values: tf.Tensor, beam: tf.Tensor) -> tf.Tensor:
    """From [B, K, ...], the values of beams [B, J]: [B, J, ...]."""
    here = tf.range(values.shape[1]) == beam[:, :, None]
    here = tf.reshape(here, [*shape_of(here), *[1] * (values.shape.rank - 2)])
    zero = tf.zeros([], values.dtype)
    return tf.reduce_sum(tf.where(here, values[:, None], zero), axis=2)


def _merge(ids, scores, more_ids, more_scores) -> Decoded:
    """The K best of K results [B, K] and J more [B, J]."""
    all_scores = tf.concat([scores, more_scores], axis=1)
    all_ids = tf.concat([ids, more_ids], axis=1)
    best, at, _ = _best(all_scores[:, :, None], scores.shape[1])
    return Decoded(ids=_take(all_ids, at), scores=best)
