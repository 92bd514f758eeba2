"""The operators whose windows move along dims, and need halos where these are split."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.operators.use import (
    BOOLEANS,
    SIZES,
    SMALL,
    Use,
    of_shape,
    operator,
    shape_of,
)


def split_of_windows(rank: int, grouped: bool = False) -> dict[str, Any]:
    """What of a convolution no axis may split, but for halos."""
    image, kernel = tuple(range(1, rank + 1)), tuple(range(rank))
    if grouped:
        image = kernel = tuple(range(rank + 2))
    return {"unsplit": {"x": image, "y": kernel, "result": image}, "halo": True}


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
    padding, low = draw(st.sampled_from(paddings(draw, sizes, covered)))
    # Elements that only windows of padding would read, if these came first.
    beyond = [n - (c - 1) for n, c in zip(low, covered, strict=True)]
    whole = [1 + d for d, n in enumerate(beyond) if n > 0 and n % strides[d]]
    return of_shape(
        f"tf.nn.conv{rank}d(x, y, {by}, {padding}, dilations={apart})",
        (batch, *sizes, groups * per_group),
        (*window, per_group, groups * features),
        # On CPU TF lacks gradients for groups and dilations, and gets some wrong.
        eager=groups == 1
        and dilations == [1] * rank
        and all(s <= w for s, w in zip(strides, window, strict=True)),
        whole=tuple(whole),
        product=max(window) == 1,
        **split_of_windows(rank, grouped=groups > 1),
    )


def paddings(draw, sizes, covered) -> list[tuple[str, list[int]]]:
    """Those that TF has for these sizes and what a window covers of them.

    With what is known to precede each dim.
    """
    found = [("'SAME'", [0] * len(sizes))]
    if all(c <= n for c, n in zip(covered, sizes, strict=True)):
        found.append(("'VALID'", [0] * len(sizes)))
    if len(sizes) == 2:
        low = [draw(st.integers(0, 3)) for _ in sizes]
        high = [
            max(draw(st.integers(0, 3)), c - n)
            for c, n in zip(covered, sizes, strict=True)
        ]
        explicit = [[0, 0], [low[0], high[0]], [low[1], high[1]], [0, 0]]
        found.append((str(explicit), low))
    return found


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
        product=max(window) == 1,
        **split_of_windows(rank),
    )


@operator
def conv2d_transpose(draw):
    return transposed(draw, 2)


@operator
def conv3d_transpose(draw):
    return transposed(draw, 3)


def pool(draw, kind: str) -> Use:
    rank = draw(st.integers(1, 3))
    sizes = shape_of(draw, rank, rank, SIZES if rank < 3 else SMALL)
    window = [draw(st.integers(1, min(4, n))) for n in sizes]
    strides = [draw(st.integers(1, min(3, w))) for w in window]  # TF: no larger.
    padding = draw(st.sampled_from(["SAME", "VALID"]))
    overlapping = tuple(
        1 + i for i, (w, s) in enumerate(zip(window, strides, strict=True)) if s < w
    )
    unsplit = {"x": overlapping, "result": overlapping} if kind == "MAX" else {}
    return of_shape(
        f"tf.nn.pool(x, {window}, {kind!r}, {strides}, {padding!r})",
        (draw(st.integers(1, 4)), *sizes, draw(st.integers(1, 4))),
        unsplit=unsplit,
    )


@operator
def max_pool(draw):
    return pool(draw, "MAX")


@operator
def avg_pool(draw):
    return pool(draw, "AVG")
