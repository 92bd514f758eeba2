"""Multi-head attention, to the sequence itself or to another sequence.

Dims: B batch, S sequence (query), T sequence (key), M model, N heads, D head size.
"""

from __future__ import annotations

import dataclasses
import enum

import gin
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.modeling.initializers import Constant, FanIn, Normal
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.blockwise import attend_in_blocks
from meshwright.layers.attention.logits import Logits
from meshwright.layers.attention.mask_rules import MaskKind, MaskRule, Tokens
from meshwright.layers.attention.positions import PositionKind, rotate
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.linear import (
    add_bias,
    contract,
    contract_each,
    per_feature,
    read_stream,
    to_stream,
)

BSND = ("batch", "sequence", "heads", "head_dim")


@gin.constants_from_enum
class Blocks(enum.Enum):
    """Whether attention is computed in blocks, where no size of them is given.

    AUTO: in long sequences, in blocks of a size that was fast. NONE: never, all pairs
    of tokens at once.
    """

    AUTO = "auto"
    NONE = "none"


# TODO measured
_AUTO_TOKENS = 1024
_AUTO_SIZE = 512


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadAttention(Layer):
    """Scaled dot-product attention (Vaswani et al. 2017), annotated as GSPMD 5.1.

    Given a `memory` it is cross-attention: keys and values come from the memory.

    Recomputation may save `query`, `key`, `value`, `context` and `attention_out`.

    Args:
      model_dims: M.
      num_heads: N.
      head_dim: D, even for rotary positions.
      mask: which keys a query sees by position: a kind, or a rule such as `NearMask`.
        FULL for a memory.
      positions: how positions enter. NONE for a memory.
      rotary_base: for rotary positions, see `rotate`.
      num_buckets: for relative positions, see `relative_bucket`.
      max_distance: for relative positions, see `relative_bucket`.
      dropout_rate: the dropout rate of attention probabilities.
      use_bias: adds a bias to each of the four projections.
      logits_dtype: dtype of logits and their softmax; None: that of activations.
      block_size: the most tokens of a block, for attention in blocks, in memory that
        grows with the length and not its square; or `Blocks`. The softmax's sums are
        float32 there.

    Raises:
      ValueError: rotary positions with an odd head size; a rate or a size out of range.
    """

    model_dims: int
    num_heads: int
    head_dim: int
    mask: MaskKind | MaskRule = instance(MaskKind.CAUSAL, example="@NearMask()")
    positions: PositionKind = PositionKind.NONE
    rotary_base: float = 10000.0
    num_buckets: int = 32
    max_distance: int = 128
    dropout_rate: float = bounded(0.0, at_least=0, below=1)
    use_bias: bool = False
    logits_dtype: tf.DType | None = instance(tf.float32, example="%bfloat16")
    block_size: int | Blocks = bounded(Blocks.AUTO, at_least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.positions is PositionKind.ROTARY and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, but head_dim is "
                f"{self.head_dim}: make it even"
            )

    def weights(self) -> NestedMap:
        M, N, D = self.model_dims, self.num_heads, self.head_dim
        w_in = WeightSpec(
            shape=(M, N, D),
            dims=("model", "heads", "head_dim"),
            initializer=FanIn(),
            rows=1,
        )
        w_o = WeightSpec(
            shape=(N, D, M),
            dims=("heads", "head_dim", "model"),
            initializer=FanIn(in_dims=2),
            rows=2,
        )
        specs = NestedMap(w_q=w_in, w_k=w_in, w_v=w_in, w_o=w_o)
        if self.use_bias:
            zero = Constant(0.0)
            b_in = WeightSpec(
                shape=(N, D), dims=("heads", "head_dim"), initializer=zero
            )
            b_o = per_feature(M)
            specs.update(b_q=b_in, b_k=b_in, b_v=b_in, b_o=b_o)
        if self.positions is PositionKind.RELATIVE:
            specs.relative_bias = WeightSpec(
                shape=(self.num_buckets, N),
                dims=("relative_buckets", "heads"),
                initializer=Normal(0.02),
            )
        return specs

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        paddings: tf.Tensor | None = None,
        segment_ids: tf.Tensor | None = None,
        segment_positions: tf.Tensor | None = None,
        memory: tf.Tensor | None = None,
        memory_segment_ids: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends from every token to the tokens that it may see.

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M].
          paddings: [B, T], 1 at keys that no query may see, 0 elsewhere.
          segment_ids: int32 [B, S]; tokens see only tokens of the same segment.
          segment_positions: int32 [B, S], for rotary positions; the index by default,
            which gives the same up to rounding where tokens of segments are adjacent.
          memory: [B, T, M], what to attend to; None: `x` itself.
          memory_segment_ids: int32 [B, T], segments of the memory.

        Returns:
          [B, S, M] in the activation dtype.

        Raises:
          ValueError: the last dim of `x` or `memory` is not M; a mask or positions for
            a memory; segment ids of only one of `x` and the memory.
        """
        if memory is None:
            memory_segment_ids = segment_ids
        else:
            self._check_crosses(ctx)
            if (segment_ids is None) != (memory_segment_ids is None):
                raise ValueError(
                    f"layer {ctx.path!r}: give segment_ids of both the tokens and the "
                    "memory, or of neither"
                )
        q, k, v = self._project(ctx, theta, x, memory)
        if self.positions is PositionKind.ROTARY:
            if segment_positions is None:
                segment_positions = tf.range(x.shape[1])[None, :]
            q = rotate(q, segment_positions, base=self.rotary_base)
            k = rotate(k, segment_positions, base=self.rotary_base)
        positions = None if memory is not None else segment_positions
        logits = self._logits(
            ctx,
            _tokens(q, segment_ids, positions),
            _tokens(k, memory_segment_ids, positions),
            paddings=paddings,
        )
        return self._attend(ctx, theta, q, k, v, logits)

    def extra_flops(self, sequence_length: int) -> float:
        """FLOPs of two S x S products; masked elements count too, as is usual."""
        return 4.0 * sequence_length * self.num_heads * self.head_dim

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """The cache that `step` keeps of tokens, before the first token.

        Args:
          ctx: context.
          batch: B.
          length: T, the most tokens.

        Returns:
          `key` and `value`: zeros [B, T, N, D] in the activation dtype.
        """
        shape = [batch, length, self.num_heads, self.head_dim]
        zeros = ctx.split(tf.zeros(shape, ctx.activation_dtype), BSND)
        return NestedMap(key=zeros, value=zeros)

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        """The cache of a `memory` [B, T, M]: keys and values, each [B, T, N, D]."""
        self._check_crosses(ctx)
        _, key, value = self._project(ctx, theta, memory[:, :1], memory)
        return NestedMap(key=key, value=value)

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: tf.Tensor,
    ) -> tuple[tf.Tensor, NestedMap]:
        """`fprop` of one more token: attends to the tokens before it and to itself.

        Args:
          ctx: context.
          theta: weights.
          x: [B, 1, M], the tokens at `position`.
          cache: as `init_cache` makes it, filled below `position`.
          position: int32 scalar.

        Returns:
          [B, 1, M] in the activation dtype, and the cache with one position more.
        """
        q, k, v = self._project(ctx, theta, x, None)
        if self.positions is PositionKind.ROTARY:
            at = tf.reshape(position, [1, 1])
            q = rotate(q, at, base=self.rotary_base)
            k = rotate(k, at, base=self.rotary_base)
        start = tf.stack([0, position, 0, 0])
        cache = NestedMap(
            key=ctx.split(xla.dynamic_update_slice(cache.key, k, start), BSND),
            value=ctx.split(xla.dynamic_update_slice(cache.value, v, start), BSND),
        )
        keys = _tokens(cache.key)
        logits = self._logits(
            ctx,
            Tokens(index=tf.reshape(position, [1, 1])),
            keys,
            paddings=tf.cast(keys.index > position, tf.int32),
            offset=-position,
        )
        return self._attend(ctx, theta, q, cache.key, cache.value, logits), cache

    def attend_memory(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        memory_paddings: tf.Tensor,
    ) -> tf.Tensor:
        """`fprop` with the cache of a memory from `encode_memory`.

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M].
          cache: the cache of the memory.
          memory_paddings: [B, T], 1 at tokens that no query may see.

        Returns:
          [B, S, M] in the activation dtype.
        """
        (q,) = self._heads(ctx, theta, x, "q")
        logits = self._logits(
            ctx, _tokens(q), _tokens(cache.key), paddings=memory_paddings
        )
        return self._attend(ctx, theta, q, cache.key, cache.value, logits)

    def _check_crosses(self, ctx: Context) -> None:
        if self.mask is not MaskKind.FULL or self.positions is not PositionKind.NONE:
            raise ValueError(
                f"layer {ctx.path!r} attends to a memory, whose positions are not the "
                f"queries': give it mask=FULL and positions=NONE, not {self.mask} and "
                f"{self.positions}"
            )

    def _project(self, ctx, theta, x, memory) -> list[tf.Tensor]:
        """Queries of `x`, keys and values of `memory` or `x`: [B, S or T, N, D]."""
        if memory is None:
            return self._heads(ctx, theta, x, "qkv")
        queries = self._heads(ctx, theta, x, "q")
        return [*queries, *self._heads(ctx, theta, memory, "kv")]

    def _heads(self, ctx, theta, x, which: str) -> list[tf.Tensor]:
        """Those of queries, keys and values whose first letters are in `which`."""
        names = {"q": "query", "k": "key", "v": "value"}
        x = read_stream(ctx, x)
        weights = [theta[f"w_{letter}"] for letter in which]
        shape = (self.model_dims, self.num_heads, self.head_dim)
        projected = contract_each(ctx, x, weights, shape=shape)
        projected = [ctx.split(heads, BSND) for heads in projected]
        if self.use_bias:
            pairs = zip(projected, which, strict=True)
            projected = [
                add_bias(ctx, heads, theta[f"b_{letter}"]) for heads, letter in pairs
            ]
        pairs = zip(projected, which, strict=True)
        return [save_name(heads, names[letter]) for heads, letter in pairs]

    def _logits(self, ctx, queries: Tokens, keys: Tokens, **more) -> Logits:
        """See `Logits`, which also takes `more`."""
        return Logits(
            mask=self.mask,
            queries=queries,
            keys=keys,
            dtype=self.logits_dtype or ctx.activation_dtype,
            max_distance=self.max_distance,
            **more,
        )

    def _attend(self, ctx, theta, q, k, v, logits: Logits) -> tf.Tensor:
        """The output [B, S, M] of queries [B, S, N, D] for keys and values."""
        q = q * self.head_dim**-0.5
        bias = None
        if self.positions is PositionKind.RELATIVE:
            bias = tf.cast(theta.relative_bias, tf.float32)
        dropout = Dropout(rate=self.dropout_rate)
        size = self._block_size(ctx, q.shape[1], k.shape[1])
        if size is None:
            probs = ctx.cast(tf.nn.softmax(logits.of_all(q, k, bias)))
            with ctx.scope("dropout") as c:
                probs = dropout.fprop(
                    c, NestedMap(), probs, read_by_products=True, dead_at_zero=True
                )
            context = ctx.split(tf.einsum("bnst,btnd->bsnd", probs, v), BSND)
            context = save_name(context, "context")
        else:
            context = attend_in_blocks(
                ctx, logits, q, k, v, bias, dropout=dropout, block_size=size
            )
            context = ctx.split(context, BSND)
        shape = (self.num_heads, self.head_dim, self.model_dims)
        out = contract(ctx, context, theta.w_o, dims=2, shape=shape)
        out = to_stream(ctx, out, name="attention_out")
        return add_bias(ctx, out, theta.b_o) if self.use_bias else out

    def _block_size(self, ctx, queries: int, keys: int) -> int | None:
        """The size of blocks for so many queries and keys, None for no blocks."""
        if self.block_size is Blocks.NONE or queries == 1:
            return None
        is_split = ctx.plan.activation_sharding(BSND, ctx.path).splits()[1] > 1
        if self.block_size is Blocks.AUTO:
            is_long = queries * keys >= _AUTO_TOKENS**2
            return _AUTO_SIZE if is_long and not is_split else None
        if is_split:
            raise ValueError(
                f"layer {ctx.path!r} has blocks of {self.block_size} tokens, but the "
                "plan splits 'sequence', so that each block would be gathered: set "
                "block_size to Blocks.AUTO or Blocks.NONE, or split 'stream' instead"
            )
        return self.block_size


def _tokens(
    heads: tf.Tensor,
    segment_ids: tf.Tensor | None = None,
    positions: tf.Tensor | None = None,
) -> Tokens:
    """Where the tokens of queries or keys [B, S, N, D] are."""
    index = tf.range(heads.shape[1])[None]
    return Tokens(index=index, segment=segment_ids, position=positions)
