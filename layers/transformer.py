"""The Transformer layer: attention and feed-forward on a residual stream.

Dims: B batch, S sequence, M model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention import MultiHeadAttention
from meshwright.layers.dropout import Dropout
from meshwright.layers.feed_forward import Activation, FeedForward
from meshwright.layers.linear import BSM
from meshwright.layers.moe import MoE
from meshwright.layers.normalization import RMSNorm
from meshwright.layers.positions import MaskKind, PositionKind


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerLayer(Layer):
    """x + attention(norm(x)), then the same with feed-forward, in pre-norm form.

    Args:
      attention_norm: normalizes what attention reads.
      attention: takes [B, S, M] and the keywords of `fprop`.
      feed_forward_norm: normalizes what the feed-forward layer reads.
      feed_forward: takes [B, S, M]; or a mixture of experts.
      residual_dropout: of what is added to the stream.
    """

    attention_norm: Layer
    attention: Layer
    feed_forward_norm: Layer
    feed_forward: Layer
    residual_dropout: Dropout = Dropout()

    def weights(self) -> NestedMap:
        return NestedMap(
            attention_norm=self.attention_norm.weights(),
            attention=self.attention.weights(),
            feed_forward_norm=self.feed_forward_norm.weights(),
            feed_forward=self.feed_forward.weights(),
        )

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        token_ids: tf.Tensor | None = None,
        **attention_inputs,
    ) -> tf.Tensor | NestedMap:
        """Transforms `x` [B, S, M]; same shape, activation dtype.

        `attention_inputs` go to attention: paddings, segment_ids, segment_positions. A
        mixture of experts reads `token_ids` and the first two of these, and makes the
        result a nested map of `x` and `aux`, see `MoE.fprop`.
        """
        x = self._add(ctx, theta, "attention", ctx.cast(x), **attention_inputs)
        if not isinstance(self.feed_forward, MoE):
            return self._add(ctx, theta, "feed_forward", x)
        return self._add(
            ctx,
            theta,
            "feed_forward",
            x,
            token_ids=token_ids,
            paddings=attention_inputs.get("paddings"),
            segment_ids=attention_inputs.get("segment_ids"),
        )

    def extra_flops(self, sequence_length: int) -> float:
        parts = (
            self.attention_norm,
            self.attention,
            self.feed_forward_norm,
            self.feed_forward,
        )
        return sum(part.extra_flops(sequence_length) for part in parts)

    def _add(self, ctx, theta, name: str, x: tf.Tensor, **kwargs):
        """`x` plus what the part called `name` makes of it, with its `aux` if any."""
        norm_name = f"{name}_norm"
        with ctx.scope(norm_name) as c:
            normed = getattr(self, norm_name).fprop(c, theta[norm_name], x)
        with ctx.scope(name) as c:
            y = getattr(self, name).fprop(c, theta[name], normed, **kwargs)
        y, aux = (y.x, y.aux) if isinstance(y, NestedMap) else (y, None)
        with ctx.scope(f"{name}_dropout") as c:
            y = self.residual_dropout.fprop(c, NestedMap(), y)
        x = ctx.split(x + y, BSM)
        return x if aux is None else NestedMap(x=x, aux=aux)


@gin.register
def transformer_layer(
    *,
    model_dims: int,
    num_heads: int,
    head_dim: int,
    hidden_dims: int | None = None,
    feed_forward: Layer | None = None,
    mask: MaskKind = MaskKind.CAUSAL,
    positions: PositionKind = PositionKind.ROTARY,
    activation: Activation = Activation.RELU,
    dropout_rate: float = 0.0,
    norm: Callable[..., Layer] = RMSNorm,
) -> TransformerLayer:
    """The usual layer from its sizes.

    Args:
      model_dims: M.
      num_heads: N.
      head_dim: D.
      hidden_dims: H of a dense feed-forward layer.
      feed_forward: such as `MoE`, in place of a dense one; then `hidden_dims` and
        `activation` are its own.
      mask: whether tokens see later ones.
      positions: how positions enter attention.
      activation: of the feed-forward layer.
      dropout_rate: of attention probabilities, hidden activations and what is added to
        the residual stream.
      norm: makes a normalization layer from `model_dims`.

    Raises:
      ValueError: both `hidden_dims` and `feed_forward` are given, or neither.
    """
    if (hidden_dims is None) == (feed_forward is None):
        raise ValueError(
            f"transformer_layer.hidden_dims is {hidden_dims} and its feed_forward "
            f"{type(feed_forward).__name__}: give one, for a dense feed-forward layer "
            "or for another one"
        )
    if feed_forward is None:
        feed_forward = FeedForward(
            model_dims=model_dims,
            hidden_dims=hidden_dims,
            activation=activation,
            dropout_rate=dropout_rate,
        )
    return TransformerLayer(
        attention_norm=norm(model_dims=model_dims),
        attention=MultiHeadAttention(
            model_dims=model_dims,
            num_heads=num_heads,
            head_dim=head_dim,
            mask=mask,
            positions=positions,
            dropout_rate=dropout_rate,
        ),
        feed_forward_norm=norm(model_dims=model_dims),
        feed_forward=feed_forward,
        residual_dropout=Dropout(rate=dropout_rate),
    )
