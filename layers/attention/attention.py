"""Multi-head attention, to the sequence itself or to another sequence.

Dims: B batch, S sequence (query), T sequence (key), M model, N heads, K heads of keys
and values, D head size.
"""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.modeling.initializers import Constant, FanIn
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.fused import Kernel
from meshwright.layers.attention.learned_terms import Learned, Sink
from meshwright.layers.attention.logits import Logits
from meshwright.layers.attention.mask_rules import MaskKind, MaskRule, Tokens
from meshwright.layers.attention.positions import (
    PositionKind,
    RotaryScaling,
    check_rotary,
    rotate,
)
from meshwright.layers.attention.projections import Projections
from meshwright.layers.attention.relative.relative_bias import bias_spec, check_shared
from meshwright.layers.attention.relative.relative_positions import RelativePositions
from meshwright.layers.attention.weighted_sums import weighted_sums
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.linear import (
    add_bias,
    contract,
    per_feature,
    to_stream,
)
from meshwright.layers.basic.masks import check_rows
from meshwright.layers.basic.normalization import RMSNorm


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadAttention(Layer):
    """Scaled dot-product attention (Vaswani et al. 2017), annotated as GSPMD 5.1.

    Given a `memory` it is cross-attention: keys and values come from the memory. Where
    the plan splits "sequence", `ShardingPlan.sequence_attention` says how to attend.

    Recomputation may save `attention_in`, `query`, `key`, `value`, `context` and
    `attention_out`.

    Args:
      model_dims: M.
      num_heads: N.
      head_dim: D, even for rotary positions.
      num_kv_heads: K, which divides N; None: N. Below N, each head of keys and values
        is read by N / K heads of queries in a row (grouped-query attention, Ainslie et
        al. 2023; 1 is multi-query, Shazeer 2019), and plans name their dim "kv_heads".
      mask: which keys a query sees by position: a kind, or a rule such as `NearMask`.
        FULL for a memory.
      positions: how positions enter: a kind, or vectors of relative positions, such as
        `RelativeVectors` or `RelativeSinusoids`. NONE for a memory.
      rotary_base: for rotary positions, see `rotate`.
      rotary_scaling: for long contexts, such as `YarnScaling`; None: as they are.
      num_buckets: of relative positions, T5's buckets: distances below half of their
        number have one each (of FULL masks a quarter, to either side), longer ones
        share buckets that widen logarithmically.
      max_distance: all distances from here on are in the last bucket.
      dropout_rate: the dropout rate of attention probabilities.
      use_bias: adds a bias to each projection of queries, keys and values.
      use_out_bias: adds one to the fourth projection; None: as `use_bias`.
      query_scale: what products of queries and keys are multiplied by; None: D^-0.5.
      logits_dtype: dtype of logits and their softmax; None: that of activations.
      logit_cap: c of c * tanh(logits / c), before masks and the biases of relative
        positions (Gemma Team 2024, section 2); None: no cap.
      sink: whether a logit of each head joins the softmax's sum, see `Sink`. A query
        that sees no key gets 0 then.
      qk_norm: normalizes each head's queries and keys by `RMSNorm`, or by the one
        given, before rotary positions (Dehghani et al. 2023, section 2).
      block_size: the most tokens of a block, for attention in blocks, in memory that
        grows with the length and not its square; or `Blocks`. Sums are float32 there.
      kernel: whether a fused kernel of the devices computes attention. Its logits are
        float32, and `block_size`, if it is a number, the most tokens of its tiles.

    Raises:
      ValueError: rotary positions with an odd head size, or a scaling of others; heads
        not divided by those of keys; a norm not of size D; a number out of range.
    """

    model_dims: int = bounded(at_least=1)
    num_heads: int = bounded(at_least=1)
    head_dim: int = bounded(at_least=1)
    num_kv_heads: int | None = bounded(None, at_least=1)
    mask: MaskKind | MaskRule = instance(MaskKind.CAUSAL, example="@NearMask()")
    positions: PositionKind | RelativePositions = instance(
        PositionKind.NONE, example="@RelativeVectors()"
    )
    rotary_base: float = bounded(10000.0, above=1)
    rotary_scaling: RotaryScaling | None = instance(None, example="@YarnScaling()")
    num_buckets: int = bounded(32, at_least=1)
    max_distance: int = bounded(128, at_least=1)
    dropout_rate: float = bounded(0.0, at_least=0, below=1)
    use_bias: bool = False
    use_out_bias: bool | None = None
    query_scale: float | None = bounded(None, above=0)
    logits_dtype: tf.DType | None = instance(tf.float32, example="%bfloat16")
    logit_cap: float | None = bounded(None, above=0)
    sink: Sink = Sink.NONE
    qk_norm: bool | RMSNorm = instance(False, example="@RMSNorm()")
    block_size: int | Blocks = bounded(Blocks.AUTO, at_least=1)
    kernel: Kernel = Kernel.AUTO

    def __post_init__(self):
        super().__post_init__()
        check_rotary(self.positions, self.head_dim, self.rotary_scaling)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"MultiHeadAttention.num_kv_heads is {self.num_kv_heads}, which does "
                f"not divide the {self.num_heads} heads of queries that read keys: "
                "make num_heads a multiple of it"
            )
        if self.qk_norm and self.head_norm.model_dims != self.head_dim:
            raise ValueError(
                f"MultiHeadAttention.qk_norm has RMSNorm.model_dims "
                f"{self.head_norm.model_dims}, but normalizes heads of head_dim "
                f"{self.head_dim}: give it that"
            )

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_kv_heads or self.num_heads

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.query_scale or self.head_dim**-0.5

    def weights(self) -> NestedMap:
        M, N, D = self.model_dims, self.num_heads, self.head_dim
        specs = self._projections.weights()
        specs.w_o = WeightSpec(
            shape=(N, D, M),
            dims=("heads", "head_dim", "model"),
            initializer=FanIn(in_dims=2),
            rows=2,
        )
        if self.has_out_bias:
            specs.b_o = per_feature(M)
        if self.positions is PositionKind.RELATIVE:
            specs.relative_bias = bias_spec(self.num_buckets, N)
        if isinstance(self.positions, RelativePositions):
            specs.relative = self.positions.weights(M, N, D)
        if self.sink is Sink.LEARNED:
            specs.sink = WeightSpec(
                shape=(N,), dims=("heads",), initializer=Constant(0.0)
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
        relative_bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends from every token to the tokens that it may see.

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M].
          paddings: [B, T], 1 at keys that no query may see, 0 elsewhere.
          segment_ids: int32 [B, S]; tokens see only tokens of the same segment.
          segment_positions: int32 [B, S], for rotary positions and masks; the index by
            default, which rotary positions turn alike where segments are adjacent.
          memory: [B, T, M], what to attend to; None: `x` itself.
          memory_segment_ids: int32 [B, T], segments of the memory.
          relative_bias: [num_buckets, N], for `PositionKind.SHARED`.

        Returns:
          [B, S, M] in the activation dtype.

        Raises:
          ValueError: the last dim of `x` or `memory` is not M; paddings, segment ids or
            positions do not fit; a mask or positions for a memory; segment ids of only
            `x` or the memory, or without the positions that the mask reads; a split
            sequence that cannot be attended to as the plan says; a bias that layers
            share, if and only if positions are not SHARED.
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
        keys = x if memory is None else memory
        check_rows(ctx, x, segment_ids=segment_ids, segment_positions=segment_positions)
        check_rows(ctx, keys, paddings=paddings, memory_segment_ids=memory_segment_ids)
        project = self._projections.project
        if memory is None:
            q, k, v = project(ctx, theta, x, "qkv")
        else:
            (q,) = project(ctx, theta, x, "q")
            k, v = project(ctx, theta, memory, "kv")
        if self.positions is PositionKind.ROTARY:
            turned = segment_positions
            if turned is None:
                turned = tf.range(x.shape[1])[None, :]
            q, k = (self._rotate(heads, turned) for heads in (q, k))
        positions = None if memory is not None else segment_positions
        logits = self._logits(
            ctx,
            _tokens(q, segment_ids, positions),
            _tokens(k, memory_segment_ids, positions),
            paddings=paddings,
        )
        learned = self._learned(ctx, theta, relative_bias)
        return self._attend(ctx, theta, q, k, v, logits, learned)

    def extra_flops(self, sequence_length: int) -> float:
        """FLOPs of two S x S products; masked elements count too, as is usual.

        Each table of vectors of relative positions has 2 S distances.
        """
        products = 4.0 * sequence_length * self.num_heads * self.head_dim
        if isinstance(self.positions, RelativePositions):
            products *= 1 + self.positions.num_tables
        return products

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """The cache that `step` keeps of tokens, before the first token.

        Args:
          ctx: context.
          batch: B.
          length: T, the most tokens.

        Returns:
          `key` and `value`: zeros [B, T, K, D] in the activation dtype.
        """
        heads = self._projections.of("k")
        shape = [batch, length, heads.count, self.head_dim]
        zeros = ctx.split(tf.zeros(shape, ctx.activation_dtype), heads.dims)
        return NestedMap(key=zeros, value=zeros)

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        """The cache of a `memory` [B, T, M]: keys and values, each [B, T, K, D]."""
        self._check_crosses(ctx)
        key, value = self._projections.project(ctx, theta, memory, "kv")
        return NestedMap(key=key, value=value)

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: int | tf.Tensor,
        *,
        paddings: tf.Tensor | None = None,
        segment_positions: tf.Tensor | None = None,
        relative_bias: tf.Tensor | None = None,
        times: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """`fprop` of one more token: attends to the tokens before it and to itself.

        Or of the first S tokens at once: they attend to each other, as in `fprop`.

        Args:
          ctx: context.
          theta: weights.
          x: [B, 1, M], the tokens at `position`; or [B, S, M]: the first tokens, if
            that is 0, or with `times` those of the same time.
          cache: as `init_cache` makes it, filled below `position`.
          position: int32 scalar, an index in the cache.
          paddings: [B, T], 1 at tokens of the cache that no query may see; or
            [B, S, T], 1 at those that a query may not see.
          segment_positions: int32 [B, S], positions in rows that begin with padding;
            the index by default.
          relative_bias: as for `fprop`.
          times: int32 [1, T], the time of each place of the cache, where several have
            the same, as in `BeamCaches.FLAT`; None: their indices. All tokens of the
            step have the same time, and paddings [B, S, T] say what each sees.

        Returns:
          [B, S, M] in the activation dtype, and the cache with S positions more.
        """
        q, k, v = self._projections.project(ctx, theta, x, "qkv")
        length = x.shape[1]
        index = (tf.range(length) + position)[None]
        if times is not None:
            index = tf.broadcast_to(tf.gather(times, position, axis=1), [1, length])
        if segment_positions is None:
            segment_positions = index
        if self.positions is PositionKind.ROTARY:
            q = self._rotate(q, segment_positions)
            k = self._rotate(k, segment_positions)
        start, dims = tf.stack([0, position, 0, 0]), self._projections.of("k").dims
        cache = cache.map(
            lambda kept, new: ctx.split(
                xla.dynamic_update_slice(kept, new, start), dims
            ),
            NestedMap(key=k, value=v),
        )
        if times is not None:
            k, v = cache.key, cache.value
        elif length == 1:
            k, v = cache.key, cache.value
            later = tf.cast(tf.range(k.shape[1])[None] > position, tf.int32)
            paddings = later if paddings is None else tf.maximum(paddings, later)
        elif paddings is not None:
            paddings = paddings[:, :length]
        # Of a row that begins with padding all positions are equally many too high.
        shift = (index - segment_positions)[:, -1:]
        keys = tf.range(k.shape[1])[None] if times is None else times
        logits = self._logits(
            ctx,
            Tokens(index=index, position=segment_positions),
            Tokens(index=keys, position=keys - shift),
            paddings=paddings,
            offset=-position,
            relative=None if times is None else times[0] - index[0, 0],
        )
        learned = self._learned(ctx, theta, relative_bias)
        out = self._attend(ctx, theta, q, k, v, logits, learned, is_step=True)
        return out, cache

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
        (q,) = self._projections.project(ctx, theta, x, "q")
        logits = self._logits(
            ctx, _tokens(q), _tokens(cache.key), paddings=memory_paddings
        )
        k, v, learned = cache.key, cache.value, self._learned(ctx, theta)
        return self._attend(ctx, theta, q, k, v, logits, learned, is_step=True)

    def _check_crosses(self, ctx: Context) -> None:
        if self.mask is not MaskKind.FULL or self.positions is not PositionKind.NONE:
            raise ValueError(
                f"layer {ctx.path!r} attends to a memory, whose positions are not the "
                f"queries': give it mask=FULL and positions=NONE, not {self.mask} and "
                f"{self.positions}"
            )

    @property
    def head_norm(self) -> RMSNorm:
        """What `qk_norm` normalizes by."""
        if isinstance(self.qk_norm, RMSNorm):
            return self.qk_norm
        return RMSNorm(model_dims=self.head_dim)

    @property
    def has_out_bias(self) -> bool:
        """Whether the projection of what heads found has a bias."""
        return self.use_bias if self.use_out_bias is None else self.use_out_bias

    def _rotate(self, heads: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        return rotate(
            heads, positions, base=self.rotary_base, scaling=self.rotary_scaling
        )

    @property
    def _projections(self) -> Projections:
        return Projections(
            model_dims=self.model_dims,
            num_heads=self.num_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            use_bias=self.use_bias,
            norm=self.head_norm if self.qk_norm else None,
        )

    def _logits(self, ctx, queries: Tokens, keys: Tokens, **more) -> Logits:
        """See `Logits`, which also takes `more`."""
        return Logits(
            mask=self.mask,
            queries=queries,
            keys=keys,
            dtype=self.logits_dtype or ctx.activation_dtype,
            max_distance=self.max_distance,
            cap=self.logit_cap,
            **more,
        )

    def _learned(
        self, ctx: Context, theta: NestedMap, shared_bias: tf.Tensor | None = None
    ) -> Learned:
        N, terms = self.num_heads, {}
        check_shared(ctx, self.positions, N, shared_bias)
        if self.positions is PositionKind.RELATIVE:
            shared_bias = theta.relative_bias
        if shared_bias is not None:
            terms["bias"] = tf.cast(shared_bias, tf.float32)
        if isinstance(self.positions, RelativePositions):
            of_keys, of_values = self.positions.of_keys, self.positions.of_values
            terms["to_keys"] = of_keys(theta.relative, N, self.scale)
            terms["to_values"] = of_values(theta.relative, N)
        if self.sink is Sink.LEARNED:
            terms["sink"] = tf.cast(theta.sink, tf.float32)
        elif self.sink is Sink.ZERO:
            terms["sink"] = tf.zeros([N])
        return Learned(**terms)

    def _attend(
        self, ctx, theta, q, k, v, logits: Logits, learned: Learned, is_step=False
    ) -> tf.Tensor:
        """The output [B, S, M] of queries [B, S, N, D] for keys and values."""
        q = q * self.scale
        if isinstance(self.positions, RelativePositions):
            q = self.positions.for_keys(ctx, theta.relative, q, self.scale)
        context = weighted_sums(
            ctx,
            logits,
            q,
            k,
            v,
            learned,
            dropout=Dropout(rate=self.dropout_rate),
            block_size=self.block_size,
            kernel=self.kernel,
            is_step=is_step,
        )
        shape = (self.num_heads, self.head_dim, self.model_dims)
        out = contract(ctx, context, theta.w_o, dims=2, shape=shape)
        out = to_stream(ctx, out, name="attention_out")
        return add_bias(ctx, out, theta.b_o) if self.has_out_bias else out


def _tokens(
    heads: tf.Tensor,
    segment_ids: tf.Tensor | None = None,
    positions: tf.Tensor | None = None,
) -> Tokens:
    """Where the tokens of queries or keys [B, S, N, D] are."""
    index = tf.range(shape_of(heads)[1])[None]
    return Tokens(index=index, segment=segment_ids, position=positions)
