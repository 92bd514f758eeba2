"""Products of activations with weights, as 2-D matrix products.

Dims: B batch, S sequence, K contracted, F produced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import Context, WeightSpec

BSM = ("batch", "sequence", "model")
"""Logical dims of the residual stream."""


def per_feature(size: int, value: float = 0.0) -> WeightSpec:
    """A bias or scale, of that value at first: one number for each feature."""
    # A name of its own: split like a matrix's model dim it would move between the mesh
    # axes of weights and of activations at every use, to save a few bytes.
    return WeightSpec(shape=(size,), dims=("features",), initializer=Constant(value))


def contract(
    ctx: Context, x: tf.Tensor, weight: tf.Tensor, *, dims: int = 1
) -> tf.Tensor:
    """Contracts the last `dims` dims of `x` with the first `dims` of `weight`.

    Both are flattened to matrices first: the gradients of a 3-D einsum cost transposed
    copies of the activations. A plan that splits the sequence dim pays for the
    flattened rows with a gather; Table 1's plans leave it whole.

    Args:
      ctx: gives the activation dtype, in which the product is taken.
      x: [..., K...].
      weight: [K..., F...].
      dims: how many dims K stands for.

    Returns:
      [..., F...] in the activation dtype.

    Raises:
      ValueError: the contracted dims of `x` and `weight` differ.
    """
    return contract_each(ctx, x, [weight], dims=dims)[0]


def contract_each(
    ctx: Context, x: tf.Tensor, weights: Sequence[tf.Tensor], *, dims: int = 1
) -> list[tf.Tensor]:
    """`contract` of one `x` with each of several weights.

    They share the flattened `x`, so that a mesh gathers it once for all.
    """
    lead, contracted = x.shape[:-dims], weights[0].shape[:dims]
    check_trailing_dims(ctx, x, contracted)
    size = math.prod(contracted)
    rows = tf.reshape(ctx.cast(x), [-1, size])
    products = []
    for weight in weights:
        product = rows @ tf.reshape(ctx.cast(weight), [size, -1])
        products.append(tf.reshape(product, [*lead, *weight.shape[dims:]]))
    return products


def check_trailing_dims(ctx: Context, x: tf.Tensor, dims: Sequence[int]) -> None:
    """Raises ValueError, naming the layer, unless the shape of `x` ends with `dims`."""
    dims = list(dims)
    if list(x.shape[-len(dims) :]) != dims:
        raise ValueError(
            f"layer {ctx.path!r} takes inputs whose last dims are {dims} but was given "
            f"{x.shape}: set its dims to those of the layer that feeds it"
        )
