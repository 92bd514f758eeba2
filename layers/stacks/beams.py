"""Where the hypotheses of a search have their tokens in a stack's caches.

Dims: B rows, K hypotheses of each, P tokens before the search, N steps, T places of a
cache.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.modeling.shapes import copies_of_each, shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.stacks import cache_rows
from meshwright.layers.stacks.sequential import each_layer
from meshwright.layers.transformer import TransformerLayer

Run = Callable[..., tuple[tf.Tensor, NestedMap]]
"""(cache, position, **inputs of attention) -> (a result, cache)."""


@gin.constants_from_enum
class BeamCaches(enum.Enum):
    """Which caches the hypotheses of a beam search have.

    REORDERED: each has its own, and after each step that of the hypothesis that it goes
    on from. FLAT: those of a row share one, to which each step adds the tokens of all;
    each attends to the tokens that it goes on from, by a mask, and the mask alone is
    reordered (GShard, appendix A.1). Attention then has K times the keys.
    """

    REORDERED = "reordered"
    FLAT = "flat"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beams:
    """Hypotheses with a cache each.

    Args:
      stack: the layers whose caches they are.
      path: the fields that lead to the stack, for messages.
      count: K.
      steps: N.
      before: P, tokens that all hypotheses of a row have in common.
    """

    stack: Layer
    path: str
    count: int
    steps: int
    before: int = 0

    @property
    def length(self) -> int:
        """T."""
        return self.before + self.steps

    def begin(self, ctx: Context, cache: NestedMap, rows: int | tf.Tensor) -> NestedMap:
        """The cache of all hypotheses, of one of B rows and T places."""
        del ctx, rows
        return cache_rows.copied(self.stack, cache, self.count)

    def tokens(self, values: tf.Tensor) -> tf.Tensor:
        """What comes by hypothesis, [B, K], as the tokens of a step."""
        return tf.reshape(values, [-1, 1])

    def step(
        self,
        run: Run,
        cache: NestedMap,
        position: tf.Tensor,
        *,
        paddings: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """What `run` returns, with the cache of all hypotheses.

        Args:
          run: a step of the stack, of `tokens`.
          cache: as `begin` or `step` returned it.
          position: int32 scalar, the number of the step.
          paddings: int32 [B, P or more], 1 at tokens before the search that no query
            sees.
        """
        inputs = {}
        if paddings is not None:
            more = tf.pad(paddings, [[0, 0], [0, self.length - paddings.shape[1]]])
            inputs["paddings"] = copies_of_each(more, self.count, 0)
        return run(cache, self.before + position, **inputs)

    def reordered(self, cache: NestedMap, beam: tf.Tensor) -> NestedMap:
        """The cache where each hypothesis goes on from another, int32 [B, K]."""
        return cache_rows.reordered(self.stack, cache, beam)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatBeams(Beams):
    """Hypotheses of a row with one cache; see `BeamCaches.FLAT`.

    Places are by time: those of the tokens before the search, then K of each step.

    Raises:
      ValueError: a layer that may keep something else than keys of all tokens.
    """

    def __post_init__(self):
        for path, layer in each_layer(self.stack, self.path):
            if _has_cache_of(TransformerLayer, layer):
                path, layer = f"{path}.attention", layer.attention
            if not _has_cache_of(MultiHeadAttention, layer):
                raise ValueError(
                    f"{path} is {type(layer).__name__}, which may keep a running state "
                    "in place of the keys of all tokens, so that hypotheses cannot "
                    "share its cache: set BeamSearch.caches = %BeamCaches.REORDERED, "
                    "or make it a TransformerLayer with a MultiHeadAttention"
                )

    @property
    def length(self) -> int:
        return self.before + self.steps * self.count

    def begin(self, ctx: Context, cache: NestedMap, rows: int | tf.Tensor) -> NestedMap:
        """`stack`, the cache itself, and `past`, bool [B, K, N * K].

        The latter says of which steps' tokens each hypothesis is made.
        """
        none = tf.zeros([rows, self.count, self.steps * self.count], tf.bool)
        return NestedMap(stack=cache, past=ctx.split(none, ("batch", None, None)))

    def tokens(self, values: tf.Tensor) -> tf.Tensor:
        return values

    def step(
        self,
        run: Run,
        cache: NestedMap,
        position: tf.Tensor,
        *,
        paddings: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        K, P = self.count, self.before
        own = position * K + tf.range(K)
        past = cache.past | (tf.range(self.steps * K) == own[:, None])
        rows = shape_of(past)[0]
        if paddings is None:
            paddings = tf.zeros([rows, P], tf.int32)
        before = tf.broadcast_to(paddings[:, None, :P], [rows, K, P])
        hidden = tf.concat([before, tf.cast(~past, tf.int32)], axis=-1)
        steps = P + tf.range(self.steps)
        times = tf.concat([tf.range(P), tf.repeat(steps, K)], axis=0)
        out, stack = run(
            cache.stack, P + position * K, paddings=hidden, times=times[None]
        )
        return out, NestedMap(stack=stack, past=past)

    def reordered(self, cache: NestedMap, beam: tf.Tensor) -> NestedMap:
        here = tf.range(self.count) == beam[:, :, None]
        past = tf.reduce_any(here[..., None] & cache.past[:, None], axis=2)
        return NestedMap(cache, past=past)


def _has_cache_of(kind: type[Layer], layer: Layer) -> bool:
    """Whether it keeps what layers of a class do, and not what a subclass adds."""
    return isinstance(layer, kind) and type(layer).init_cache is kind.init_cache


KINDS = {BeamCaches.REORDERED: Beams, BeamCaches.FLAT: FlatBeams}
