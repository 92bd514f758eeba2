"""Loops and branches."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    SIZES,
    SMALL,
    Input,
    Kind,
    Use,
    of_shape,
    operator,
    shape_of,
)


@operator
def while_loop(draw):
    rows, width = shape_of(draw, 2, 2)
    steps = draw(st.integers(1, 4))
    return of_shape(f"repeat(x, y, {steps})", (rows, width), (width, width))


@operator
def split_state(draw):
    """Two tensors of state, laid out inside the loop, that change places."""
    rows, width = shape_of(draw, 2, 2)
    steps = draw(st.integers(1, 4))
    shape = (rows, width)
    return of_shape(
        f"changing(lay, x, y, {steps})", shape, shape, inner=(2, 2), formats=()
    )


@operator
def nested_loops(draw):
    """A loop in a loop, its state laid out in each."""
    rows, width = shape_of(draw, 2, 2, SMALL)
    steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return of_shape(
        f"nested(lay, x, y, {steps})",
        (rows, width),
        (width, width),
        inner=(2, 2),
        formats=(),
    )


@operator
def loop_until(draw):
    """It ends when a split tensor says so."""
    shape = shape_of(draw, 1, 2)
    return of_shape("halved_until(lay, x)", shape, inner=(len(shape),), formats=())


@operator
def scan(draw):
    """A loop that reads a slice of one tensor each step and writes one of another."""
    steps, rows, width = shape_of(draw, 3, 3)
    return of_shape("running(x, y)", (steps, rows, width), (rows, width), formats=())


@operator
def recurrent(draw):
    """A recurrent layer: a product each step, its state laid out inside."""
    steps, batch, width = shape_of(draw, 3, 3, SMALL)
    return of_shape(
        "recurrence(lay, x, y, z)",
        (steps, batch, width),
        (batch, width),
        (width, width),
        inner=(2,),
        formats=(),
    )


@operator
def map_fn(draw):
    count, rows, width = shape_of(draw, 3, 3, SMALL)
    return of_shape(
        "tf.map_fn(lambda row: tf.sin(row @ y), x)",
        (count, rows, width),
        (width, draw(SMALL)),
        formats=(),
    )


@operator
def fold(draw):
    count, width = shape_of(draw, 2, 2)
    return of_shape(
        "tf.foldl(lambda state, row: tf.sin(state * row), x, y)",
        (count, width),
        (width,),
        formats=(),
    )


@operator
def cond(draw):
    rows, width = shape_of(draw, 2, 2)
    return Use(
        "tf.cond(p, lambda: tf.sin(x @ y), lambda: x[:, ::-1] @ y)",
        {
            "x": Input((rows, width)),
            "y": Input((width, draw(SIZES))),
            "p": Input((), dtype="bool"),
        },
        formats=(),
    )


@operator
def cond_of_data(draw):
    """Each shard by itself would choose otherwise than all of them together."""
    shape = shape_of(draw, 1, 2)
    predicate = draw(
        st.sampled_from(
            [
                "tf.reduce_sum(x * y) > 0.01",
                "tf.reduce_any(x > 1.5)",
                "tf.reduce_all(x > y)",
                "tf.reshape(x, [-1])[0] > 0",
            ]
        )
    )
    return of_shape(
        f"tf.cond({predicate}, lambda: lay(tf.sin(x) * y, 0), "
        "lambda: tf.reverse(x, [0]))",
        shape,
        shape,
        inner=(len(shape),),
        formats=(),
    )


@operator
def switch_case(draw):
    rows, width = shape_of(draw, 2, 2)
    index = draw(st.sampled_from(["i", "tf.argmax(x[0], output_type=tf.int32) % 3"]))
    return Use(
        f"tf.switch_case({index}, [lambda: lay(x + y, 0), lambda: x * y, "
        "lambda: tf.cumsum(x, 1)])",
        {
            "x": Input((rows, width)),
            "y": Input((width,)),
            "i": Input((), Kind.INDEX, 3),
        },
        inner=(2,),
        formats=(),
    )


@operator
def cond_in_loop(draw):
    rows, width = shape_of(draw, 2, 2, SMALL)
    steps = draw(st.integers(1, 3))
    return of_shape(
        f"choosing(lay, x, y, {steps})",
        (rows, width),
        (rows, width),
        inner=(2,),
        formats=(),
    )
