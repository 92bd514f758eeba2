"""The logits of attention, of all pairs of tokens or of a pair of blocks.

Dims: B batch, S sequence (query), T sequence (key), N heads, D head size, P distances,
U blocks, C tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.blocks import Cut
from meshwright.layers.attention.learned_terms import BY_BATCH, TABLES, Learned
from meshwright.layers.attention.mask_rules import (
    MaskKind,
    MaskRule,
    Tokens,
    kind_of,
    reach_after,
    visibility,
)
from meshwright.layers.attention.relative.relative_bias import relative_bias
from meshwright.layers.attention.relative.relative_positions import TABLE, TableRows
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
      paddings: [B or 1, T], 1 at keys that no query sees; or, of all pairs,
        [B, S, T], that a query does not see.
      offset: the index of the first key minus that of the first query.
      relative: int32 [T], of keys that are not in a row: the index of each minus that
        of the queries, which all have the same. `of_all` reads it in place of `offset`.
      max_distance: of relative positions.
      cap: c of c * tanh(products / c), or None.
    """

    mask: MaskKind | MaskRule
    queries: Tokens
    keys: Tokens
    dtype: tf.DType
    paddings: tf.Tensor | None = None
    offset: int | tf.Tensor = 0
    relative: tf.Tensor | None = None
    max_distance: int = 128
    cap: float | None = None

    def of_all(
        self, ctx: Context, q: tf.Tensor, k: tf.Tensor, learned: Learned
    ) -> tf.Tensor:
        """The logits of all pairs of tokens.

        Args:
          ctx: context.
          q: [B, S, N, D], scaled.
          k: [B, T, N, D].
          learned: what joins them; sinks do not.

        Returns:
          [B, N, S, T].
        """
        products = [tf.einsum("bsnd,btnd->bnst", q, k)]
        if learned.to_keys is not None:
            keys = k.shape[1]
            products.append(
                learned.to_keys.products(ctx, q, keys, self.offset, self.relative)
            )
        return self.finished(
            products,
            self.queries,
            self.keys,
            paddings=self.paddings,
            bias=learned.bias,
            offset=self.offset,
        )

    def by_pair(
        self, queries: BlockTokens, keys: BlockTokens, reach: int | None = None
    ) -> PairLogits:
        """The logits of pairs of blocks; for `reach` see `DistanceVectors`."""
        rows = TableRows.of(
            queries=queries.end,
            keys=keys.end,
            sizes=(queries.size, keys.size),
            stride=queries.stride,
            reach=reach,
            after=reach_after(self.mask, queries.end, queries.stride * queries.size),
        )
        return PairLogits(logits=self, queries=queries, keys=keys, rows=rows)

    def finished(
        self,
        products: Sequence[tf.Tensor],
        queries: Tokens,
        keys: Tokens,
        *,
        paddings: tf.Tensor | None,
        bias: tf.Tensor | None,
        offset: int | tf.Tensor,
        stride: int = 1,
    ) -> tf.Tensor:
        """Logits, of the products [B, N, ...] of some queries and keys; their sum."""
        logits = tf.add_n([tf.cast(each, self.dtype) for each in products])
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
                relative=self.relative,
            )
            logits += tf.cast(bias, self.dtype)
        visible = visibility(self.mask, queries, keys, paddings)
        if visible is not None:
            hidden = tf.where(visible, 0.0, _NEVER)[:, None, :, :]
            logits += tf.cast(hidden, self.dtype)
        return logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLogits:
    """Makes the logits of a pair of blocks.

    Args:
      logits: what is visible, and how they are finished.
      queries: where queries are.
      keys: where keys are.
      rows: which relative positions tables of vectors have, where there are such.
    """

    logits: Logits
    queries: BlockTokens
    keys: BlockTokens
    rows: TableRows

    def read(
        self, ctx: Context, i: tf.Tensor, j: tf.Tensor, learned: NestedMap, batch: int
    ) -> NestedMap:
        """What a pair of blocks needs of `Learned.in_blocks`.

        Of tables these are the rows of its distances, [B, N, P, D].
        """
        start = self._start(i, j, learned)

        def part(name: str, t: tf.Tensor) -> tf.Tensor:
            if name not in TABLES:
                return t
            rows = self.rows.read(t, start)
            rows = tf.broadcast_to(rows, [batch, *rows.shape])
            return ctx.split(rows, ("batch", *TABLE[1:]))

        return learned.map_with_path(part)

    def added(
        self,
        ctx: Context,
        i: tf.Tensor,
        j: tf.Tensor,
        sums: NestedMap,
        news: NestedMap,
    ) -> NestedMap:
        """`sums`, see `no_gradients`, after the gradients of what `read` gave."""
        start = self._start(i, j, sums)

        def total(name: str, t: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            if name not in TABLES:
                return t + new
            return ctx.split(self.rows.add_at(t, new, start), BY_BATCH[name])

        return sums.map_with_path(total, news)

    def of(
        self,
        i: tf.Tensor,
        j: tf.Tensor,
        q: tf.Tensor,
        k: tf.Tensor,
        by_vectors: tf.Tensor | None = None,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """The logits, float32 [B, N, C, C].

        Args:
          i: the number of the block of queries.
          j: that of the block of keys.
          q: [B, N, C, D], scaled.
          k: [B, N, C, D].
          by_vectors: products [B, N, C, C] of queries and vectors of their distances to
            keys, if there are some.
          bias: [num_buckets, N], with or without a batch dim in front, or None.
        """
        query, key = self.queries.read(i), self.keys.read(j)
        products = [tf.matmul(q, k, transpose_b=True)]
        if by_vectors is not None:
            products.append(by_vectors)
        keys = self.keys
        logits = self.logits.finished(
            products,
            query,
            key,
            paddings=None if keys.paddings is None else read(keys.paddings, j),
            bias=bias,
            offset=self._offset(i, j),
            stride=self.queries.stride,
        )
        logits = tf.cast(logits, tf.float32)
        if keys.length is None:
            return logits
        # No mean of values either, of a query that sees no key.
        return tf.where(key.index < keys.length, logits, _FILLED_UP)

    def _offset(self, i: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        return self.keys.start(j) - self.queries.start(i)

    def _start(self, i: tf.Tensor, j: tf.Tensor, learned: NestedMap):
        if not learned.keys() & TABLES:
            return None
        return self.rows.start(self._offset(i, j), self.queries.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTokens:
    """Where the tokens of a stack of blocks are.

    Args:
      size: C.
      end: one above the largest index of a token, on any device.
      first: the index of the first token.
      stride: the index of a token minus that of the one before it.
      length: tokens from this index on are filled up; None: there are none.
      segment: int32 [U, B or 1, C], see `Tokens`.
      position: likewise.
      paddings: [U, B or 1, C], 1 at keys that no query sees.
    """

    size: int
    end: int
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
            end=cut.count * cut.size,
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
