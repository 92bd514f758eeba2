"""Operators element by element."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    BOOLEANS,
    HALVES,
    MOVES,
    ORDERS,
    SUMS,
    Input,
    Use,
    of_shape,
    operator,
    shape_of,
)


@operator
def pointwise(draw):
    shape = shape_of(draw)
    expression = draw(
        st.sampled_from(
            [
                "tf.tanh(x) * tf.exp(y)",
                "tf.math.erf(x) - tf.nn.relu(y)",
                "tf.nn.gelu(x) + tf.math.rsqrt(tf.abs(y) + 1)",
                "tf.sigmoid(x) / (tf.math.softplus(y) + 1)",
            ]
        )
    )
    return of_shape(expression, shape, shape)


@operator
def exact_arithmetic(draw):
    """Remainders, signs and rounding; of integers too."""
    shape = shape_of(draw)
    expression = draw(
        st.sampled_from(["x // 3", "x % 3", "tf.sign(x)", "tf.maximum(x, x // 2)"])
    )
    return of_shape(expression, shape, formats=("int32", "int64"))


@operator
def where(draw):
    """By a mask, of as many dims or fewer."""
    shape = shape_of(draw)
    mask = shape[draw(st.integers(0, len(shape) - 1)) :] if draw(BOOLEANS) else shape
    return Use(
        "tf.where(p, x, y)",
        {"x": Input(shape), "y": Input(shape), "p": Input(mask, dtype="bool")},
        formats=MOVES,
    )


@operator
def select(draw):
    shape = shape_of(draw)
    expression = draw(
        st.sampled_from(
            [
                "tf.where(x > y, x, 2 * y)",
                "tf.where(tf.reduce_max(x, 0) > 1, x, y)",
                "tf.maximum(x, tf.minimum(y, 1))",
                "tf.clip_by_value(x, -1, 1) * y",
            ]
        )
    )
    return of_shape(expression, shape, shape, formats=(*HALVES, "int32"))


@operator
def compare(draw):
    shape = shape_of(draw)
    sign = draw(st.sampled_from(["<", "<=", ">", ">="]))
    low = shape[draw(st.integers(0, len(shape))) :]
    return of_shape(f"[x {sign} y, tf.equal(x, y)]", shape, low, formats=ORDERS)


@operator
def bitwise(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["and", "or", "xor"]))
    dtype = draw(st.sampled_from(["int32", "int64", "int8", "uint8"]))
    operand = Input(shape, dtype=dtype)
    return Use(
        f"[tf.bitwise.bitwise_{name}(x, y), tf.bitwise.left_shift(x, x % 7)]",
        {"x": operand, "y": operand},
    )


@operator
def logical(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["and", "or", "xor"]))
    operand = Input(shape, dtype="bool")
    return Use(f"tf.math.logical_{name}(x, ~y)", {"x": operand, "y": operand})


@operator
def cast(draw):
    """Between any two formats; what a format cannot hold is left out."""
    shape = shape_of(draw)
    to = draw(st.sampled_from(["float32", "float64", *MOVES]))
    source = draw(st.sampled_from(["float32", "float64", *MOVES]))
    operand = Input(shape, dtype=source)
    held = "x"
    if to not in ("bool", "complex64") and source not in ("bool", "uint8"):
        held = "tf.abs(x)"  # In complex64 the magnitude.
    # Eager TF drops the imaginary part; XLA, also in TF's own jit, asks if all is zero.
    eager = (source, to) != ("complex64", "bool")
    return Use(f"tf.cast({held}, tf.{to})", {"x": operand}, formats=(), eager=eager)


@operator
def complex_parts(draw):
    shape = shape_of(draw)
    expression = draw(
        st.sampled_from(
            [
                "tf.math.real(x) * tf.math.imag(y)",
                "tf.abs(x) + tf.math.real(tf.math.conj(y))",
                "x * tf.math.conj(y)",
                "x / (y + 4)",
                "tf.exp(x) * y",
                "tf.complex(tf.math.imag(x), tf.math.real(y))",
            ]
        )
    )
    operand = Input(shape, dtype="complex64")
    return Use(expression, {"x": operand, "y": operand})


@operator
def add_n(draw):
    shape = shape_of(draw)
    return of_shape("tf.add_n([x, y, z])", shape, shape, shape, formats=SUMS)
