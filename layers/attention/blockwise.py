"""Attention block by block, in memory that grows with the length and not its square.

The softmax is computed as its keys come (Milakov and Gimelshein 2018): of each query
the largest logit so far, the sum of exponentials and the sum of weighted values are
kept. The gradient computes the logits again from queries and keys, as FlashAttention's
does (Dao et al. 2022, section 3.1); saved are the output and two numbers of each query.

Dims: B batch, S sequence (query), T sequence (key), N heads, D head size, U blocks, C
tokens of a block (of queries, or of keys).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.random import keep_words, kept
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.blocks import Cut, Pairs
from meshwright.layers.attention.learned_terms import (
    Learned,
    by_batch,
    no_gradients,
    over_batch,
)
from meshwright.layers.attention.logits import BlockTokens, Logits, PairLogits
from meshwright.layers.attention.mask_rules import rule_of
from meshwright.layers.attention.relative.relative_positions import by_distance, by_key
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.entries import add_at, read, write

BLOCKS = ("blocks", "batch", "heads", "block", "head_dim")
ROWS = ("blocks", "words", "batch", "heads", "block", "")


def attend_in_blocks(
    ctx: Context,
    logits: Logits,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    learned: Learned,
    *,
    dropout: Dropout,
    block_size: int,
) -> tf.Tensor:
    """The weighted sums of values, as they are of all pairs at once.

    A query that sees no key gets a mean of values, as there; of those in the blocks
    that its mask leaves. There is no second gradient.

    Args:
      ctx: context; the random key of dropout is that of its "dropout".
      logits: makes the logits of any queries and keys.
      q: [B, S, N, D].
      k: [B, T, N, D].
      v: [B, T, N, D].
      learned: what joins the logits and values.
      dropout: of the weights.
      block_size: the most tokens of a block.

    Returns:
      [B, S, N, D] in the activation dtype.
    """
    queries, keys = (Cut.of(t.shape[1], block_size) for t in (q, k))
    has_gaps = logits.keys.position is None
    by_pair = logits.by_pair(
        BlockTokens.of(logits.queries, queries),
        BlockTokens.of(logits.keys, keys, logits.paddings),
        learned.reach,
    )
    blocks = PairsOfBlocks(
        ctx=ctx,
        pairs=Pairs.of(queries, keys, rule_of(logits.mask), has_gaps=has_gaps),
        logits=by_pair,
        dropout=_dropout(ctx, dropout, q, queries, keys),
    )
    stacks = [
        blocks.split(cut.apply(tf.transpose(t, [0, 2, 1, 3]), 2))
        for t, cut in ((q, queries), (k, keys), (v, keys))
    ]
    tensors = learned.in_blocks(ctx, by_pair.rows)
    fprop = tf.custom_gradient(_Blockwise(blocks, sorted(tensors)).fprop)
    out = fprop(*stacks, *tensors.leaves())
    return tf.transpose(queries.undo(out, 2), [0, 2, 1, 3])


@dataclasses.dataclass(frozen=True)
class _Blockwise:
    """The forward pass and its gradient, on stacks of blocks [U, B, N, C, D].

    `names` are those of the tensors behind q, k and v, see `Learned.in_blocks`.
    """

    blocks: PairsOfBlocks
    names: Sequence[str]

    def fprop(self, q, k, v, *tensors):
        """The output's blocks, and the function of their gradient."""
        learned = NestedMap(zip(self.names, tensors, strict=True))
        sums = no_sums(self.blocks.ctx, q, learned.get("sink"))
        total, largest, weighted = self.blocks.forward(sums, q, k, v, learned)
        out = self.blocks.split(self.blocks.ctx.cast(weighted / total[..., None]))
        # Whoever saves the context saves what its gradient needs.
        out, total, largest = (save_name(t, "context") for t in (out, total, largest))

        def gradient(dy):
            dy = self.blocks.split(self.blocks.ctx.cast(dy))
            inner = inner_products(dy, out)
            query = QueryBlocks(q=q, dy=dy, inner=inner, total=total, largest=largest)
            *by_stack, dlearned = self._gradient(query, k, v, learned)
            return [*by_stack, *dlearned.leaves()]

        return out, gradient

    def _gradient(self, query: QueryBlocks, k, v, learned: NestedMap) -> list:
        """The gradients by q, k, v and `learned`, a nested map."""
        blocks, q = self.blocks, query.q
        first = [blocks.split(tf.zeros(shape_of(t))) for t in (q, k, v)]
        learned = by_batch(learned, q)
        first.append(no_gradients(blocks.ctx, learned, q))
        *by_stack, dlearned = blocks.backward(first, query, k, v, learned)
        return [*map(blocks.ctx.cast, by_stack), over_batch(dlearned, learned)]


@dataclasses.dataclass(frozen=True)
class QueryBlocks:
    """What the backward pass reads of blocks of queries.

    Args:
      q: [U, B, N, C, D].
      dy: the output's gradient, likewise.
      inner: float32 [U, B, N, C], see `inner_products`.
      total: the softmax's sums, likewise.
      largest: the largest logits, likewise.
    """

    q: tf.Tensor
    dy: tf.Tensor
    inner: tf.Tensor
    total: tf.Tensor
    largest: tf.Tensor


def no_sums(ctx: Context, q: tf.Tensor, sink: tf.Tensor | None) -> list[tf.Tensor]:
    """The sums of queries that have seen no key, see `PairsOfBlocks.forward`.

    A `sink` [N] is in them as a key that has no value.
    """
    rows = shape_of(q)[:-1]
    if sink is None:
        sums = [tf.zeros(rows), tf.fill(rows, tf.float32.min)]
    else:
        sums = [tf.ones(rows), tf.broadcast_to(sink[:, None], rows)]
    sums.append(tf.zeros(shape_of(q)))
    return [ctx.split(t, BLOCKS[: t.shape.rank]) for t in sums]


def inner_products(dy: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    """float32 [U, B, N, C] of the output and its gradient."""
    return tf.reduce_sum(tf.cast(dy, tf.float32) * tf.cast(out, tf.float32), -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsOfBlocks:
    """Passes over pairs of blocks, which add to sums, on stacks [U, B, N, C, D].

    Args:
      ctx: context.
      pairs: the pairs.
      logits: see `Logits.by_pair`.
      dropout: of the weights, or None.
    """

    ctx: Context
    pairs: Pairs
    logits: PairLogits
    dropout: DropoutByBlock | None

    def split(self, stack: tf.Tensor) -> tf.Tensor:
        """A stack of blocks, or of numbers of their queries, annotated."""
        return self.ctx.split(stack, BLOCKS[: stack.shape.rank])

    def forward(
        self, sums: Sequence[tf.Tensor], q: tf.Tensor, k, v, learned: NestedMap
    ) -> list[tf.Tensor]:
        """`sums` after these keys and values too, all float32.

        They are of each query the sum of exponentials and the largest logit [U, B, N,
        C], and the weighted values [U, B, N, C, D]. `learned` is `Learned.in_blocks`.
        """
        batch = shape_of(q)[1]

        def body(i, j, total, largest, weighted):
            here = self.logits.read(self.ctx, i, j, learned, batch)
            sources = self._sources(read(q, i), read(k, j), here)
            logits = self.logits.of(i, j, **sources)
            before = read(largest, i)
            most = tf.maximum(before, tf.reduce_max(logits, -1))
            score = tf.exp(logits - most[..., None])
            fade = tf.exp(before - most)
            added = read(total, i) * fade + tf.reduce_sum(score, -1)
            score = self._dropped(self.ctx.cast(score), i, j)
            value = _product(score, read(v, j), 1, 0)
            if "to_values" in learned:
                value += _product(by_distance(score), here.to_values, 1, 0)
            value += read(weighted, i) * fade[..., None]
            news = (added, most, value)
            stacks = zip((total, largest, weighted), news, strict=True)
            return [self.split(write(stack, new, i)) for stack, new in stacks]

        return self.pairs.loop(body, sums)

    def backward(
        self,
        sums: Sequence,
        query: QueryBlocks,
        k: tf.Tensor,
        v: tf.Tensor,
        learned: NestedMap,
    ) -> list:
        """`sums` after these keys and values too: gradients by q, k, v and `learned`.

        They are float32; `learned`, and its gradients, are those of `by_batch`.
        """
        batch = shape_of(query.q)[1]
        *first, dlearned = sums

        def body(i, j, dq, dk, dv, *dlearned):
            here = self.logits.read(self.ctx, i, j, learned, batch)
            sources = self._sources(read(query.q, i), read(k, j), here)
            with tf.GradientTape() as tape:
                tape.watch(sources)
                logits = self.logits.of(i, j, **sources)
            largest, total = read(query.largest, i), read(query.total, i)
            share = tf.exp(logits - largest[..., None]) / total[..., None]
            dout = read(query.dy, i)
            dshare = _product(dout, read(v, j), 1, 1)
            if "to_values" in here:
                dshare += by_key(_product(dout, here.to_values, 1, 1), k.shape[3])
            dshare = self._dropped(dshare, i, j)
            score = self._dropped(self.ctx.cast(share), i, j)
            dlogits = share * (dshare - read(query.inner, i)[..., None])
            news = NestedMap(tape.gradient(logits, sources, dlogits))
            if "sink" in here:
                # Of float32 products: `inner` is of the output, in 16 bits maybe.
                of_sink = tf.exp(here.sink[..., None] - largest) / total
                inner = tf.reduce_sum(share * dshare, -1)
                news.sink = -tf.reduce_sum(of_sink * inner, -1)
            if "to_keys" in here:
                news = self._of_vectors(news, sources["q"], here)
            if "to_values" in here:
                news.to_values = _product(by_distance(score), dout, 0, 0)
            dvalue = _product(score, dout, 0, 0)
            added = [(dq, news.pop("q"), i), (dk, news.pop("k"), j), (dv, dvalue, j)]
            sums = [self.split(add_at(*each)) for each in added]
            sums_of_learned = learned.pack(dlearned)
            added = self.logits.added(self.ctx, i, j, sums_of_learned, news)
            return [*sums, *added.leaves()]

        by_stack = self.pairs.loop(body, [*first, *dlearned.leaves()])
        return [*by_stack[:3], learned.pack(by_stack[3:])]

    def _sources(self, q: tf.Tensor, k: tf.Tensor, here: NestedMap) -> NestedMap:
        """What `PairLogits.of` takes of blocks [B, N, C, D]."""
        sources = NestedMap(q=q, k=k)
        if "bias" in here:
            sources.bias = here.bias
        if "to_keys" in here:
            moved = _product(_shifted(q, here), here.to_keys, 1, 1)
            sources.by_vectors = by_key(moved, k.shape[2])
        return sources

    def _of_vectors(self, news: NestedMap, q: tf.Tensor, here: NestedMap) -> NestedMap:
        """Gradients `news` by `_sources`, with those by vectors in place of products.

        They are float32, as sums of many pairs are made of them.
        """
        moved = by_distance(self.ctx.cast(news.pop("by_vectors")))
        news.to_keys = _product(moved, _shifted(q, here), 0, 0)
        dq = _product(moved, here.to_keys, 1, 0)
        news.q = tf.cast(news.q, tf.float32) + dq
        if "shift" in here:
            news.shift = tf.reduce_sum(dq, 2)
        return news

    def _dropped(self, x: tf.Tensor, i: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        return x if self.dropout is None else self.dropout.apply(x, i, j)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropoutByBlock:
    """Drops what `Dropout` drops of [B, N, S, T], block by block.

    Args:
      dropout: the layer.
      rows: uint32 [U, 2, B, N, C, 1], see `keep_words`.
      columns: uint32 [U, 2, C].
    """

    dropout: Dropout
    rows: tf.Tensor
    columns: tf.Tensor

    def apply(self, x: tf.Tensor, i: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        """`x` [B, N, C, C] of a pair, with some elements dropped."""
        keep = kept(read(self.rows, i), read(self.columns, j), self.dropout.rate)
        return self.dropout.scaled(x, keep)


def dropout_words(
    ctx: Context, dropout: Dropout, q: tf.Tensor, keys: int
) -> tuple[tf.Tensor, tf.Tensor] | None:
    """The words of [B, N, S, T], see `keep_words`; None if nothing is dropped."""
    with ctx.scope("dropout") as c:
        if not dropout.drops(c):
            return None
        B, S, N, _ = q.shape
        return keep_words(c.random_key(), [B, N, S, keys])


def _dropout(ctx, dropout, q, queries: Cut, keys: Cut) -> DropoutByBlock | None:
    words = dropout_words(ctx, dropout, q, keys.length)
    if words is None:
        return None
    rows = ctx.split(queries.apply(words[0], 3), ROWS)
    return DropoutByBlock(dropout=dropout, rows=rows, columns=keys.apply(words[1], 1))


def _shifted(q: tf.Tensor, here: NestedMap) -> tf.Tensor:
    """Queries [B, N, C, D] as products with vectors read them."""
    if "shift" not in here:
        return q
    return q + tf.cast(here.shift, q.dtype)[..., None, :]


def _product(x: tf.Tensor, y: tf.Tensor, x_dim: int, y_dim: int) -> tf.Tensor:
    """float32 products of matrices [B, N, ...], contracted over these dims of them."""
    if tf.executing_eagerly():
        x, y = tf.cast(x, tf.float32), tf.cast(y, tf.float32)
        return tf.matmul(x, y, transpose_a=x_dim == 0, transpose_b=y_dim == 1)
    dims = xla_data_pb2.DotDimensionNumbers(
        lhs_batch_dimensions=[0, 1],
        rhs_batch_dimensions=[0, 1],
        lhs_contracting_dimensions=[2 + x_dim],
        rhs_contracting_dimensions=[2 + y_dim],
    )
    return xla.dot_general(x, y, dims, preferred_element_type=tf.float32)
