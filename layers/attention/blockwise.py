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

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.random import keep_words, kept
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.modeling.shapes import shape_of
from meshwright.layers.attention.blocks import Cut, Pairs
from meshwright.layers.attention.logits import Logits
from meshwright.layers.attention.mask_rules import rule_of
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.entries import add_at, read, write

_BLOCKS = ("blocks", "batch", "heads", "block", "head_dim")


def attend_in_blocks(
    ctx: Context,
    logits: Logits,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    bias: tf.Tensor | None,
    *,
    dropout: Dropout,
    block_size: int,
) -> tf.Tensor:
    """The weighted sums of values, as `attend` of `attention.py` gives them.

    A query that sees no key gets a mean of values, as there; of those in the blocks
    that its mask leaves. There is no second gradient.

    Args:
      ctx: context; the random key of dropout is that of its "dropout".
      logits: makes the logits of any queries and keys.
      q: [B, S, N, D].
      k: [B, T, N, D].
      v: [B, T, N, D].
      bias: float32 [num_buckets, N], the weight of relative positions, or None.
      dropout: of the weights.
      block_size: the most tokens of a block.

    Returns:
      [B, S, N, D] in the activation dtype.
    """
    queries, keys = (Cut.of(t.shape[1], block_size) for t in (q, k))
    attention = _Blockwise(
        ctx=ctx,
        logits=logits,
        pairs=Pairs.of(queries, keys, rule_of(logits.mask)),
        dropout=_DropoutByBlock.of(ctx, dropout, q, queries, keys),
    )
    stacks = [
        attention.split(cut.apply(tf.transpose(t, [0, 2, 1, 3]), 2))
        for t, cut in ((q, queries), (k, keys), (v, keys))
    ]
    weights = [] if bias is None else [bias]
    out = tf.custom_gradient(attention.fprop)(*stacks, *weights)
    return tf.transpose(queries.undo(out, 2), [0, 2, 1, 3])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blockwise:
    """The forward pass and its gradient, on stacks of blocks [U, B, N, C, D]."""

    ctx: Context
    logits: Logits
    pairs: Pairs
    dropout: _DropoutByBlock | None

    def split(self, stack: tf.Tensor) -> tf.Tensor:
        """A stack of blocks, or of numbers of their queries, annotated."""
        return self.ctx.split(stack, _BLOCKS[: stack.shape.rank])

    def fprop(self, q, k, v, *bias):
        """The output's blocks, and the function of their gradient."""
        of_pair = self.logits.by_pair(self.pairs)
        rows = shape_of(q)[:-1]

        def body(i, j, total, largest, weighted):
            logits = of_pair(i, j, read(q, i), read(k, j), *bias)
            before = read(largest, i)
            most = tf.maximum(before, tf.reduce_max(logits, -1))
            score = tf.exp(logits - most[..., None])
            fade = tf.exp(before - most)
            added = read(total, i) * fade + tf.reduce_sum(score, -1)
            score = self._dropped(self.ctx.cast(score), i, j)
            value = _product(score, read(v, j), 1, 0)
            value += read(weighted, i) * fade[..., None]
            news = (added, most, value)
            stacks = zip((total, largest, weighted), news, strict=True)
            return [self.split(write(stack, new, i)) for stack, new in stacks]

        first = [tf.zeros(rows), tf.fill(rows, tf.float32.min), tf.zeros(shape_of(q))]
        total, largest, weighted = self.pairs.loop(body, map(self.split, first))
        out = self.split(self.ctx.cast(weighted / total[..., None]))
        # Whoever saves the context saves what its gradient needs.
        out, total, largest = (save_name(t, "context") for t in (out, total, largest))

        def gradient(dy):
            return self._gradient(dy, (q, k, v, *bias), out, total, largest)

        return out, gradient

    def _gradient(self, dy, inputs, out, total, largest) -> list[tf.Tensor]:
        q, k, v, *bias = inputs
        of_pair = self.logits.by_pair(self.pairs)
        dy = self.split(self.ctx.cast(dy))
        inner = tf.reduce_sum(tf.cast(dy, tf.float32) * tf.cast(out, tf.float32), -1)
        # Its gradient keeps the batch dim in the loop: split, a sum over it would be
        # added up over devices for each pair.
        bias = [tf.broadcast_to(w, [shape_of(q)[1], *w.shape]) for w in bias]

        def body(i, j, dq, dk, dv, *dbias):
            blocks = [read(q, i), read(k, j), *bias]
            dout = read(dy, i)
            with tf.GradientTape() as tape:
                tape.watch(blocks)
                logits = of_pair(i, j, *blocks)
            share = tf.exp(logits - read(largest, i)[..., None])
            share /= read(total, i)[..., None]
            dshare = _product(dout, read(v, j), 1, 1)
            dshare = self._dropped(dshare, i, j) - read(inner, i)[..., None]
            score = self._dropped(self.ctx.cast(share), i, j)
            news = tape.gradient(logits, blocks, share * dshare)
            dvalue = _product(score, dout, 0, 0)
            added = [(dq, news[0], i), (dk, news[1], j), (dv, dvalue, j)]
            sums = [self.split(add_at(*each)) for each in added]
            return [*sums, *(d + new for d, new in zip(dbias, news[2:], strict=True))]

        stacks = [self.split(tf.zeros(shape_of(t))) for t in (q, k, v)]
        sums = self.pairs.loop(body, [*stacks, *map(tf.zeros_like, bias)])
        return [
            *map(self.ctx.cast, sums[:3]),
            *(tf.reduce_sum(dbias, 0) for dbias in sums[3:]),
        ]

    def _dropped(self, x: tf.Tensor, i: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        return x if self.dropout is None else self.dropout.apply(x, i, j)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DropoutByBlock:
    """Drops what `Dropout` drops of [B, N, S, T], block by block.

    Args:
      dropout: the layer.
      rows: uint32 [U, 2, B, N, C, 1], see `keep_words`.
      columns: uint32 [U, 2, C].
    """

    dropout: Dropout
    rows: tf.Tensor
    columns: tf.Tensor

    @classmethod
    def of(cls, ctx: Context, dropout: Dropout, q, queries: Cut, keys: Cut):
        """None if nothing is dropped."""
        with ctx.scope("dropout") as c:
            if not dropout.drops(c):
                return None
            B, S, N, _ = q.shape
            rows, columns = keep_words(c.random_key(), [B, N, S, keys.length])
        rows = ctx.split(
            queries.apply(rows, 3), ("blocks", "words", "batch", "heads", "block", "")
        )
        return cls(dropout=dropout, rows=rows, columns=keys.apply(columns, 1))

    def apply(self, x: tf.Tensor, i: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        """`x` [B, N, C, C] of a pair, with some elements dropped."""
        keep = kept(read(self.rows, i), read(self.columns, j), self.dropout.rate)
        return self.dropout.scaled(x, keep)


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
