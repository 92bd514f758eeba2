"""Self-attention with sinusoidal relative positions, to all frames or to near frames.

Frames are cut into U blocks of W. Each block attends to itself, to the last L frames of
the block before and to the first R of the block after; without bounds there is a single
block.

Dims: B batch, S sequence, U blocks, W frames of a block, C frames it attends to
(L + W + R), P distances (W + C), M model, N heads, D head size.
"""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.initializers import Constant, FanIn
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.positions import sinusoids
from meshwright.layers.attention.relative.relative_positions import (
    PND,
    by_key,
    check_pairs,
)
from meshwright.layers.attention.split.sequence_splits import BSND
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.linear import (
    add_bias,
    contract,
    contract_each,
    per_feature,
    read_stream,
    to_stream,
)
from meshwright.layers.basic.masks import check_mask

# Finite: a row that sees no key must still give numbers, and so must its gradient.
_NEVER = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks:
    """How S frames are cut: `count` blocks of `size`, each sees `left` and `right`."""

    count: int
    size: int
    left: int
    right: int

    @property
    def seen(self) -> int:
        """C."""
        return self.left + self.size + self.right


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeAttention(Layer):
    """Multi-head self-attention of Transformer-XL (Dai et al. 2019, section 3.3).

    The logit of query i and key j is ((q_i + u) k_j + (q_i + v) r_(i-j)) / sqrt(D),
    where r is a projection of the distance's sinusoids, and u and v are weights. With
    bounds on both sides its cost grows with S times the bounds, not with S squared.

    Recomputation may save `attention_in`, `query`, `key`, `value`, `context` and
    `attention_out`.

    Args:
      model_dims: M, even.
      num_heads: N.
      head_dim: D.
      left_context: how many frames before itself a frame sees; None: all.
      right_context: how many frames after itself; None: all; 0 is causal.
      max_timescale: the wave lengths of sinusoids go from 2 pi up to near 2 pi times
        this, as the Transformer's do.
      dropout_rate: the dropout rate of attention probabilities.
      use_bias: adds a bias to queries, keys, values and the output.

    Raises:
      ValueError: an odd M; a context below 0; a rate out of range.
    """

    model_dims: int = bounded(at_least=1)
    num_heads: int = bounded(at_least=1)
    head_dim: int = bounded(at_least=1)
    left_context: int | None = bounded(None, at_least=0)
    right_context: int | None = bounded(None, at_least=0)
    max_timescale: float = bounded(10000.0, above=1)
    dropout_rate: float = bounded(0.0, at_least=0, below=1)
    use_bias: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_pairs(self.model_dims)

    def weights(self) -> NestedMap:
        M, N, D = self.model_dims, self.num_heads, self.head_dim
        zero = Constant(0.0)
        w_in = WeightSpec(
            shape=(M, N, D), dims=("model", "heads", "head_dim"), initializer=FanIn()
        )
        w_o = WeightSpec(
            shape=(N, D, M),
            dims=("heads", "head_dim", "model"),
            initializer=FanIn(in_dims=2),
        )
        b_in = WeightSpec(shape=(N, D), dims=("heads", "head_dim"), initializer=zero)
        b_o = per_feature(M)
        specs = NestedMap(w_q=w_in, w_k=w_in, w_v=w_in, w_r=w_in, w_o=w_o)
        specs.update(u=b_in, v=b_in)
        if self.use_bias:
            specs.update(b_q=b_in, b_k=b_in, b_v=b_in, b_o=b_o)
        return specs

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends from every frame to the frames that it may see.

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M].
          mask: bool [B, S], True at real frames; no query sees others.

        Returns:
          [B, S, M] in the activation dtype.

        Raises:
          ValueError: the last dim of `x` is not M; the mask is not bool or does not
            fit.
        """
        check_mask(ctx, x, mask)
        q, k, v = self._heads(ctx, theta, x)
        blocks = self._blocks(x.shape[1])
        q = _cut(q, blocks)
        k, v = _neighbourhoods(k, blocks), _neighbourhoods(v, blocks)
        for_keys, for_distances = (
            add_bias(ctx, q, theta[name]) * self.head_dim**-0.5 for name in "uv"
        )
        logits = tf.einsum("buwnd,bucnd->bnuwc", for_keys, k)
        r = self._distances(ctx, theta, blocks)
        moved = tf.einsum("buwnd,pnd->bnuwp", for_distances, r)
        logits += by_key(moved, blocks.seen)
        hidden = tf.where(self._visible(x.shape[1], blocks, mask), 0.0, _NEVER)
        logits = tf.cast(logits, tf.float32) + hidden[:, None]
        probs = ctx.cast(tf.nn.softmax(logits))
        with ctx.scope("dropout") as c:
            probs = Dropout(rate=self.dropout_rate).fprop(
                c, NestedMap(), probs, read_by_products=True, dead_at_zero=True
            )
        context = tf.einsum("bnuwc,bucnd->buwnd", probs, v)
        context = tf.reshape(context, [shape_of(x)[0], -1, *context.shape[3:]])
        context = ctx.split(context[:, : x.shape[1]], BSND, name="context")
        out = contract(ctx, context, theta.w_o, dims=2)
        out = to_stream(ctx, out, name="attention_out")
        return add_bias(ctx, out, theta.b_o) if self.use_bias else out

    def extra_flops(self, sequence_length: int) -> float:
        """FLOPs of products with keys, values and distances; masked ones count too."""
        blocks = self._blocks(sequence_length)
        rows = 2 * blocks.seen + (blocks.size + blocks.seen)
        return 2.0 * rows * self.num_heads * self.head_dim

    def _heads(self, ctx, theta, x) -> list[tf.Tensor]:
        """Queries, keys and values: each [B, S, N, D]."""
        x = save_name(read_stream(ctx, x), "attention_in")
        products = contract_each(ctx, x, [theta.w_q, theta.w_k, theta.w_v])
        heads = [ctx.split(tensor, BSND) for tensor in products]
        if self.use_bias:
            biases = [theta.b_q, theta.b_k, theta.b_v]
            pairs = zip(heads, biases, strict=True)
            heads = [add_bias(ctx, tensor, b) for tensor, b in pairs]
        names = ("query", "key", "value")
        return [
            save_name(tensor, name) for tensor, name in zip(heads, names, strict=True)
        ]

    def _blocks(self, length: int) -> _Blocks:
        left, right = self.left_context, self.right_context
        if left is not None and right is not None:
            # As many as a frame sees: this wastes the least computation.
            size = left + 1 + right
            if size < length:
                count = -(-length // size)
                return _Blocks(count=count, size=size, left=left, right=right)
        return _Blocks(count=1, size=length, left=0, right=0)

    def _distances(self, ctx: Context, theta: NestedMap, blocks: _Blocks) -> tf.Tensor:
        """r [P, N, D] of query index minus key index, the largest first."""
        largest = blocks.left + blocks.size - 1
        distance = largest - tf.range(blocks.size + blocks.seen)
        waves = sinusoids(distance, self.model_dims, max_timescale=self.max_timescale)
        return ctx.split(contract(ctx, waves, theta.w_r), PND)

    def _visible(self, length: int, blocks: _Blocks, mask) -> tf.Tensor:
        """bool [B or 1, U, W, C]: which keys each query sees."""
        first = tf.range(blocks.count)[:, None] * blocks.size
        key = (first - blocks.left + tf.range(blocks.seen))[:, None, :]
        distance = (first + tf.range(blocks.size))[:, :, None] - key
        visible = (key >= 0) & (key < length)
        if self.left_context is not None:
            visible &= distance <= self.left_context
        if self.right_context is not None:
            visible &= -distance <= self.right_context
        visible = visible[None]
        if mask is not None:
            near = _neighbourhoods(mask[:, :, None, None], blocks)
            visible &= near[:, :, None, :, 0, 0]
        return visible


def _cut(x: tf.Tensor, blocks: _Blocks) -> tf.Tensor:
    """[B, S, N, D] in blocks [B, U, W, N, D], the last block filled up with zeros."""
    missing = blocks.count * blocks.size - x.shape[1]
    x = tf.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)]) if missing else x
    return tf.reshape(x, [shape_of(x)[0], blocks.count, blocks.size, *x.shape[2:]])


def _neighbourhoods(x: tf.Tensor, blocks: _Blocks) -> tf.Tensor:
    """The frames of [B, S, N, D] that each block attends to: [B, U, C, N, D]."""
    x = _cut(x, blocks)
    beside = [(0, 0), (1, 1), (0, 0), (0, 0), (0, 0)]
    around = tf.pad(x, beside) if blocks.left or blocks.right else x
    parts = [x]
    if blocks.left:
        parts.insert(0, around[:, :-2, blocks.size - blocks.left :])
    if blocks.right:
        parts.append(around[:, 2:, : blocks.right])
    return tf.concat(parts, axis=2)
