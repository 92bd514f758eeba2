"""The Conformer layer: attention and convolution between two half feed-forwards.

Dims: B batch, S sequence, M model, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.relative.relative_attention import RelativeAttention
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.feed_forward import BSH, Activation, FeedForward
from meshwright.layers.basic.linear import (
    BSM,
    add_bias,
    contract,
    contract_each,
    per_feature,
    read_stream,
    to_stream,
)
from meshwright.layers.basic.masks import zero_padding
from meshwright.layers.basic.normalization import GroupNorm, LayerNorm
from meshwright.layers.convolutions.convolution import DepthwiseConv1D


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionModule(Layer):
    """swish(norm(depthwise(x W_in * sigmoid(x W_gate)))) W_out, each with a bias.

    The convolution of the Conformer (Gulati et al. 2020, section 2.2); the layer
    normalizes its input. Recomputation may save `convolution_hidden`,
    `convolution_gate` and `convolution_out`.

    Args:
      model_dims: M, and H, whose dim is split as the feed-forward's.
      depthwise: convolves [B, S, H], and takes `mask`.
      norm: normalizes that, and takes `mask`.

    Raises:
      ValueError: the convolution is not of M features.
    """

    model_dims: int = bounded(at_least=1)
    depthwise: DepthwiseConv1D
    norm: Layer

    def __post_init__(self):
        super().__post_init__()
        if self.depthwise.model_dims != self.model_dims:
            raise ValueError(
                f"ConvolutionModule.model_dims is {self.model_dims} but its depthwise "
                f"convolution has {self.depthwise.model_dims}: set both to the same"
            )

    def weights(self) -> NestedMap:
        size = self.model_dims
        w_in = WeightSpec(
            shape=(size, size), dims=("model", "hidden"), initializer=FanIn()
        )
        w_out = WeightSpec(
            shape=(size, size), dims=("hidden", "model"), initializer=FanIn()
        )
        bias = per_feature(size)
        return NestedMap(
            w_in=w_in,
            b_in=bias,
            w_gate=w_in,
            b_gate=bias,
            depthwise=self.depthwise.weights(),
            norm=self.norm.weights(),
            w_out=w_out,
            b_out=bias,
        )

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Transforms `x` [B, S, M]; same shape, activation dtype.

        `mask` is bool [B, S], True at real frames.

        Raises:
          ValueError: the last dim of `x` is not M; the mask is not bool or does not
            fit.
        """
        x = read_stream(ctx, x)
        products = contract_each(ctx, x, [theta.w_in, theta.w_gate])
        hidden, gate = (ctx.split(product, BSH) for product in products)
        hidden = add_bias(ctx, save_name(hidden, "convolution_hidden"), theta.b_in)
        gate = add_bias(ctx, save_name(gate, "convolution_gate"), theta.b_gate)
        y = hidden * tf.sigmoid(gate)
        for name in ("depthwise", "norm"):
            with ctx.scope(name) as c:
                y = getattr(self, name).fprop(c, theta[name], y, mask=mask)
        out = contract(ctx, ctx.split(tf.nn.silu(y), BSH), theta.w_out)
        out = to_stream(ctx, out, name="convolution_out")
        return add_bias(ctx, out, theta.b_out)


# The parts that add to the stream, in order: name, field, factor.
_PARTS = (
    ("first_feed_forward", "feed_forward", 0.5),
    ("attention", "attention", 1.0),
    ("convolution", "convolution", 1.0),
    ("second_feed_forward", "feed_forward", 0.5),
)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConformerLayer(Layer):
    """The layer of Gulati et al. 2020, section 2; each part reads a normalized stream.

      x += feed_forward(norm(x)) / 2
      x += attention(norm(x))
      x += convolution(norm(x))
      x += feed_forward(norm(x)) / 2
      norm(x)

    The two feed-forward layers and the five norms are alike, each with its own weights.

    Args:
      norm: normalizes [B, S, M].
      feed_forward: takes [B, S, M].
      attention: takes [B, S, M] and `mask`.
      convolution: takes [B, S, M] and `mask`.
      residual_dropout: dropout of what is added to the stream.
    """

    norm: Layer
    feed_forward: Layer
    attention: Layer
    convolution: Layer
    residual_dropout: Dropout = Dropout()

    def weights(self) -> NestedMap:
        specs = NestedMap(final_norm=self.norm.weights())
        for name, field, _ in _PARTS:
            specs[f"{name}_norm"] = self.norm.weights()
            specs[name] = getattr(self, field).weights()
        return specs

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Transforms `x` [B, S, M]; same shape, activation dtype.

        `mask` is bool [B, S], True at real frames; None: all are. Other frames do not
        affect real frames; their output means nothing.

        Raises:
          ValueError: the last dim of `x` is not M; the mask is not bool or does not
            fit.
        """
        # A NaN there may not reach real frames either: 0 times NaN is NaN.
        x = zero_padding(ctx, ctx.cast(x), mask)
        for name, field, share in _PARTS:
            inputs = {} if field == "feed_forward" else {"mask": mask}
            with ctx.scope(f"{name}_norm") as c:
                y = self.norm.fprop(c, theta[f"{name}_norm"], x)
            with ctx.scope(name) as c:
                y = getattr(self, field).fprop(c, theta[name], y, **inputs)
            with ctx.scope(f"{name}_dropout") as c:
                y = self.residual_dropout.fprop(c, NestedMap(), y)
            x = ctx.split(x + share * y, BSM)
        with ctx.scope("final_norm") as c:
            return ctx.split(self.norm.fprop(c, theta.final_norm, x), BSM)

    def extra_flops(self, sequence_length: int) -> float:
        return sum(
            getattr(self, field).extra_flops(sequence_length) for _, field, _ in _PARTS
        )


@gin.register
def conformer_layer(
    *,
    model_dims: int,
    hidden_dims: int,
    num_heads: int,
    head_dim: int,
    window: int = 31,
    is_causal: bool = False,
    left_context: int | None = None,
    right_context: int | None = None,
    dropout_rate: float = 0.0,
    convolution_norm: Callable[..., Layer] = LayerNorm,
) -> ConformerLayer:
    """The usual layer, given its sizes.

    Args:
      model_dims: M.
      hidden_dims: H of the feed-forward layers; 4 M in the paper.
      num_heads: N.
      head_dim: D.
      window: frames of the depthwise convolution; odd, unless `is_causal`.
      is_causal: no frame sees later ones.
      left_context: how many frames before itself a frame attends to; None: all.
      right_context: how many frames after itself; None: all, or none if `is_causal`.
      dropout_rate: the dropout rate of attention probabilities, hidden activations and
        what is added to the residual stream.
      convolution_norm: makes the norm in the convolution from `model_dims`: LayerNorm,
        GroupNorm, or BatchNorm, which is the paper's.

    Raises:
      ValueError: a causal layer with a right context or GroupNorm; see also the parts.
    """
    if is_causal and right_context:
        raise ValueError(
            f"conformer_layer.right_context is {right_context}, but a causal layer "
            "sees none: leave it out, or set is_causal to False"
        )
    norm = convolution_norm(model_dims=model_dims)
    if is_causal and isinstance(norm, GroupNorm):
        raise ValueError(
            "conformer_layer.convolution_norm is GroupNorm, whose statistics are of "
            "all frames of a row, but a causal layer sees no later ones: take "
            "LayerNorm or BatchNorm"
        )
    return ConformerLayer(
        norm=LayerNorm(model_dims=model_dims),
        feed_forward=FeedForward(
            model_dims=model_dims,
            hidden_dims=hidden_dims,
            activation=Activation.SILU,
            dropout_rate=dropout_rate,
            use_bias=True,
        ),
        attention=RelativeAttention(
            model_dims=model_dims,
            num_heads=num_heads,
            head_dim=head_dim,
            left_context=left_context,
            right_context=0 if is_causal else right_context,
            dropout_rate=dropout_rate,
        ),
        convolution=ConvolutionModule(
            model_dims=model_dims,
            depthwise=DepthwiseConv1D(
                model_dims=model_dims, window=window, is_causal=is_causal
            ),
            norm=norm,
        ),
        residual_dropout=Dropout(rate=dropout_rate),
    )
