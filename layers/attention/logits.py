"""The logits of attention, of all pairs of tokens or of a pair of blocks.

Dims: B batch, S sequence (query), T sequence (key), N heads, D head size, U blocks, C
tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from meshwright.layers.attention.blocks import Cut
from meshwright.layers.attention.mask_rules import (
    MaskKind,
    MaskRule,
    Tokens,
    kind_of,
    visibility,
)
from meshwright.layers.attention.positions import relative_bias
from meshwright.layers.basic.entries import read

# Finite: a row that sees no key must still give numbers, and so must its gradient.
_NEVER = -1e30
# Below any logit that is hidden, above the least number: never NaN, alone in a row.
_FILLED_UP = -3e38


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """Makes the logits of queries and keys, in either form.

    Args:
      mask: which keys a query sees by position.
      queries: where queries are, [B or 1, S].
      keys: where keys are, [B or 1, T].
      dtype: that of logits.
      paddings: [B or 1, T], 1 at keys that no query sees.
      offset: the index of the first key minus that of the first query.
      max_distance: of relative positions.
      cap: c of c * tanh(products / c), or None.
    """

    mask: MaskKind | MaskRule
    queries: Tokens
    keys: Tokens
    dtype: tf.DType
    paddings: tf.Tensor | None = None
    offset: int | tf.Tensor = 0
    max_distance: int = 128
    cap: float | None = None

    def of_all(self, q: tf.Tensor, k: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
        """The logits of all pairs of tokens.

        Args:
          q: [B, S, N, D], scaled.
          k: [B, T, N, D].
          bias: float32 [num_buckets, N], the weight of relative positions, or None.

        Returns:
          [B, N, S, T].
        """
        products = tf.einsum("bsnd,btnd->bnst", q, k)
        return self._finished(
            products, self.queries, self.keys, self.paddings, bias, self.offset
        )

    def by_pair(
        self, queries: BlockTokens, keys: BlockTokens
    ) -> Callable[..., tf.Tensor]:
        """A function that makes the logits of a pair of blocks.

        Its arguments are the blocks' numbers, q [B, N, C, D], k [B, N, C, D], and, if
        there are relative positions, their weight [num_buckets, N], which may have a
        batch dim in front. It returns float32 [B, N, C, C].
        """

        def of_pair(i, j, q, k, bias=None):
            query, key = queries.read(i), keys.read(j)
            products = tf.matmul(q, k, transpose_b=True)
            paddings = None if keys.paddings is None else read(keys.paddings, j)
            logits = self._finished(
                products,
                query,
                key,
                paddings,
                bias,
                keys.start(j) - queries.start(i),
                queries.stride,
            )
            logits = tf.cast(logits, tf.float32)
            if keys.length is None:
                return logits
            # No mean of values either, of a query that sees no key.
            return tf.where(key.index < keys.length, logits, _FILLED_UP)

        return of_pair

    def _finished(self, products, queries, keys, paddings, bias, offset, stride=1):
        """Logits, of the products [B, N, ...] of some queries and keys."""
        logits = tf.cast(products, self.dtype)
        if self.cap is not None:
            logits = self.cap * tf.tanh(logits / self.cap)
        if bias is not None:
            bias = relative_bias(
                bias,
                *logits.shape[2:],
                mask=kind_of(self.mask),
                max_distance=self.max_distance,
                offset=offset,
                stride=stride,
            )
            logits += tf.cast(bias, self.dtype)
        visible = visibility(self.mask, queries, keys, paddings)
        if visible is not None:
            hidden = tf.where(visible, 0.0, _NEVER)[:, None, :, :]
            logits += tf.cast(hidden, self.dtype)
        return logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTokens:
    """Where the tokens of a stack of blocks are.

    Args:
      size: C.
      first: the index of the first token.
      stride: the index of a token minus that of the one before it.
      length: tokens from this index on are filled up; None: there are none.
      segment: int32 [U, B or 1, C], see `Tokens`.
      position: likewise.
      paddings: [U, B or 1, C], 1 at keys that no query sees.
    """

    size: int
    first: int | tf.Tensor = 0
    stride: int = 1
    length: int | None = None
    segment: tf.Tensor | None = None
    position: tf.Tensor | None = None
    paddings: tf.Tensor | None = None

    @classmethod
    def of(
        cls, tokens: Tokens, cut: Cut, paddings: tf.Tensor | None = None
    ) -> BlockTokens:
        """The tokens of a row that is cut in blocks, and their paddings [B or 1, S]."""
        parts = (tokens.segment, tokens.position, paddings)
        segment, position, paddings = (
            None if part is None else cut.apply(part, 1) for part in parts
        )
        return cls(
            size=cut.size,
            length=None if cut.is_even else cut.length,
            segment=segment,
            position=position,
            paddings=paddings,
        )

    def start(self, i: tf.Tensor) -> tf.Tensor:
        """The index of the first token of block `i`."""
        return self.first + self.stride * (i * self.size)

    def read(self, i: tf.Tensor) -> Tokens:
        """The tokens of block `i`, [B or 1, C]."""
        segment, position = (
            None if part is None else read(part, i)
            for part in (self.segment, self.position)
        )
        index = self.start(i) + self.stride * tf.range(self.size)
        return Tokens(index=index[None], segment=segment, position=position)
