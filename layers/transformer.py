"""The Transformer layer: attention and feed-forward on a residual stream.

Dims: B batch, S sequence, M model.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.fused import Kernel
from meshwright.layers.attention.learned_terms import Sink
from meshwright.layers.attention.mask_rules import MaskKind, MaskRule
from meshwright.layers.attention.positions import PositionKind, RotaryScaling
from meshwright.layers.attention.relative.relative_positions import RelativePositions
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.feed_forward import Activation, FeedForward
from meshwright.layers.basic.linear import BSM
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.experts.moe import MoE, x_and_aux


@gin.constants_from_enum
class Order(enum.Enum):
    """What the feed-forward part of a layer reads.

    SEQUENTIAL: the stream to which attention's output was added. PARALLEL: the stream
    that attention reads too; both outputs are added to it (Wang and Komatsuzaki 2021;
    PaLM, Chowdhery et al. 2022, section 2).
    """

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerLayer(Layer):
    """x + attention(norm(x)), then the same with feed-forward, in pre-norm form.

    A decoder's layer attends to a memory, such as an encoder's output, in between.

    Args:
      attention_norm: normalizes what attention reads.
      attention: takes [B, S, M] and the keywords of `fprop`.
      feed_forward_norm: normalizes what the feed-forward layer reads; None, in
        `Order.PARALLEL` alone: it reads what attention does.
      feed_forward: takes [B, S, M]; or a mixture of experts.
      residual_dropout: dropout of what is added to the stream.
      cross_attention_norm: normalizes what attends to the memory; given if
        `cross_attention` is.
      cross_attention: attention to the memory, or None for a layer without it.
      attention_post_norm: normalizes what attention adds to the stream, as in Gemma 2;
        None: it is added as it is.
      feed_forward_post_norm: likewise of the feed-forward layer.
      order: whether the feed-forward layer is after attention or beside it.

    Raises:
      ValueError: only one of the cross-attention and its norm is given; a parallel
        layer with cross-attention, or another without a norm.
    """

    attention_norm: Layer
    attention: Layer
    feed_forward_norm: Layer | None
    feed_forward: Layer
    residual_dropout: Dropout = Dropout()
    cross_attention_norm: Layer | None = None
    cross_attention: MultiHeadAttention | None = None
    attention_post_norm: Layer | None = None
    feed_forward_post_norm: Layer | None = None
    order: Order = Order.SEQUENTIAL

    def __post_init__(self):
        super().__post_init__()
        if self.order is Order.PARALLEL and self.cross_attention is not None:
            raise ValueError(
                "TransformerLayer.order is Order.PARALLEL, which has no place for "
                "cross_attention: make it Order.SEQUENTIAL, or leave that out"
            )
        if self.order is Order.SEQUENTIAL and self.feed_forward_norm is None:
            raise ValueError(
                "TransformerLayer.feed_forward_norm is None, but only with "
                "Order.PARALLEL does the feed-forward layer read what attention reads: "
                "give a norm, such as RMSNorm, or set TransformerLayer.order to that"
            )
        if (self.cross_attention is None) != (self.cross_attention_norm is None):
            raise ValueError(
                "TransformerLayer.cross_attention and cross_attention_norm go "
                "together: give both or neither"
            )

    def weights(self) -> NestedMap:
        return NestedMap({name: part.weights() for name, part in self._parts()})

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        token_ids: tf.Tensor | None = None,
        memory: tf.Tensor | None = None,
        memory_segment_ids: tf.Tensor | None = None,
        **attention_inputs,
    ) -> tf.Tensor | NestedMap:
        """Transforms `x` [B, S, M]; same shape, activation dtype.

        `attention_inputs` go to attention: paddings, segment_ids, segment_positions. A
        mixture of experts reads `token_ids` and the first two of these, and makes the
        result a nested map of `x` and `aux`, see `MoE.fprop`.

        Raises:
          ValueError: a `memory` [B, T, M] and no cross-attention, or the reverse.
        """
        self._check_memory(ctx, memory)
        stream = ctx.cast(x)
        x = self._add(ctx, theta, "attention", stream, **attention_inputs)
        if memory is not None:
            x = self._add(
                ctx,
                theta,
                "cross_attention",
                x,
                memory=memory,
                memory_segment_ids=memory_segment_ids,
                segment_ids=attention_inputs.get("segment_ids"),
            )
        onto, x = x, self._read_by_feed_forward(stream, x)
        if not isinstance(self.feed_forward, MoE):
            return self._add(ctx, theta, "feed_forward", x, onto=onto)
        return self._add(
            ctx,
            theta,
            "feed_forward",
            x,
            onto=onto,
            token_ids=token_ids,
            paddings=attention_inputs.get("paddings"),
            segment_ids=attention_inputs.get("segment_ids"),
        )

    def extra_flops(self, sequence_length: int) -> float:
        return sum(part.extra_flops(sequence_length) for _, part in self._parts())

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """See `MultiHeadAttention.init_cache`."""
        with ctx.scope("attention") as c:
            return NestedMap(attention=self.attention.init_cache(c, batch, length))

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        """See `MultiHeadAttention.encode_memory`; nothing without cross-attention."""
        if self.cross_attention is None:
            return NestedMap()
        with ctx.scope("cross_attention") as c:
            return self.cross_attention.encode_memory(c, theta.cross_attention, memory)

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: tf.Tensor,
        *,
        token_ids: tf.Tensor | None = None,
        memory: NestedMap | None = None,
        memory_paddings: tf.Tensor | None = None,
        **attention_inputs: tf.Tensor | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """`fprop` of one more token, or of the first S: see `MultiHeadAttention.step`.

        Args:
          ctx: context.
          theta: weights.
          x: [B * K, S, M]: K rows, such as beams, for each row of the memory; S is 1 if
            there is a memory.
          cache: as `init_cache` makes it.
          position: int32 scalar.
          token_ids: int32 [B * K, S], for a mixture of experts that reads them.
          memory: as `encode_memory` makes it, [B, T, ...].
          memory_paddings: [B, T], 1 at tokens that no query may see.
          **attention_inputs: paddings and segment_positions of attention.

        Returns:
          [B * K, S, M] in the activation dtype, and the new cache.

        Raises:
          ValueError: a `memory` and no cross-attention, or the reverse; experts that
            choose among tokens, of which there is one.
        """
        self._check_memory(ctx, memory)

        def attend(part, c, theta, x):
            y, new_cache = part.step(
                c, theta, x, cache.attention, position, **attention_inputs
            )
            return NestedMap(x=y, aux=new_cache)

        def attend_memory(part, c, theta, x):
            # The tokens of a row attend like those of a sequence.
            rows = tf.reshape(x, [shape_of(memory.key)[0], -1, x.shape[-1]])
            y = part.attend_memory(c, theta, rows, memory, memory_paddings)
            return tf.reshape(y, shape_of(x))

        stream = ctx.cast(x)
        out = self._add(ctx, theta, "attention", stream, attend)
        x, new_cache = out.x, out.aux
        if self.cross_attention is not None:
            x = self._add(ctx, theta, "cross_attention", x, attend_memory)

        def use_experts(part, c, theta, x):
            return part.step(c, theta, x, token_ids=token_ids).x

        use = use_experts if isinstance(self.feed_forward, MoE) else None
        onto, x = x, self._read_by_feed_forward(stream, x)
        x = self._add(ctx, theta, "feed_forward", x, use, onto=onto)
        return x, NestedMap(attention=new_cache)

    def _parts(self) -> list[tuple[str, Layer]]:
        """The parts that have weights, by name."""
        names = ["attention_norm", "attention"]
        if self.cross_attention is not None:
            names += ["cross_attention_norm", "cross_attention"]
        names += ["feed_forward_norm", "feed_forward"]
        names += ["attention_post_norm", "feed_forward_post_norm"]
        parts = [(name, getattr(self, name)) for name in names]
        return [(name, part) for name, part in parts if part is not None]

    def _read_by_feed_forward(self, stream: tf.Tensor, attended: tf.Tensor):
        """The stream before attention, or behind it."""
        return stream if self.order is Order.PARALLEL else attended

    def _check_memory(self, ctx: Context, memory) -> None:
        if (memory is None) != (self.cross_attention is None):
            raise ValueError(
                f"layer {ctx.path!r} was given {'no' if memory is None else 'a'} "
                f"memory, and has {'no' if self.cross_attention is None else 'a'} "
                "cross_attention: a decoder's layer has both, an encoder's neither"
            )

    def _add(self, ctx, theta, name: str, x: tf.Tensor, use=None, onto=None, **kwargs):
        """The output of the part called `name` added to `x`, with its `aux` if any.

        `use` (part, context, weights, normalized x) is the part's `fprop` by default;
        `onto` is added to in place of `x`.
        """
        use = use or (lambda part, c, theta, x: part.fprop(c, theta, x, **kwargs))
        norm_name = f"{name}_norm" if f"{name}_norm" in theta else "attention_norm"
        with ctx.scope(norm_name) as c:
            normed = getattr(self, norm_name).fprop(c, theta[norm_name], x)
        with ctx.scope(name) as c:
            y = use(getattr(self, name), c, theta[name], normed)
        y, aux = x_and_aux(y)
        post_norm = f"{name}_post_norm"
        if post_norm in theta:
            with ctx.scope(post_norm) as c:
                y = getattr(self, post_norm).fprop(c, theta[post_norm], y)
        with ctx.scope(f"{name}_dropout") as c:
            y = self.residual_dropout.fprop(c, NestedMap(), y)
        x = ctx.split((x if onto is None else onto) + y, BSM)
        return x if aux is None else NestedMap(x=x, aux=aux)


@gin.register
def transformer_layer(
    *,
    model_dims: int,
    num_heads: int,
    head_dim: int,
    hidden_dims: int | None = None,
    feed_forward: Layer | None = None,
    mask: MaskKind | MaskRule = MaskKind.CAUSAL,
    positions: PositionKind | RelativePositions = PositionKind.ROTARY,
    activation: Activation = Activation.RELU,
    dropout_rate: float = 0.0,
    norm: Callable[..., Layer] = RMSNorm,
    has_memory: bool = False,
    logits_dtype: tf.DType | None = tf.float32,
    num_kv_heads: int | None = None,
    logit_cap: float | None = None,
    qk_norm: bool = False,
    sink: Sink = Sink.NONE,
    block_size: int | Blocks = Blocks.AUTO,
    kernel: Kernel = Kernel.AUTO,
    rotary_base: float = 10000.0,
    rotary_scaling: RotaryScaling | None = None,
    order: Order = Order.SEQUENTIAL,
) -> TransformerLayer:
    """The usual layer, given its sizes.

    Args:
      model_dims: M.
      num_heads: N.
      head_dim: D.
      hidden_dims: H of a dense feed-forward layer.
      feed_forward: a layer, such as `MoE`, in place of a dense layer, which then
        defines `hidden_dims` and `activation` itself.
      mask: which tokens see which, see `MultiHeadAttention`.
      positions: how positions enter attention, likewise.
      activation: the non-linearity of the dense layer.
      dropout_rate: the dropout rate of attention probabilities, hidden activations and
        what is added to the residual stream.
      norm: makes a normalization layer from `model_dims`.
      has_memory: adds cross-attention, for a decoder.
      logits_dtype: of attention, see `MultiHeadAttention`.
      num_kv_heads: likewise.
      logit_cap: likewise.
      qk_norm: likewise.
      sink: likewise, of attention to the sequence itself.
      block_size: likewise.
      kernel: likewise.
      rotary_base: likewise.
      rotary_scaling: likewise.
      order: see `TransformerLayer`; in parallel both parts read one norm, as in PaLM.

    Raises:
      ValueError: both `hidden_dims` and `feed_forward` are given, or neither.
    """
    if (hidden_dims is None) == (feed_forward is None):
        raise ValueError(
            f"transformer_layer.hidden_dims is {hidden_dims} and its feed_forward "
            f"{type(feed_forward).__name__}: give one of them, for a dense "
            "feed-forward layer or for another layer"
        )
    if feed_forward is None:
        feed_forward = FeedForward(
            model_dims=model_dims,
            hidden_dims=hidden_dims,
            activation=activation,
            dropout_rate=dropout_rate,
        )

    def attention(mask, positions, **of_itself):
        return MultiHeadAttention(
            model_dims=model_dims,
            num_heads=num_heads,
            head_dim=head_dim,
            mask=mask,
            positions=positions,
            dropout_rate=dropout_rate,
            logits_dtype=logits_dtype,
            num_kv_heads=num_kv_heads,
            logit_cap=logit_cap,
            qk_norm=qk_norm,
            block_size=block_size,
            kernel=kernel,
            **of_itself,
        )

    cross_attention = cross_attention_norm = None
    if has_memory:
        cross_attention = attention(MaskKind.FULL, PositionKind.NONE)
        cross_attention_norm = norm(model_dims=model_dims)
    return TransformerLayer(
        attention_norm=norm(model_dims=model_dims),
        attention=attention(
            mask,
            positions,
            sink=sink,
            rotary_base=rotary_base,
            rotary_scaling=rotary_scaling,
        ),
        feed_forward_norm=(
            None if order is Order.PARALLEL else norm(model_dims=model_dims)
        ),
        feed_forward=feed_forward,
        order=order,
        residual_dropout=Dropout(rate=dropout_rate),
        cross_attention_norm=cross_attention_norm,
        cross_attention=cross_attention,
    )
