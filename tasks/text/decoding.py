"""Decoding of a model's output token by token: beam search, greedy, sampling.

A search is one XLA program with static shapes. Rows finish at different lengths; the
loop ends when all rows are done.

Dims: B batch, K beams, T length, V vocabulary, J candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap

Step = Callable[
    [tf.Tensor, NestedMap, tf.Tensor],
    tuple[tf.Tensor, NestedMap],
]
"""(ids int32 [B, K], cache, position) -> (logits [B, K, V], cache)."""

# Below every sum of log probabilities, but finite: 0 times it is 0.
_NEVER = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenModel:
    """A model of how likely each next token is.

    Args:
      step: computes logits of the tokens after `ids`.
      cache: the cache of `step`, as before the first token.
      batch: B, or a scalar tensor.
      length: T.
      start_id: the id before the first token.
      end_id: the id after the last token.
      cache_dim: the dim of the cache's tensors that is B * K; 1 in stacked layers.
    """

    step: Step
    cache: NestedMap
    batch: int | tf.Tensor
    length: int
    start_id: int
    end_id: int
    cache_dim: int = 0


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
    """Base of searches: subclass as a frozen, keyword-only dataclass."""

    beams: int
    """K."""

    def decode(self, ctx: Context, model: TokenModel) -> Decoded:
        """Searches from the model's `start_id` on.

        Args:
          ctx: the context: its plan splits the batch, and samplers use its random key.
          model: predicts the next token, with a cache for K beams.
        """
        raise NotImplementedError(f"{type(self).__name__}.decode")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Decoder):
    """Draws each token from the model's distribution.

    Args:
      temperature: the distribution's temperature; 0 is greedy: always the likeliest.

    Raises:
      ValueError: the temperature is below 0.
    """

    temperature: float = bounded(1.0, at_least=0)

    beams: ClassVar[int] = 1

    def decode(self, ctx: Context, model: TokenModel) -> Decoded:
        def choose(position, state, logits):
            logits = logits[:, 0]
            chosen = tf.argmax(self._noisy(ctx, logits, position), -1, tf.int32)
            gain = _pick(tf.nn.log_softmax(logits), chosen)
            chosen = tf.where(state.ended, 0, chosen)
            return NestedMap(
                last=chosen[:, None],
                ids=_put(state.ids, chosen, position),
                score=state.score + tf.where(state.ended, 0.0, gain),
                ended=state.ended | (chosen == model.end_id),
            ), None

        batch = model.batch
        start = NestedMap(
            last=tf.fill([batch, 1], model.start_id),
            ids=tf.zeros([batch, model.length], tf.int32),
            score=tf.zeros([batch]),
            ended=tf.zeros([batch], tf.bool),
        )
        result = _search(ctx, model, start, choose, lambda state: state.ended)
        return Decoded(ids=result.ids[:, None], scores=result.score[:, None])

    def _noisy(self, ctx: Context, logits: tf.Tensor, position) -> tf.Tensor:
        """Logits whose largest is a random draw (Gumbel's trick)."""
        if self.temperature == 0:
            return logits
        if None in logits.shape:
            raise ValueError(
                f"Sampling.temperature is {self.temperature}, but an exported model "
                "takes batches of any size, for which nothing can be drawn: set it to "
                "0, or use BeamSearch"
            )
        key = random.fold_in(ctx.random_key(), position)
        uniform = tf.maximum(random.uniform(key, logits.shape), 2.0**-25)
        return logits / self.temperature - tf.math.log(-tf.math.log(uniform))


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

    Raises:
      ValueError: K is below 1 or alpha below 0.
    """

    beams: int = bounded(4, at_least=1)
    alpha: float = bounded(0.6, at_least=0)

    def decode(self, ctx: Context, model: TokenModel) -> Decoded:
        batch, K = model.batch, self.beams

        def choose(position, state, logits):
            gains = tf.nn.log_softmax(logits)
            score, beam, token = _best(state.score[:, :, None] + gains, 2 * K)
            ids = _put(_take(state.ids, beam), token, position)
            is_end = token == model.end_id
            # Beginnings below the K best do not end: they would cut off likelier ones.
            # Rows that are done stay so, whatever other rows of the batch still do.
            ends = is_end & (tf.range(2 * K) < K) & ~_done(state)[:, None]
            ended = _merge(
                state.ended_ids,
                state.ended_score,
                ids,
                tf.where(ends, score / self._penalty(position + 1), _NEVER),
            )
            live, at, _ = _best(tf.where(is_end, _NEVER, score)[:, :, None], K)
            return NestedMap(
                last=_take(token, at),
                ids=_take(ids, at),
                score=live,
                ended_ids=ended.ids,
                ended_score=ended.scores,
            ), _take(beam, at)

        start = NestedMap(
            last=tf.fill([batch, K], model.start_id),
            ids=tf.zeros([batch, K, model.length], tf.int32),
            # All beams are equal at first: one counts.
            score=tf.fill([batch, K], _NEVER) * tf.cast(tf.range(K) > 0, tf.float32),
            ended_ids=tf.zeros([batch, K, model.length], tf.int32),
            ended_score=tf.fill([batch, K], _NEVER),
        )
        result = _search(ctx, model, start, choose, _done)
        cut = result.score / self._penalty(model.length)
        cut = tf.where(_done(result)[:, None], _NEVER, cut)
        return _merge(result.ended_ids, result.ended_score, result.ids, cut)

    def _penalty(self, length) -> tf.Tensor:
        return ((5.0 + tf.cast(length, tf.float32)) / 6.0) ** self.alpha


def _search(
    ctx: Context, model: TokenModel, start: NestedMap, choose, is_done
) -> NestedMap:
    """The final state of a search: all rows are done, or at length T.

    Args:
      ctx: the context, whose plan splits the batch.
      model: predicts the next token.
      start: the state before the first token; tensors [B, ...], `last` the last token.
      choose: (position, state, logits float32 [B, K, V]) -> (state, and the beams [B,
        K] that go on, or None for all as they are).
      is_done: state -> bool [B].
    """

    def body(position, state):
        logits, cache = model.step(state.last, state.cache, position)
        new, beam = choose(position, state, tf.cast(logits, tf.float32))
        if beam is not None:
            cache = cache.map(lambda t: _take_rows(t, beam, model.cache_dim))
        return [position + 1, NestedMap(new.map(_split(ctx)), cache=cache)]

    def goes_on(position, state):
        return (position < model.length) & ~tf.reduce_all(is_done(state))

    state = NestedMap(start.map(_split(ctx)), cache=model.cache)
    return tf.while_loop(goes_on, body, [tf.constant(0), state])[1]


def _done(state: NestedMap) -> tf.Tensor:
    """bool [B]: whether K beams have ended."""
    return tf.reduce_min(state.ended_score, -1) > _NEVER / 2


def _split(ctx: Context):
    """Annotates tensors [B, ...] along the batch alone."""
    return lambda t: ctx.split(t, ("batch", *[None] * (t.shape.rank - 1)))


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


def _take_rows(values: tf.Tensor, beam: tf.Tensor, dim: int) -> tf.Tensor:
    """`_take` of values with B * K rows along `dim`."""
    given = shape_of(values)
    before, after = given[:dim], given[dim + 1 :]
    here = tf.range(beam.shape[1]) == beam[:, :, None]
    here = tf.reshape(here, [*[1] * dim, *shape_of(here), *[1] * len(after)])
    split = tf.reshape(values, [*before, -1, 1, beam.shape[1], *after])
    zero = tf.zeros([], values.dtype)
    taken = tf.reduce_sum(tf.where(here, split, zero), axis=dim + 2)
    return tf.reshape(taken, given)


def _merge(ids, scores, more_ids, more_scores) -> Decoded:
    """The K best of K results [B, K] and J more [B, J]."""
    all_scores = tf.concat([scores, more_scores], axis=1)
    all_ids = tf.concat([ids, more_ids], axis=1)
    best, at, _ = _best(all_scores[:, :, None], scores.shape[1])
    return Decoded(ids=_take(all_ids, at), scores=best)
