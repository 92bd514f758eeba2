"""Operators that move elements, or make them."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    BOOLEANS,
    MOVES,
    SIZES,
    SMALL,
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
def pad(draw):
    shape = shape_of(draw)
    paddings = [list(draw(st.tuples(*[st.integers(0, 5)] * 2))) for _ in shape]
    return of_shape(f"tf.pad(x, {paddings})", shape, formats=MOVES)


@operator
def mirror_pad(draw):
    shape = shape_of(draw)
    mode = draw(st.sampled_from(["REFLECT", "SYMMETRIC"]))
    most = [n - (mode == "REFLECT") for n in shape]
    paddings = [[draw(st.integers(0, min(n, 4))) for _ in "ab"] for n in most]
    return of_shape(f"tf.pad(x, {paddings}, {mode!r})", shape, formats=SUMS)


@operator
def slice_(draw):
    shape = shape_of(draw)
    begin = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - b)) for n, b in zip(shape, begin, strict=True)]
    return of_shape(f"tf.slice(x, {begin}, {size})", shape, formats=MOVES)


def steps(draw, size: int) -> str:
    low = draw(st.integers(0, size - 1))
    high = draw(st.integers(low + 1, size))
    step = draw(st.sampled_from([1, 2, 3, -1, -2]))
    down = f"{high - 1}:{low - 1 if low else ''}:{step}"
    return f"{low}:{high}:{step}" if step > 0 else down


@operator
def strided_slice(draw):
    """Every so many elements, a single one, or a new dim."""
    shape, parts = shape_of(draw), []
    for n in shape:
        kind = draw(st.sampled_from(["step", "step", "step", "one", "new"]))
        parts += ["None"] * (kind == "new")
        index = str(draw(st.integers(0, n - 1)))
        parts.append(index if kind == "one" else steps(draw, n))
    return of_shape(f"x[{', '.join(parts)}]", shape, formats=MOVES)


@operator
def strided_update(draw):
    """A part of a tensor written over."""
    shape = shape_of(draw)
    begin = [draw(st.integers(0, n - 1)) for n in shape]
    end = [draw(st.integers(b + 1, n)) for n, b in zip(shape, begin, strict=True)]
    return of_shape(
        f"updated(x, {begin}, {end}, y)",
        shape,
        [e - b for b, e in zip(begin, end, strict=True)],
        formats=MOVES,
    )


@operator
def dynamic_slice(draw):
    shape = shape_of(draw)
    size = [draw(st.integers(1, n)) for n in shape]
    most = min(n - s for n, s in zip(shape, size, strict=True)) + 1
    return Use(
        f"tf.slice(x, i, {size})",
        {"x": Input(shape), "i": Input((len(shape),), Kind.INDEX, most)},
        formats=MOVES,
    )


@operator
def slice_out_of_range(draw):
    shape = shape_of(draw)
    sizes = [draw(st.integers(1, n)) for n in shape]
    return Use(
        f"sliced(x, i, {sizes})",
        {"x": Input(shape), "i": Input((len(shape),), Kind.INDEX, 2 * max(shape))},
        exact=True,
        eager=False,
        formats=MOVES,
        differentiable=False,
    )


@operator
def update_out_of_range(draw):
    shape = shape_of(draw)
    part = tuple(draw(st.integers(1, n)) for n in shape)
    start = Input((len(shape),), Kind.INDEX, 2 * max(shape))
    return Use(
        "written(x, y, i)",
        {"x": Input(shape), "y": Input(part), "i": start},
        exact=True,
        eager=False,
        formats=MOVES,
        differentiable=False,
    )


@operator
def reverse(draw):
    shape = shape_of(draw)
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    return of_shape(f"tf.reverse(x, {sorted(dims)})", shape, formats=MOVES)


@operator
def reverse_sequence(draw):
    shape = shape_of(draw, 2, 3)
    batch, sequence = draw(st.sampled_from([(0, 1), (1, 0)]))
    lengths = Input((shape[batch],), Kind.INDEX, shape[sequence] + 1)
    return Use(
        f"tf.reverse_sequence(x, i, seq_axis={sequence}, batch_axis={batch})",
        {"x": Input(shape), "i": lengths},
        formats=SUMS,
    )


@operator
def concat(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    shapes = [(*shape[:dim], n, *shape[dim + 1 :]) for n in shape_of(draw, 3, 3)]
    return of_shape(f"tf.concat([x, y, z], {dim})", *shapes, formats=MOVES)


@operator
def split(draw):
    shape = list(shape_of(draw))
    dim = dim_of(draw, shape)
    parts = list(shape_of(draw, 2, 3, SMALL))
    shape[dim] = sum(parts)
    return of_shape(f"tf.split(x, {parts}, {dim})", shape, formats=MOVES)


@operator
def stack(draw):
    shape = shape_of(draw)
    dim = draw(st.integers(0, len(shape)))
    return of_shape(f"tf.stack([x, y], {dim})", shape, shape, formats=MOVES)


@operator
def unstack(draw):
    shape = list(shape_of(draw, 2, 3))
    dim = dim_of(draw, shape)
    shape[dim] = draw(st.integers(1, 3))
    return of_shape(f"tf.unstack(x, axis={dim})", shape, formats=MOVES)


@operator
def roll(draw):
    shape = shape_of(draw)
    dim = dim_of(draw, shape)
    shift = draw(st.integers(-shape[dim], shape[dim]))
    return of_shape(f"tf.roll(x, {shift}, {dim})", shape, formats=MOVES)


@operator
def roll_several(draw):
    """Along several dims, by shifts that are data or not."""
    shape = shape_of(draw, 2, 3)
    dims = draw(st.permutations(range(len(shape))))[:2]
    if draw(BOOLEANS):
        count = Input((2,), Kind.INDEX, 9)
        return Use(f"tf.roll(x, i, {dims})", {"x": Input(shape), "i": count})
    shifts = [draw(st.integers(-9, 9)) for _ in dims]
    return of_shape(f"tf.roll(x, {shifts}, {dims})", shape, formats=SUMS)


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
    return of_shape(f"tf.reshape(x, {after})", before, formats=MOVES)


@operator
def transpose(draw):
    shape = shape_of(draw, 2, 4, SMALL)
    order = draw(st.permutations(range(len(shape))))
    return of_shape(f"tf.transpose(x, {order})", shape, formats=MOVES)


@operator
def tile(draw):
    shape = shape_of(draw)
    multiples = [draw(st.integers(1, 3)) for _ in shape]
    return of_shape(f"tf.tile(x, {multiples})", shape, formats=SUMS)


@operator
def repeat_elements(draw):
    shape = shape_of(draw)
    count = draw(st.integers(1, 4))
    return of_shape(f"tf.repeat(x, {count}, {dim_of(draw, shape)})", shape)


@operator
def broadcast(draw):
    shape = shape_of(draw)
    ones = [n if draw(BOOLEANS) else 1 for n in shape]
    low = ones[draw(st.integers(0, len(shape))) :]
    return of_shape("x * y", shape, low, formats=SUMS)


@operator
def meshgrid(draw):
    sizes = shape_of(draw, 2, 3, SMALL)
    indexing = draw(st.sampled_from(["xy", "ij"]))
    names = ", ".join("xyz"[: len(sizes)])
    expression = f"tf.meshgrid({names}, indexing={indexing!r})"
    return of_shape(expression, *[(n,) for n in sizes], formats=SUMS)


# Blocks of an image.


@operator
def space_to_depth(draw):
    block = draw(st.integers(2, 3))
    rows, columns = (block * n for n in shape_of(draw, 2, 2, SMALL))
    shape = (draw(SMALL), rows, columns, draw(SMALL))
    return of_shape(f"tf.nn.space_to_depth(x, {block})", shape)


@operator
def depth_to_space(draw):
    block = draw(st.integers(2, 3))
    batch, rows, columns, depth = shape_of(draw, 4, 4, SMALL)
    shape = (batch, rows, columns, depth * block**2)
    return of_shape(f"tf.nn.depth_to_space(x, {block})", shape)


@operator
def space_to_batch(draw):
    """And back, cropped otherwise."""
    blocks = [draw(st.integers(1, 3)) for _ in "hw"]
    low = [draw(st.integers(0, 2)) for _ in blocks]
    sizes = shape_of(draw, 2, 2, SMALL)
    pads = [
        [a, a + -(n + 2 * a) % block]
        for a, n, block in zip(low, sizes, blocks, strict=True)
    ]
    shape = (draw(SMALL), *sizes, draw(st.integers(1, 4)))
    there = f"tf.space_to_batch(x, {blocks}, {pads})"
    if draw(BOOLEANS):
        return of_shape(there, shape)
    crops = [[a, 0] for a in low]
    return of_shape(f"tf.batch_to_space({there} * 2, {blocks}, {crops})", shape)


@operator
def extract_patches(draw):
    sizes = shape_of(draw, 2, 2)
    window = [1, *(draw(st.integers(1, min(3, n))) for n in sizes), 1]
    strides = [1, *shape_of(draw, 2, 2, st.integers(1, 3)), 1]
    hole = draw(st.integers(1, 2))
    if any((w - 1) * hole >= n for w, n in zip(window[1:3], sizes, strict=True)):
        hole = 1
    rates = [1, hole, hole, 1]
    padding = draw(st.sampled_from(["SAME", "VALID"]))
    return of_shape(
        f"tf.image.extract_patches(x, {window}, {strides}, {rates}, {padding!r})",
        (draw(SMALL), *sizes, draw(st.integers(1, 4))),
        eager=False,
        spatial=True,
    )


@operator
def resize(draw):
    sizes, to = shape_of(draw, 2, 2), list(shape_of(draw, 2, 2))
    method = draw(st.sampled_from(["bilinear", "nearest"]))
    return of_shape(
        f"tf.image.resize(x, {to}, {method!r})",
        (draw(SMALL), *sizes, draw(st.integers(1, 4))),
        formats=(),
        spatial=True,
        differentiable=method == "bilinear",
    )


# Diagonals and constants.


@operator
def diagonals(draw):
    *batch, rows, columns = shape_of(draw, 2, 3)
    least = min(rows, columns)
    k = draw(st.integers(1 - least, least - 1))
    long = min(rows + min(k, 0), columns - max(k, 0))
    shape = (*batch, rows, columns)
    kind = draw(st.sampled_from(["diag", "part", "set", "band"]))
    if kind == "diag":
        return of_shape(f"tf.linalg.diag(x, k={k})", (*batch, rows))
    if kind == "part":
        return of_shape(f"tf.linalg.diag_part(x, k={k})", shape)
    if kind == "set":
        return of_shape(f"tf.linalg.set_diag(x, y, k={k})", shape, (*batch, long))
    low, high = draw(st.integers(-1, rows)), draw(st.integers(-1, columns))
    return of_shape(f"tf.linalg.band_part(x, {low}, {high})", shape, formats=SUMS)


@operator
def iotas(draw):
    """Elements that are made from where they are."""
    rows, columns = shape_of(draw, 2, 2)
    made = draw(
        st.sampled_from(
            [
                f"tf.eye({rows}, {columns})",
                f"tf.cast(tf.range({columns}), tf.float32)",
                f"tf.linspace(0.0, 1.0, {columns})",
                f"tf.cast(tf.range({rows})[:, None] >= tf.range({columns}), 'float32')",
                f"tf.one_hot(tf.range({rows}) % {columns}, {columns})",
            ]
        )
    )
    return of_shape(f"[x * {made}, {made}]", (rows, columns), formats=())


@operator
def linspace(draw):
    shape = shape_of(draw, 0, 2)
    count, dim = draw(SIZES), draw(st.integers(0, len(shape)))
    return of_shape(f"tf.linspace(x, y, {count}, axis={dim})", shape, shape, formats=())


@operator
def sequence_mask(draw):
    shape, most = shape_of(draw, 1, 2), draw(SIZES)
    return Use(
        f"tf.sequence_mask(i, {most})", {"i": Input(shape, Kind.INDEX, most + 1)}
    )
