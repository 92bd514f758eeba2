"""The operators of the matrix: for each an expression and what is drawn for it."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from tests.operators import windows  # noqa: F401  It enters its operators.
from tests.operators.use import (
    BOOLEANS,
    OPERATORS,
    SEVERAL,
    SIZES,
    SMALL,
    Input,
    Kind,
    Use,
    dim_of,
    of_shape,
    operator,
    shape_of,
)

__all__ = ["OPERATORS"]


# Products.


def einsum(draw, equations) -> Use:
    equation = draw(st.sampled_from(equations))
    size = {c: draw(SMALL) for c in dict.fromkeys(equation) if c.isalpha()}
    operands = equation.split("->")[0].split(",")
    shapes = [[size[c] for c in operand] for operand in operands]
    # In all equations here batch dims come first.
    alike = [a == b for a, b in zip(*operands, strict=False)]
    batch = [*alike, False].index(False)
    return of_shape(
        f"tf.einsum({equation!r}, x, y)", *shapes, batch=batch, product=True
    )


@operator
def einsum_batch(draw):
    return einsum(draw, ["bi,bj->bij", "bsd,bd->bsd", "bcs,bcd->bcsd"])


@operator
def einsum_contracting(draw):
    return einsum(draw, ["ij,jk->ik", "bsm,mh->bsh", "bsm,mnd->bsnd", "bsnd,ndm->bsm"])


@operator
def einsum_both(draw):
    return einsum(draw, ["bsnd,btnd->bnst", "bij,bjk->bik", "gsec,gsm->egcm"])


# Moving elements.


@operator
def pad(draw):
    shape = shape_of(draw)
    paddings = [list(draw(st.tuples(*[st.integers(0, 5)] * 2))) for _ in shape]
    return of_shape(f"tf.pad(x, {paddings}, constant_values=0.5)", shape)


@operator
def mirror_pad(draw):
    shape = shape_of(draw)
    mode = draw(st.sampled_from(["REFLECT", "SYMMETRIC"]))
    most = [n - (mode == "REFLECT") for n in shape]
    paddings = [[draw(st.integers(0, min(n, 4))) for _ in "ab"] for n in most]
    return of_shape(f"tf.pad(x, {paddings}, {mode!r})", shape)


@operator
def slice_(draw):
    shape = shape_of(draw)
    begin = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - b)) for n, b in zip(shape, begin, strict=True)]
    return of_shape(f"tf.slice(x, {begin}, {size})", shape)


@operator
def strided_slice(draw):
    shape = shape_of(draw)
    parts, strided = [], False
    for n in shape:
        low = draw(st.integers(0, n - 1))
        high = draw(st.integers(low + 1, n))
        step = draw(st.sampled_from([1, 2, 3, -1, -2]))
        if high - low <= abs(step):  # Takes one element: a known failure.
            step //= abs(step)
        strided |= abs(step) > 1
        down = f"{high - 1}:{low - 1 if low else ''}:{step}"
        parts.append(f"{low}:{high}:{step}" if step > 0 else down)
    even = ("x", "result") if strided else ()
    return of_shape(f"x[{', '.join(parts)}]", shape, even=even)


@operator
def dynamic_slice(draw):
    shape = shape_of(draw)
    size = [draw(st.integers(1, n)) for n in shape]
    return Use(
        f"tf.slice(x, i, {size})",
        {
            "x": Input(shape),
            "i": Input(
                (len(shape),),
                Kind.INDEX,
                min(n - s for n, s in zip(shape, size, strict=True)) + 1,
            ),
        },
    )


@operator
def reverse(draw):
    shape = shape_of(draw)
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    return of_shape(f"tf.reverse(x, {sorted(dims)})", shape)


@operator
def concat(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    shapes = [(*shape[:dim], n, *shape[dim + 1 :]) for n in shape_of(draw, 3, 3)]
    return of_shape(f"tf.concat([x, y, z], {dim})", *shapes)


@operator
def split(draw):
    shape = list(shape_of(draw))
    dim = dim_of(draw, shape)
    parts = list(shape_of(draw, 2, 3, SMALL))
    shape[dim] = sum(parts)
    return of_shape(f"tf.split(x, {parts}, {dim})", shape)


@operator
def stack(draw):
    shape = shape_of(draw)
    return of_shape(
        f"tf.stack([x, y], {draw(st.integers(0, len(shape)))})", *[shape] * 2
    )


@operator
def roll(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    shift = draw(st.integers(-shape[dim], shape[dim]))
    return of_shape(f"tf.roll(x, {shift}, {dim})", shape)


@operator
def reshape(draw):
    """Dims merged, split, and regrouped where no dim keeps its elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=2, max_size=5))

    def grouped():
        cuts = draw(st.sets(st.integers(1, len(factors) - 1)))
        at = [0, *sorted(cuts), len(factors)]
        return [math.prod(factors[a:b]) for a, b in zip(at, at[1:], strict=False)]

    before, after = grouped(), grouped()
    if draw(BOOLEANS):
        after = after[::-1]
    return of_shape(f"tf.reshape(x, {after})", before)


@operator
def transpose(draw):
    shape = shape_of(draw, 2, 4, SMALL)
    return of_shape(
        f"tf.transpose(x, {draw(st.permutations(range(len(shape))))})", shape
    )


@operator
def tile(draw):
    shape = shape_of(draw)
    multiples = [draw(st.integers(1, 3)) for _ in shape]
    return of_shape(f"tf.tile(x, {multiples})", shape)


@operator
def broadcast(draw):
    shape = shape_of(draw)
    ones = [n if draw(BOOLEANS) else 1 for n in shape]
    return of_shape("x * y", shape, ones[draw(st.integers(0, len(shape))) :])


# Indices.


@operator
def gather(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    index = Input(shape_of(draw, 1, 2, SEVERAL), Kind.INDEX, shape[dim])
    after = range(dim + 1, len(shape))
    after_index = [d + len(index.shape) - 1 for d in after]
    return Use(
        f"tf.gather(x, i, axis={dim})",
        {"x": Input(shape), "i": index},
        even=("i", "result"),
        picked="result",
        rows={"x": (*range(dim), *after), "result": (*range(dim), *after_index)},
    )


@operator
def gather_batched(draw):
    batch, rows, width, count = shape_of(draw, 4, 4, SEVERAL)
    index = Input((batch, count), Kind.INDEX, rows)
    return Use(
        "tf.gather(x, i, axis=1, batch_dims=1)",
        {"x": Input((batch, rows, width)), "i": index},
        even=("i", "result"),
        picked="result",
        rows={"x": (2,), "result": (2,)},
    )


@operator
def gather_nd(draw):
    shape = shape_of(draw, 2, 3)
    counts = shape_of(draw, 1, 2, SEVERAL)
    return Use(
        "tf.gather_nd(x, i)",
        {"x": Input(shape), "i": Input((*counts, 2), Kind.INDEX, min(shape[:2]))},
        unsplit={"i": (len(counts),)},
        even=("i", "result"),
        picked="result",
        rows={"x": (2,), "result": (len(counts),)},
    )


@operator
def embedding(draw):
    """As tied embeddings use it: the table's gradient is a scatter and a product."""
    vocabulary, width = shape_of(draw, 2, 2)
    ids = Input(shape_of(draw, 2, 2, SEVERAL), Kind.INDEX, vocabulary)
    return Use(
        "tf.matmul(tf.nn.embedding_lookup(x, i), x, transpose_b=True)",
        {"x": Input((vocabulary, width)), "i": ids},
        even=("i", "result"),
        product=True,
        picked="result",
        rows={"x": (1,)},
    )


@operator
def scatter_add(draw):
    shape = shape_of(draw, 1, 2)
    count = draw(SEVERAL)
    return Use(
        "tf.tensor_scatter_nd_add(x, i, y)",
        {
            "x": Input(shape),
            "i": Input((count, 1), Kind.INDEX, shape[0]),
            "y": Input((count, *shape[1:])),
        },
        unsplit={"i": (1,)},
        even=("i", "y"),
        picked="y",
        rows={"x": (1,), "y": (1,), "result": (1,)},
    )


@operator
def scatter_update(draw):
    shape = (draw(SEVERAL), *shape_of(draw, 0, 1))
    count = draw(st.integers(2, shape[0]))
    return Use(
        "tf.tensor_scatter_nd_update(x, i, y)",
        {
            "x": Input(shape),
            "i": Input((count, 1), Kind.UNIQUE, shape[0]),
            "y": Input((count, *shape[1:])),
        },
        unsplit={"i": (1,)},
        even=("i", "y"),
        picked="y",
        rows={"x": (1,), "y": (1,), "result": (1,)},
    )


@operator
def segment_sum(draw):
    shape = (draw(SEVERAL), *shape_of(draw, 0, 2))
    segments = draw(SIZES)
    return Use(
        f"tf.math.unsorted_segment_sum(x, i, {segments})",
        {"x": Input(shape), "i": Input(shape[:1], Kind.INDEX, segments)},
        even=("i", "x"),
        picked="x",
        rows={"x": (1, 2), "result": (1, 2)},
    )


@operator
def one_hot(draw):
    depth = draw(SIZES)
    shape = shape_of(draw, 1, 2)
    dim = draw(st.integers(0, len(shape)))
    return Use(
        f"tf.one_hot(i, {depth}, axis={dim})", {"i": Input(shape, Kind.INDEX, depth)}
    )


# Along a dim.


@operator
def reduce(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["sum", "mean", "max", "min", "logsumexp"]))
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    return of_shape(f"tf.reduce_{name}(x, {sorted(dims)})", shape)


@operator
def argmax(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    return of_shape(f"tf.argmax(x, {dim}, tf.int32)", shape)


@operator
def cumsum(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    flags = f"exclusive={draw(BOOLEANS)}, reverse={draw(BOOLEANS)}"
    return of_shape(f"tf.cumsum(x, {dim}, {flags})", shape)


@operator
def sort(draw):
    shape = shape_of(draw)
    order = draw(st.sampled_from(["ASCENDING", "DESCENDING"]))
    return of_shape(f"tf.sort(x, {dim_of(draw, shape)}, {order!r})", shape)


@operator
def argsort(draw):
    shape = shape_of(draw)
    return of_shape(f"tf.argsort(x, {dim_of(draw, shape)})", shape)


@operator
def top_k(draw):
    shape = shape_of(draw)
    # Its gradient is a scatter, of as many indices as the result has elements.
    count = draw(st.integers(1, shape[-1]))
    return of_shape(f"tf.math.top_k(x, {count})", shape, even=("result",))


@operator
def softmax(draw):
    shape = shape_of(draw)
    name = draw(st.sampled_from(["softmax", "log_softmax"]))
    return of_shape(f"tf.nn.{name}(x, {dim_of(draw, shape)})", shape)


@operator
def layer_norm(draw):
    shape = shape_of(draw, 2, 3)
    return of_shape("layer_norm(x, y, z)", shape, shape[-1:], shape[-1:])


# Control flow.


@operator
def while_loop(draw):
    rows, width = shape_of(draw, 2, 2)
    steps = draw(st.integers(1, 4))
    return of_shape(
        f"repeat(x, y, {steps})", (rows, width), (width, width), product=True
    )


@operator
def scan(draw):
    """A loop that reads a slice of one tensor each step and writes one of another."""
    steps, rows, width = shape_of(draw, 3, 3)
    return of_shape("running(x, y)", (steps, rows, width), (rows, width))


@operator
def cond(draw):
    rows, width = shape_of(draw, 2, 2)
    return Use(
        "tf.cond(p, lambda: tf.sin(x @ y), lambda: x[:, ::-1] @ y)",
        {
            "x": Input((rows, width)),
            "y": Input((width, draw(SIZES))),
            "p": Input((), Kind.FLAG),
        },
        product=True,
    )


# Random numbers.


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
        f"x * tf.cast(random.bernoulli(key, 0.5, {list(shape)}), tf.float32)",
        {"x": Input(shape), "key": Input((2,), Kind.KEY)},
        exact=True,
    )
