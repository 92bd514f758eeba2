"""The position-wise feed-forward layer.

Dims: B batch, S sequence, M model, H hidden.
"""

from __future__ import annotations

import dataclasses
import enum

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.linear import (
    add_bias,
    contract,
    contract_each,
    per_feature,
    read_stream,
    to_stream,
)

BSH = ("batch", "sequence", "hidden")


@gin.constants_from_enum
class Activation(enum.Enum):
    """The hidden non-linearity; gated variants multiply by a second projection."""

    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"
    GATED_GELU = "gated_gelu"
    GATED_SILU = "gated_silu"

    @property
    def is_gated(self) -> bool:
        return self in (Activation.GATED_GELU, Activation.GATED_SILU)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """The non-linearity alone; gelu by its tanh approximation."""
        if self is Activation.RELU:
            return tf.nn.relu(x)
        if self in (Activation.SILU, Activation.GATED_SILU):
            return tf.nn.silu(x)
        return tf.nn.gelu(x, approximate=True)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward(Layer):
    """activation(x W_in) W_out; if gated, activation(x W_gate) * (x W_in) W_out.

    Annotated as GSPMD 5.1; gated variants follow Shazeer 2020. Recomputation may save
    `feed_forward_in`, `hidden`, `gate` and `feed_forward_out`.

    Args:
      model_dims: M.
      hidden_dims: H.
      activation: the non-linearity.
      dropout_rate: the dropout rate of hidden activations.
      use_bias: adds a bias to each projection.

    Raises:
      ValueError: the rate is out of range.
    """

    model_dims: int = bounded(at_least=1)
    hidden_dims: int = bounded(at_least=1)
    activation: Activation = Activation.RELU
    dropout_rate: float = bounded(0.0, at_least=0, below=1)
    use_bias: bool = False

    def weights(self) -> NestedMap:
        w_in = WeightSpec(
            shape=(self.model_dims, self.hidden_dims),
            dims=("model", "hidden"),
            initializer=FanIn(),
        )
        w_out = WeightSpec(
            shape=(self.hidden_dims, self.model_dims),
            dims=("hidden", "model"),
            initializer=FanIn(),
        )
        specs = NestedMap(w_in=w_in, w_out=w_out)
        if self.activation.is_gated:
            specs.w_gate = w_in
        if self.use_bias:
            biases = {
                name.replace("w", "b"): per_feature(w.shape[-1])
                for name, w in specs.items()
            }
            specs.update(biases)
        return specs

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Transforms each token of `x` [B, S, M]; same shape, activation dtype.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        names = ("in", "gate") if self.activation.is_gated else ("in",)
        x = save_name(read_stream(ctx, x), "feed_forward_in")
        products = contract_each(ctx, x, [theta[f"w_{name}"] for name in names])
        products = [ctx.split(product, BSH) for product in products]
        if self.use_bias:
            pairs = zip(products, names, strict=True)
            products = [
                add_bias(ctx, product, theta[f"b_{name}"]) for product, name in pairs
            ]
        hidden = save_name(products[0], "hidden")
        if self.activation.is_gated:
            hidden = self.activation(save_name(products[1], "gate")) * hidden
        else:
            hidden = self.activation(hidden)
        with ctx.scope("dropout") as c:
            hidden = Dropout(rate=self.dropout_rate).fprop(
                c,
                NestedMap(),
                hidden,
                read_by_products=True,
                dead_at_zero=self.activation is Activation.RELU,
            )
        out = contract(ctx, hidden, theta.w_out)
        out = to_stream(ctx, out, name="feed_forward_out")
        return add_bias(ctx, out, theta.b_out) if self.use_bias else out
