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
      feed_forward: takes [B, S, M].
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
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, **attention_inputs
    ) -> tf.Tensor:
        """Transforms `x` [B, S, M]; same shape, activation dtype.

        `attention_inputs` go to attention: paddings, segment_ids, segment_positions.
        """
        x = self._add(ctx, theta, "attention", ctx.cast(x), **attention_inputs)
        return self._add(ctx, theta, "feed_forward", x)

    def extra_flops(self, sequence_length: int) -> float:
        parts = (
            self.attention_norm,
            self.attention,
            self.feed_forward_norm,
            self.feed_forward,
        )
        return sum(part.extra_flops(sequence_length) for part in parts)

    def _add(self, ctx, theta, name: str, x: tf.Tensor, **kwargs) -> tf.Tensor:
        """`x` plus what the part called `name` makes of it."""
        norm_name = f"{name}_norm"
        with ctx.scope(norm_name) as c:
            normed = getattr(self, norm_name).fprop(c, theta[norm_name], x)
        with ctx.scope(name) as c:
            y = getattr(self, name).fprop(c, theta[name], normed, **kwargs)
        with ctx.scope(f"{name}_dropout") as c:
            y = self.residual_dropout.fprop(c, NestedMap(), y)
        return ctx.split(x + y, BSM)


@gin.register
def transformer_layer(
    *,
    model_dims: int,
    hidden_dims: int,
    num_heads: int,
    head_dim: int,
    mask: MaskKind = MaskKind.CAUSAL,
    positions: PositionKind = PositionKind.ROTARY,
    activation: Activation = Activation.RELU,
    dropout_rate: float = 0.0,
    norm: Callable[..., Layer] = RMSNorm,
) -> TransformerLayer:
    """The usual layer from its sizes.

    Args:
      model_dims: M.
      hidden_dims: H of the feed-forward layer.
      num_heads: N.
      head_dim: D.
      mask: whether tokens see later ones.
      positions: how positions enter attention.
      activation: of the feed-forward layer.
      dropout_rate: of attention probabilities, hidden activations and what is added to
        the residual stream.
      norm: makes a normalization layer from `model_dims`.
    """
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
        feed_forward=FeedForward(
            model_dims=model_dims,
            hidden_dims=hidden_dims,
            activation=activation,
            dropout_rate=dropout_rate,
        ),
        residual_dropout=Dropout(rate=dropout_rate),
    )
