"""Products of activations with weights, as products of matrices, and their inputs.

Dims: B batch, S sequence, K contracted, F produced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import Context, WeightSpec
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.sharding.annotations import OnConflict, annotate
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard_to

BSM = ("batch", "stream", "model")
"""Logical dims of the residual stream, and of what is computed token by token on it."""
WHOLE = ("batch", "sequence", "model")
"""The stream's dims where products read it: their own dims may use the same axes."""


def per_feature(size: int, value: float = 0.0) -> WeightSpec:
    """A bias or scale, initialized to `value`: one number for each feature."""
    # The dim has its own name: split like a matrix's model dim it would move between
    # the mesh axes of weights and activations at every use, to save a few bytes.
    return WeightSpec(shape=(size,), dims=("features",), initializer=Constant(value))


def read_stream(ctx: Context, x: tf.Tensor) -> tf.Tensor:
    """The stream `x` [B, S, M] as products with weights read it.

    It is gathered where the plan splits "stream" and not "sequence". Its gradient is a
    sum over dims that the products split. Along the plan's `unreduced_gradient_axes`
    the sum is left unreduced until it is in the stream again: there all-reduce and
    slice are one reduce-scatter (Korthikanti et al. 2022, figure 5).
    """
    x = ctx.split(ctx.cast(x), BSM)
    stream, read = _shardings(ctx)
    if read.is_typed:
        return reshard_to(x, read, on_conflict=OnConflict.REDUCE)
    return x if read == stream else annotate(x, read)


def to_stream(
    ctx: Context, product: tf.Tensor, *, name: str | None = None
) -> tf.Tensor:
    """A product [B, S, M], put back into the stream: the reverse of `read_stream`.

    A sum over a dim that the plan's `unreduced_gradient_axes` split is scattered; for
    `name` see `ctx.split`.
    """
    stream, read = _shardings(ctx)
    if read != stream:
        # It is no partial sum where the axes do not divide heads or hidden units.
        product = annotate(product, read.dual(), on_conflict=OnConflict.REDUCE)
    if read.is_typed:
        product = reshard_to(product, stream)
    return ctx.split(product, BSM, name=name)


def _shardings(ctx: Context) -> tuple[Sharding, Sharding]:
    """The shardings of the stream, and of the stream where products read it."""
    stream = ctx.plan.activation_sharding(BSM, ctx.path)
    read = ctx.plan.gathered_sharding(WHOLE, ctx.path)
    return stream, read.without_trivial_types()


def contract(
    ctx: Context,
    x: tf.Tensor,
    weight: tf.Tensor,
    *,
    dims: int = 1,
    shape: Sequence[int] | None = None,
) -> tf.Tensor:
    """Contracts the last `dims` dims of `x` with the first `dims` of `weight`.

    Both are flattened to matrices first: the gradients of a 3-D einsum cost transposed
    copies of the activations. Under a plan that splits "sequence" the rows of `x` are
    left as they are: flattened they would be gathered.

    Args:
      ctx: gives the activation dtype, in which the product is computed.
      x: [..., K...].
      weight: [K..., F...], or the matrix of it.
      dims: how many dims K stands for.
      shape: [K..., F...]; by default the shape of `weight`.

    Returns:
      [..., F...] in the activation dtype.

    Raises:
      ValueError: the contracted dims of `x` and `weight` differ.
    """
    return contract_each(ctx, x, [weight], dims=dims, shape=shape)[0]


def contract_each(
    ctx: Context,
    x: tf.Tensor,
    weights: Sequence[tf.Tensor],
    *,
    dims: int = 1,
    shape: Sequence[int] | None = None,
) -> list[tf.Tensor]:
    """`contract` of `x` with each of several weights, of one `shape` if it is given.

    The products share the flattened `x`, so that a mesh that gathers it does so once.
    """
    lead, contracted = shape_of(x)[:-dims], (shape or weights[0].shape)[:dims]
    check_trailing_dims(ctx, x, contracted)
    size = math.prod(contracted)
    is_split = ctx.plan.activation_sharding(("sequence",), ctx.path).splits()[0] > 1
    rows = tf.reshape(ctx.cast(x), [*(lead if is_split else [-1]), size])
    products = []
    for weight in weights:
        product = _product(ctx, rows, tf.reshape(weight, [size, -1]))
        products.append(tf.reshape(product, [*lead, *(shape or weight.shape)[dims:]]))
    return products


def _product(ctx: Context, rows: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """[R..., K] times [K, F] in the activation dtype."""
    if not ctx.widens_gradients:
        return _times(rows, ctx.cast(weight))

    @tf.custom_gradient
    def product(rows, weight):
        matrix = ctx.cast(weight)

        def gradient(dy):
            wide = summed_products(rows, dy, ctx.gradient_dtype)
            return _times(dy, matrix, "kf"), tf.cast(wide, weight.dtype)

        return _times(rows, matrix), gradient

    return product(rows, weight)


def _times(rows: tf.Tensor, matrix: tf.Tensor, dims: str = "fk") -> tf.Tensor:
    """[..., F] times [F, K], or, of dims "kf", [K, F]: [..., K]."""
    if rows.shape.rank == 2 and dims == "fk":
        return rows @ matrix
    if rows.shape.rank == 2:
        return tf.matmul(rows, matrix, transpose_b=True)
    # Not an ellipsis: the gradient by the matrix would sum a product for each row.
    lead = "abcde"[: rows.shape.rank - 1]
    return tf.einsum(f"{lead}f,{dims}->{lead}k", rows, matrix)


def summed_products(x: tf.Tensor, y: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """[R..., K] and [R..., F] to [K, F], summed over R in a wider dtype than theirs."""
    rows = list(range(x.shape.rank - 1))
    if tf.executing_eagerly():
        return tf.tensordot(tf.cast(x, dtype), tf.cast(y, dtype), [rows, rows])
    dims = xla_data_pb2.DotDimensionNumbers(
        lhs_contracting_dimensions=rows, rhs_contracting_dimensions=rows
    )
    return xla.dot_general(x, y, dims, preferred_element_type=dtype)


def add_bias(ctx: Context, x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """`x` [..., F...] plus `bias` [F...], in the activation dtype."""
    return x + spread(ctx, bias, x)


def spread(ctx: Context, weight: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """A weight in the activation dtype, to be broadcast to the shape of `x`."""
    if ctx.widens_gradients:
        # Broadcast in its own dtype, so that its gradient is summed in it.
        weight = tf.broadcast_to(weight, shape_of(x))
    return ctx.cast(weight)


def apply_weight(
    ctx: Context,
    linear: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    weight: tf.Tensor,
) -> tf.Tensor:
    """`linear(x, weight)` in the activation dtype; it is linear in each of the two."""
    x = ctx.cast(x)
    if not ctx.widens_gradients:
        return linear(x, ctx.cast(weight))

    @tf.custom_gradient
    def applied(x, weight):
        low = ctx.cast(weight)

        def gradient(dy):
            wide_x, wide = (tf.cast(t, ctx.gradient_dtype) for t in (x, low))
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([x, wide])
                y, wide_y = linear(x, low), linear(wide_x, wide)
            dx = tape.gradient(y, x, dy)
            dweight = tape.gradient(wide_y, wide, tf.cast(dy, ctx.gradient_dtype))
            return dx, tf.cast(dweight, weight.dtype)

        return linear(x, low), gradient

    return applied(x, weight)


def check_trailing_dims(ctx: Context, x: tf.Tensor, dims: Sequence[int]) -> None:
    """Raises ValueError, naming the layer, unless the shape of `x` ends with `dims`."""
    dims = list(dims)
    if list(x.shape[-len(dims) :]) != dims:
        raise ValueError(
            f"layer {ctx.path!r} takes inputs whose last dims are {dims} but was given "
            f"{x.shape}: set its dims to those of the layer that feeds it"
        )
