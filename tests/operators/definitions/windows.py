"""The operators whose windows move along dims, and need halos where these are split."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    BOOLEANS,
    SIZES,
    SMALL,
    Use,
    of_shape,
    operator,
    shape_of,
)


def convolution(draw, rank: int, sizes) -> Use:
    """Strides or dilations (TF has no gradient for both), groups, kinds of padding."""
    sizes = shape_of(draw, rank, rank, sizes)
    window = shape_of(draw, rank, rank, st.integers(1, 3 if rank == 3 else 4))
    batch, groups, per_group, features = shape_of(draw, 4, 4, st.integers(1, 4))
    strides, dilations = [1] * rank, [1] * rank
    if draw(BOOLEANS):
        strides = list(shape_of(draw, rank, rank, st.integers(1, 3)))
    else:
        dilations = list(shape_of(draw, rank, rank, st.integers(1, 3)))
    if rank == 3:  # TF has no groups here, and wrong shapes if dilations differ.
        groups, dilations = 1, dilations[:1] * 3
    covered = [(w - 1) * d + 1 for w, d in zip(window, dilations, strict=True)]
    apart, by = dilations, strides
    if rank > 1:
        apart, by = [1, *dilations, 1], [1, *strides, 1]
    padding = draw(st.sampled_from(paddings(draw, sizes, covered)))
    return of_shape(
        f"tf.nn.conv{rank}d(x, y, {by}, {padding}, dilations={apart})",
        (batch, *sizes, groups * per_group),
        (*window, per_group, groups * features),
        # On CPU TF lacks gradients for groups and dilations, and gets some wrong.
        eager=groups == 1
        and dilations == [1] * rank
        and all(s <= w for s, w in zip(strides, window, strict=True)),
        spatial=True,
    )


def paddings(draw, sizes, covered) -> list[str]:
    """Those that TF has for these sizes and what a window covers of them."""
    choices = ["'SAME'"]
    if all(c <= n for c, n in zip(covered, sizes, strict=True)):
        choices.append("'VALID'")
    if len(sizes) == 2:
        low = [draw(st.integers(0, 3)) for _ in sizes]
        high = [
            max(draw(st.integers(0, 3)), c - n)
            for c, n in zip(covered, sizes, strict=True)
        ]
        choices.append(str([[0, 0], [low[0], high[0]], [low[1], high[1]], [0, 0]]))
    return choices


@operator
def conv1d(draw):
    return convolution(draw, 1, SIZES)


@operator
def conv2d(draw):
    return convolution(draw, 2, SIZES)


@operator
def conv3d(draw):
    return convolution(draw, 3, SMALL)


def transposed(draw, rank: int) -> Use:
    """The gradient of a strided convolution: XLA dilates its input."""
    sizes = shape_of(draw, rank, rank, SMALL)
    strides = shape_of(draw, rank, rank, st.integers(1, 3))
    window = shape_of(draw, rank, rank, st.integers(1, 3))
    batch, channels, features = shape_of(draw, 3, 3, st.integers(1, 4))
    result = [batch, *(n * s for n, s in zip(sizes, strides, strict=True)), features]
    return of_shape(
        f"tf.nn.conv{rank}d_transpose(x, y, {result}, {list(strides)}, 'SAME')",
        (batch, *sizes, channels),
        (*window, features, channels),
        eager=all(s <= w for s, w in zip(strides, window, strict=True)),
        spatial=True,
    )


@operator
def conv2d_transpose(draw):
    return transposed(draw, 2)


@operator
def conv3d_transpose(draw):
    return transposed(draw, 3)


@operator
def depthwise_conv2d(draw):
    sizes = shape_of(draw, 2, 2)
    window = shape_of(draw, 2, 2, st.integers(1, 3))
    batch, channels, each = shape_of(draw, 3, 3, st.integers(1, 4))
    stride = draw(st.integers(1, min(window)))  # TF: the same for rows and columns.
    return of_shape(
        f"tf.nn.depthwise_conv2d(x, y, [1, {stride}, {stride}, 1], 'SAME')",
        (batch, *sizes, channels),
        (*window, channels, each),
        formats=(),
        spatial=True,
    )


@operator
def separable_conv2d(draw):
    sizes = shape_of(draw, 2, 2)
    window = shape_of(draw, 2, 2, st.integers(1, 3))
    batch, channels, each, features = shape_of(draw, 4, 4, st.integers(1, 4))
    return of_shape(
        "tf.nn.separable_conv2d(x, y, z, [1, 1, 1, 1], 'SAME')",
        (batch, *sizes, channels),
        (*window, channels, each),
        (1, 1, channels * each, features),
        formats=(),
        spatial=True,
    )


@operator
def conv_of_norm(draw):
    """A convolution between a norm and a nonlinear function, as networks have it."""
    sizes = shape_of(draw, 2, 2)
    batch, channels, features = shape_of(draw, 3, 3, SMALL)
    return of_shape(
        "tf.nn.silu(tf.nn.conv2d(tf.math.l2_normalize(x, [0, 1, 2]), y, 1, 'SAME'))",
        (batch, *sizes, channels),
        (3, 3, channels, features),
        formats=(),
        spatial=True,
    )


def pool(draw, kind: str) -> Use:
    rank = draw(st.integers(1, 3))
    sizes = shape_of(draw, rank, rank, SIZES if rank < 3 else SMALL)
    window = [draw(st.integers(1, min(4, n))) for n in sizes]
    strides = [draw(st.integers(1, min(3, w))) for w in window]  # TF: no larger.
    padding = draw(st.sampled_from(["SAME", "VALID"]))
    return of_shape(
        f"tf.nn.pool(x, {window}, {kind!r}, {strides}, {padding!r})",
        (draw(st.integers(1, 4)), *sizes, draw(st.integers(1, 4))),
        spatial=True,
    )


@operator
def max_pool(draw):
    return pool(draw, "MAX")


@operator
def avg_pool(draw):
    return pool(draw, "AVG")


@operator
def dilated_pool(draw):
    """Windows with holes."""
    rank = draw(st.integers(1, 2))
    sizes = shape_of(draw, rank, rank)
    window = [draw(st.integers(1, min(3, n))) for n in sizes]
    rates = [
        draw(st.integers(1, max(1, min(3, (n - 1) // max(1, w - 1)))))
        for n, w in zip(sizes, window, strict=True)
    ]
    kind = draw(st.sampled_from(["MAX", "AVG"]))
    return of_shape(
        f"tf.nn.pool(x, {window}, {kind!r}, None, 'VALID', dilations={rates})",
        (draw(st.integers(1, 4)), *sizes, draw(st.integers(1, 4))),
        formats=(),
        spatial=True,
    )


@operator
def adaptive_pool(draw):
    """Windows of sizes that differ, one after the other."""
    size, to, batch, channels = shape_of(draw, 4, 4)
    to = min(to, size)
    cuts = [(i * size // to, -(-(i + 1) * size // to)) for i in range(to)]
    name = draw(st.sampled_from(["max", "mean"]))
    parts = ", ".join(f"tf.reduce_{name}(x[:, {a}:{b}], 1)" for a, b in cuts)
    return of_shape(f"tf.stack([{parts}], 1)", (batch, size, channels), spatial=True)


@operator
def local_response_norm(draw):
    batch, rows, columns, channels = shape_of(draw, 4, 4, SMALL)
    return of_shape(
        f"tf.nn.local_response_normalization(x, {draw(st.integers(1, 3))})",
        (batch, rows, columns, channels),
        formats=(),
    )


@operator
def window_reduction(draw):
    """Windows along any dims, with holes, by any function of two elements."""
    shape = shape_of(draw)
    name = draw(st.sampled_from(["product", "sum", "minimum", "furthest"]))
    settings = []
    for n in shape:
        window = draw(st.integers(1, min(4, n)))
        hole = draw(st.integers(1, max(1, (n - 1) // max(1, window - 1))))
        settings.append((window, draw(st.integers(1, 3)), min(hole, 3)))
    window, strides, dilations = (list(of) for of in zip(*settings, strict=True))
    pads = [[draw(st.integers(0, 2)), draw(st.integers(0, 2))] for _ in shape]
    return of_shape(
        f"window_reduced(x, {window}, {strides}, {dilations}, {pads}, {name!r})",
        shape,
        eager=False,
        formats=(),
        differentiable=False,
    )
