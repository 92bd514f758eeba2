"""The logits of attention, of all pairs of tokens or of a pair of blocks.

Dims: B batch, S sequence (query), T sequence (key), N heads, D head size, U blocks, C
tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from meshwright.layers.attention.blocks import Cut, Pairs
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

    def by_pair(self, pairs: Pairs) -> Callable[..., tf.Tensor]:
        """A function that makes the logits of a pair of blocks.

        Its arguments are the blocks' numbers, q [B, N, C, D], k [B, N, C, D], and, if
        there are relative positions, their weight [num_buckets, N], which may have a
        batch dim in front. It returns float32 [B, N, C, C].
        """
        paddings = None if self.paddings is None else pairs.keys.apply(self.paddings, 1)
        queries, keys = (
            _by_block(self.queries, pairs.queries),
            _by_block(self.keys, pairs.keys),
        )

        def of_pair(i, j, q, k, bias=None):
            key = keys(j)
            logits = self._finished(
                tf.matmul(q, k, transpose_b=True),
                queries(i),
                key,
                None if paddings is None else read(paddings, j),
                bias,
                j * pairs.keys.size - i * pairs.queries.size,
            )
            logits = tf.cast(logits, tf.float32)
            if pairs.keys.is_even:
                return logits
            # No mean of values either, of a query that sees no key.
            return tf.where(key.index < pairs.keys.length, logits, -np.inf)

        return of_pair

    def _finished(self, products, queries, keys, paddings, bias, offset) -> tf.Tensor:
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
            )
            logits += tf.cast(bias, self.dtype)
        visible = visibility(self.mask, queries, keys, paddings)
        if visible is not None:
            hidden = tf.where(visible, 0.0, _NEVER)[:, None, :, :]
            logits += tf.cast(hidden, self.dtype)
        return logits


def _by_block(tokens: Tokens, cut: Cut) -> Callable[[tf.Tensor], Tokens]:
    """The tokens of a block, by its number."""
    stacks = [
        None if part is None else cut.apply(part, 1)
        for part in (tokens.segment, tokens.position)
    ]

    def block(i):
        segment, position = (None if s is None else read(s, i) for s in stacks)
        return Tokens(index=cut.index(i), segment=segment, position=position)

    return block
