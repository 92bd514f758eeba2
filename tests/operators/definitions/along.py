"""Operators along a dim: sums, running sums, orders."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    BOOLEANS,
    HALVES,
    ORDERS,
    SUMS,
    Input,
    Use,
    dim_of,
    of_shape,
    operator,
    shape_of,
)


@operator
def reduce(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["sum", "mean", "max", "min", "logsumexp"]))
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    formats = {"sum": SUMS, "max": ORDERS, "min": ORDERS}
    # Terms may cancel, and each addition rounds by up to half a unit.
    terms = math.prod(shape[dim] for dim in dims)
    return of_shape(
        f"tf.reduce_{name}(x, {sorted(dims)})",
        shape,
        tolerance=max(1e-5, terms * 2.0**-24),
        **({"formats": formats[name]} if name in formats else {}),
    )


@operator
def reduce_prod(draw):
    shape = shape_of(draw, 1, 2)
    return of_shape(f"tf.reduce_prod(x, {dim_of(draw, shape)})", shape, formats=())


@operator
def reduce_flags(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["any", "all"]))
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    flags = Input(shape, dtype="bool")
    return Use(f"tf.reduce_{name}(x, {sorted(dims)})", {"x": flags})


@operator
def reduce_by_another(draw):
    """By XLA's own reduce, and functions that its collectives do not have."""
    shape = shape_of(draw)
    name = draw(st.sampled_from(["larger", "exclusive or", "all bits", "sum"]))
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    dtype = "float32" if name in ("larger", "sum") else "int32"
    return Use(
        f"reduced(x, {dims}, {name!r})",
        {"x": Input(shape, dtype=dtype)},
        eager=False,
        formats=(),
        differentiable=False,
    )


@operator
def largest(draw):
    """By `approx_max_k`: all of them, one of which is a reduction, or their places."""
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    k = draw(st.sampled_from([1, shape[dim]]))
    part = draw(st.sampled_from(["[0]", "[1]", ""]))
    return of_shape(
        f"tf.math.approx_max_k(x, {k}, {dim}, 1.0){part}",
        shape,
        eager=False,
        formats=(),
        differentiable=False,
    )


@operator
def moments(draw):
    shape = shape_of(draw)
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    return of_shape(f"tf.nn.moments(x, {dims})", shape)


@operator
def argmax(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["argmax", "argmin"]))
    dtype = draw(st.sampled_from(["int32", "int64"]))
    expression = f"tf.{name}(x, {dim_of(draw, shape)}, tf.{dtype})"
    return of_shape(expression, shape, formats=ORDERS)


def running(draw, name: str, **kwargs) -> Use:
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    flags = f"exclusive={draw(BOOLEANS)}, reverse={draw(BOOLEANS)}"
    return of_shape(f"tf.{name}(x, {dim}, {flags})", shape, **kwargs)


@operator
def cumsum(draw):
    # TF2XLA has none of complex numbers.
    return running(draw, "cumsum", formats=(*HALVES, "int32", "int64"))


@operator
def cumprod(draw):
    return running(draw, "math.cumprod", formats=())


@operator
def cumulative_logsumexp(draw):
    """Of no elements it is the logarithm of 0, out of proportion."""
    shape = shape_of(draw)
    dim, back = dim_of(draw, shape), draw(BOOLEANS)
    return of_shape(f"tf.math.cumulative_logsumexp(x, {dim}, reverse={back})", shape)


@operator
def sort(draw):
    shape = shape_of(draw)
    order = draw(st.sampled_from(["ASCENDING", "DESCENDING"]))
    expression = f"tf.sort(x, {dim_of(draw, shape)}, {order!r})"
    return of_shape(expression, shape, formats=ORDERS)


@operator
def argsort(draw):
    """Elements that are equal keep their order."""
    shape = shape_of(draw)
    order = draw(st.sampled_from(["ASCENDING", "DESCENDING"]))
    return of_shape(
        f"tf.argsort(x, {dim_of(draw, shape)}, {order!r}, stable=True)",
        shape,
        formats=ORDERS,
    )


@operator
def sort_by(draw):
    """Elements in the order of others."""
    shape = shape_of(draw)
    return of_shape(
        f"tf.gather(y, tf.argsort(x, stable=True), batch_dims={len(shape) - 1})",
        shape,
        shape,
        formats=(),
    )


@operator
def sort_pairs(draw):
    """A sort of two operands."""
    shape = shape_of(draw)
    return of_shape(
        "list(pairs_sorted(x, y))",
        shape,
        shape,
        eager=False,
        formats=(),
        differentiable=False,
    )


@operator
def top_k(draw):
    shape = shape_of(draw)
    count = draw(st.integers(1, shape[-1]))
    return of_shape(f"tf.math.top_k(x, {count})", shape, formats=ORDERS)


@operator
def top_k_of_product(draw):
    """As routers choose experts."""
    tokens, width, experts = shape_of(draw, 3, 3)
    count = draw(st.integers(1, min(2, experts)))
    return of_shape(
        f"tf.math.top_k(tf.nn.softmax(x @ y / 8), {count})",
        (tokens, width),
        (width, experts),
        formats=(),
    )


@operator
def softmax(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["softmax", "log_softmax"]))
    return of_shape(f"tf.nn.{name}(x, {dim_of(draw, shape)})", shape)


@operator
def layer_norm(draw):
    shape = shape_of(draw, 2, 3)
    return of_shape("layer_norm(x, y, z)", shape, shape[-1:], shape[-1:])


@operator
def l2_normalize(draw):
    shape = shape_of(draw)
    return of_shape(f"tf.math.l2_normalize(x, {dim_of(draw, shape)})", shape)


@operator
def clip_by_norm(draw):
    shape = shape_of(draw)
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    return of_shape(f"tf.clip_by_norm(x, 1.5, {dims})", shape, formats=())


@operator
def global_norm(draw):
    a, b = shape_of(draw), shape_of(draw)
    return of_shape("tf.clip_by_global_norm([x, y], 1.0)", a, b, formats=())
