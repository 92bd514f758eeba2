"""Random numbers, by key or seed."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    MOVES,
    SIZES,
    Input,
    Kind,
    Use,
    operator,
    shape_of,
)


def drawn_by(draw, expression: str) -> Use:
    shape = list(shape_of(draw))
    key = Input((2,), Kind.KEY)
    # TF's own inverse error function differs from XLA's in the last bit, and XLA's from
    # itself where shards are of other shapes: what does not fill a vector is left over.
    same_bits = "normal" not in expression
    return Use(expression.format(shape), {"key": key}, exact=same_bits, eager=same_bits)


@operator
def random_bits(draw):
    return drawn_by(draw, "random.bits(key, {})")


@operator
def random_uniform(draw):
    return drawn_by(draw, "random.uniform(key, {})")


@operator
def random_normal(draw):
    return drawn_by(draw, "random.normal(key, {})")


@operator
def dropout(draw):
    shape = shape_of(draw)
    return Use(
        f"x * tf.cast(random.bernoulli(key, 0.5, {list(shape)}), x.dtype)",
        {"x": Input(shape), "key": Input((2,), Kind.KEY)},
        exact=True,
        formats=(),
    )


_SEED = Input((2,), Kind.INDEX, 2**31 - 1)


def stateless(draw, expression: str, exact: bool = True) -> Use:
    """TF's own: XLA's numbers are not eager TF's."""
    algorithm = draw(st.sampled_from(["threefry", "philox", "auto_select"]))
    shape = list(shape_of(draw))
    return Use(
        f"tf.random.stateless_{expression.format(shape)[:-1]}, alg={algorithm!r})",
        {"i": _SEED},
        eager=False,
        exact=exact,
    )


@operator
def stateless_uniform(draw):
    kinds = ["uniform({}, i)", "uniform({}, i, 0, 1000, tf.int32)"]
    return stateless(draw, draw(st.sampled_from(kinds)))


@operator
def stateless_normal(draw):
    name = draw(st.sampled_from(["normal", "truncated_normal"]))
    return stateless(draw, f"{name}({{}}, i)", exact=False)


@operator
def categorical(draw):
    rows, classes, count = shape_of(draw, 3, 3)
    return Use(
        f"tf.random.stateless_categorical(x, {count}, i, tf.int32)",
        {"x": Input((rows, classes)), "i": _SEED},
        eager=False,
        formats=(),
    )


@operator
def shuffle(draw):
    shape = shape_of(draw)
    return Use(
        f"tf.gather(x, tf.argsort(random.uniform(key, [{shape[0]}])))",
        {"x": Input(shape), "key": Input((2,), Kind.KEY)},
        exact=True,
        formats=MOVES,
    )


@operator
def folded_keys(draw):
    """A key for each of several layers."""
    count = draw(SIZES)
    return Use(
        f"random.fold_in(key, tf.range({count}))", {"key": Input((2,), Kind.KEY)}
    )
