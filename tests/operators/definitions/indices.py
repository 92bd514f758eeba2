"""Operators that read and write elements by index."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    BOOLEANS,
    HALVES,
    MOVES,
    SEVERAL,
    SIZES,
    SUMS,
    Input,
    Kind,
    Use,
    dim_of,
    of_shape,
    operator,
    shape_of,
)


@operator
def gather(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    index = Input(shape_of(draw, 1, 2), Kind.INDEX, shape[dim])
    return Use(
        f"tf.gather(x, i, axis={dim})", {"x": Input(shape), "i": index}, formats=MOVES
    )


@operator
def gather_batched(draw):
    """Along the dim after those of the batch, or a later one."""
    batch, rows, columns, width, count = shape_of(draw, 5, 5)
    dims = draw(st.integers(1, 2))
    shape = (batch, rows, columns, width)[: draw(st.integers(dims + 1, 4))]
    axis = draw(st.integers(dims, len(shape) - 1))
    index = Input((*shape[:dims], count), Kind.INDEX, shape[axis])
    return Use(
        f"tf.gather(x, i, axis={axis}, batch_dims={dims})",
        {"x": Input(shape), "i": index},
        formats=SUMS,
    )


@operator
def gather_nd(draw):
    shape = shape_of(draw, 2, 3)
    counts = shape_of(draw, 1, 2)
    indexed = draw(st.integers(1, len(shape)))
    index = Input((*counts, indexed), Kind.INDEX, min(shape[:indexed]))
    return Use("tf.gather_nd(x, i)", {"x": Input(shape), "i": index}, formats=SUMS)


@operator
def gather_nd_batched(draw):
    shape = shape_of(draw, 2, 3)
    indexed = draw(st.integers(1, len(shape) - 1))
    index = Input(
        (shape[0], draw(SIZES), indexed), Kind.INDEX, min(shape[1 : 1 + indexed])
    )
    return Use("tf.gather_nd(x, i, batch_dims=1)", {"x": Input(shape), "i": index})


@operator
def take_along(draw):
    """As many indices as the tensor has dims: all but the last are a batch."""
    *batch, size = shape_of(draw, 2, 3)
    index = Input((*batch, draw(SIZES)), Kind.INDEX, size)
    return Use(
        f"tf.gather(x, i, batch_dims={len(batch)})",
        {"x": Input((*batch, size)), "i": index},
        formats=SUMS,
    )


@operator
def embedding(draw):
    """As tied embeddings use it: the table's gradient is a scatter and a product."""
    vocabulary, width = shape_of(draw, 2, 2)
    ids = Input(shape_of(draw, 2, 2), Kind.INDEX, vocabulary)
    return Use(
        "tf.matmul(tf.nn.embedding_lookup(x, i), x, transpose_b=True)",
        {"x": Input((vocabulary, width)), "i": ids},
    )


@operator
def embedding_bag(draw):
    """Sums of rows, beside a product: as recommendation models join them."""
    vocabulary, width, examples, bag, features = shape_of(draw, 5, 5)
    return Use(
        "tf.concat([tf.reduce_sum(tf.gather(x, i), 1), y @ z], 1)",
        {
            "x": Input((vocabulary, width)),
            "i": Input((examples, bag), Kind.INDEX, vocabulary),
            "y": Input((examples, features)),
            "z": Input((features, width)),
        },
    )


@operator
def picked_pairs(draw):
    """Some of all pairs' products, as DLRM's interaction of features."""
    examples, features, width, count, more = shape_of(draw, 5, 5)
    return Use(
        "tf.concat([tf.gather(tf.reshape(tf.matmul(x, x, transpose_b=True), "
        f"[{examples}, {features**2}]), i, axis=1), y @ z], 1)",
        {
            "x": Input((examples, features, width)),
            "i": Input((count,), Kind.INDEX, features**2),
            "y": Input((examples, more)),
            "z": Input((more, width)),
        },
    )


# Writing.


def scatter(draw, how: str, *, unique: bool = False, formats=HALVES) -> Use:
    coordinates = draw(st.integers(1, 1 if unique else 2))
    shape = (*shape_of(draw, coordinates, coordinates), *shape_of(draw, 0, 1))
    least = min(shape[:coordinates])
    counts = (draw(st.integers(1, least)) if unique else draw(SIZES),)
    if not unique and draw(BOOLEANS):
        counts = (*counts, draw(SIZES))
    kind = Kind.UNIQUE if unique else Kind.INDEX
    return Use(
        f"tf.tensor_scatter_nd_{how}(x, i, y)",
        {
            "x": Input(shape),
            "i": Input((*counts, coordinates), kind, least),
            "y": Input((*counts, *shape[coordinates:])),
        },
        formats=formats,
    )


@operator
def scatter_add(draw):
    return scatter(draw, "add", formats=SUMS)


@operator
def scatter_sub(draw):
    return scatter(draw, "sub")


@operator
def scatter_max(draw):
    return scatter(draw, "max")


@operator
def scatter_min(draw):
    return scatter(draw, "min")


@operator
def scatter_update(draw):
    return scatter(draw, "update", unique=True, formats=MOVES)


@operator
def scatter_nd(draw):
    shape = shape_of(draw, 1, 3)
    coordinates = draw(st.integers(1, len(shape)))
    count = draw(SIZES)
    return Use(
        f"tf.scatter_nd(i, x, {list(shape)})",
        {
            "x": Input((count, *shape[coordinates:])),
            "i": Input((count, coordinates), Kind.INDEX, min(shape[:coordinates])),
        },
        formats=SUMS,
    )


@operator
def stitch(draw):
    """Rows of two tensors, each to its place."""
    a, b, width = shape_of(draw, 3, 3)
    order = draw(st.permutations(range(a + b)))
    return of_shape(
        f"tf.dynamic_stitch([{order[:a]}, {order[a:]}], [x, y])", (a, width), (b, width)
    )


def segment(draw, how: str, result: str = "{}", formats=HALVES) -> Use:
    shape = (draw(SIZES), *shape_of(draw, 0, 2))
    segments = draw(SIZES)
    index = shape[: draw(st.integers(1, min(2, len(shape))))]
    reduced = f"tf.math.unsorted_segment_{how}(x, i, {segments})"
    return Use(
        result.format(reduced),
        {"x": Input(shape), "i": Input(index, Kind.INDEX, segments)},
        formats=formats,
    )


@operator
def segment_sum(draw):
    return segment(draw, "sum", formats=SUMS)


@operator
def segment_mean(draw):
    return segment(draw, draw(st.sampled_from(["mean", "sqrt_n"])))


@operator
def segment_prod(draw):
    return segment(draw, "prod", formats=())


@operator
def segment_max(draw):
    """The maximum of no elements is out of proportion."""
    return segment(draw, "max", "tf.maximum({}, -9)")


@operator
def segment_min(draw):
    return segment(draw, "min", "tf.minimum({}, 9)")


@operator
def one_hot(draw):
    depth = draw(SIZES)
    shape = shape_of(draw, 1, 2)
    dim = draw(st.integers(0, len(shape)))
    return Use(
        f"tf.one_hot(i, {depth}, axis={dim})", {"i": Input(shape, Kind.INDEX, depth)}
    )


@operator
def searchsorted(draw):
    rows, length, count = shape_of(draw, 3, 3)
    side = draw(st.sampled_from(["left", "right"]))
    return of_shape(
        f"tf.searchsorted(tf.sort(x), y, {side!r})", (rows, length), (rows, count)
    )


@operator
def in_top_k(draw):
    rows, classes = draw(SIZES), draw(SEVERAL)
    count = draw(st.integers(1, classes))
    return Use(
        f"tf.math.in_top_k(i, x, {count})",
        {"x": Input((rows, classes)), "i": Input((rows,), Kind.INDEX, classes)},
        formats=(),
    )
