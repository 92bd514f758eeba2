"""Operators that multiply and add up: einsums, matrix products, losses."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    BOOLEANS,
    HALVES,
    SEVERAL,
    SMALL,
    SUMS,
    Input,
    Kind,
    Use,
    of_shape,
    operator,
    shape_of,
)

_COMPLEX = (*HALVES, "complex64")


def einsum(draw, equations) -> Use:
    equation = draw(st.sampled_from(equations))
    size = {c: draw(SMALL) for c in dict.fromkeys(equation) if c.isalpha()}
    operands = equation.split("->")[0].split(",")
    shapes = [[size[c] for c in operand if c.isalpha()] for operand in operands]
    names = ", ".join("xyz"[: len(shapes)])
    return of_shape(f"tf.einsum({equation!r}, {names})", *shapes, formats=_COMPLEX)


@operator
def einsum_batch(draw):
    return einsum(draw, ["bi,bj->bij", "bsd,bd->bsd", "bcs,bcd->bcsd"])


@operator
def einsum_contracting(draw):
    return einsum(draw, ["ij,jk->ik", "bsm,mh->bsh", "bsm,mnd->bsnd", "bsnd,ndm->bsm"])


@operator
def einsum_both(draw):
    return einsum(draw, ["bsnd,btnd->bnst", "bij,bjk->bik", "gsec,gsm->egcm"])


@operator
def einsum_three(draw):
    return einsum(draw, ["ij,jk,kl->il", "bi,bj,bk->bijk", "bsm,mh,bs->bh"])


@operator
def einsum_sums(draw):
    """Sums and diagonals of one operand or two."""
    return einsum(draw, ["ijk->ki", "bii->bi", "ij,kj->ik", "ij,ij->", "ij,k->ki"])


@operator
def einsum_ellipsis(draw):
    rows, inner, columns = shape_of(draw, 3, 3, SMALL)
    batch = shape_of(draw, 0, 2, SMALL)
    other = batch if draw(BOOLEANS) else [1] * len(batch)
    return of_shape(
        "tf.einsum('...ij,...jk->...ik', x, y)",
        (*batch, rows, inner),
        (*other, inner, columns),
        formats=_COMPLEX,
    )


@operator
def matmul(draw):
    """Either operand transposed, batches broadcast."""
    rows, inner, columns = shape_of(draw, 3, 3, SMALL)
    batch = shape_of(draw, 0, 2, SMALL)
    other = batch if draw(BOOLEANS) else batch[1:]
    a, b = draw(BOOLEANS), draw(BOOLEANS)
    return of_shape(
        f"tf.matmul(x, y, transpose_a={a}, transpose_b={b})",
        (*batch, *((inner, rows) if a else (rows, inner))),
        (*other, *((columns, inner) if b else (inner, columns))),
        formats=_COMPLEX,
    )


@operator
def tensordot(draw):
    a, b, c, d = shape_of(draw, 4, 4, SMALL)
    if draw(BOOLEANS):
        return of_shape("tf.tensordot(x, y, [[0, 2], [1, 0]])", (a, b, c), (c, a, d))
    return of_shape("tf.tensordot(x, y, 1)", (a, b, c), (c, d), formats=_COMPLEX)


@operator
def attention(draw):
    batch, heads, width, keys = shape_of(draw, 4, 4, SMALL)
    queries = draw(SMALL)
    return of_shape(
        "tf.einsum('bnst,btnd->bsnd', tf.nn.softmax("
        f"tf.einsum('bsnd,btnd->bnst', x, y) / {width}), z)",
        (batch, queries, heads, width),
        (batch, keys, heads, width),
        (batch, keys, heads, width),
    )


@operator
def feed_forward(draw):
    tokens, width, hidden = shape_of(draw, 3, 3)
    return of_shape(
        f"tf.nn.silu(x @ y / {width}) @ z / {hidden}",
        (tokens, width),
        (width, hidden),
        (hidden, width),
    )


@operator
def integer_products(draw):
    rows, inner, columns = shape_of(draw, 3, 3, SMALL)
    dtype = draw(st.sampled_from(["int32", "int64"]))
    x, y = Input((rows, inner), dtype=dtype), Input((inner, columns), dtype=dtype)
    return Use("x @ y", {"x": x, "y": y})


# Norms and losses.


@operator
def batch_norm(draw):
    *sizes, channels = shape_of(draw, 4, 4, SMALL)
    shape = (*sizes, channels)
    training = draw(BOOLEANS)
    moments = "" if training else ", mean=y, variance=tf.abs(z) + 1"
    return of_shape(
        f"tf.compat.v1.nn.fused_batch_norm(x, y, z{moments}, epsilon=0.1, "
        f"is_training={training})[:{3 if training else 1}]",
        shape,
        (channels,),
        (channels,),
        formats=(),
    )


@operator
def group_norm(draw):
    batch, rows, columns, groups, each = shape_of(draw, 5, 5, SMALL)
    grouped = f"tf.reshape(x, {[batch, rows, columns, groups, each]})"
    return of_shape(
        f"tf.reshape(tf.math.l2_normalize({grouped}, [1, 2, 4], 0.1), tf.shape(x)) * y",
        (batch, rows, columns, groups * each),
        (groups * each,),
    )


@operator
def cross_entropy(draw):
    shape = shape_of(draw, 2, 3)
    kind = draw(st.sampled_from(["softmax", "sigmoid"]))
    labels = "tf.nn.softmax(y)" if kind == "softmax" else "tf.sigmoid(y)"
    return of_shape(
        f"tf.nn.{kind}_cross_entropy_with_logits(labels={labels}, logits=x)",
        shape,
        shape,
        formats=(),
    )


@operator
def sparse_cross_entropy(draw):
    *shape, classes = shape_of(draw, 2, 3)
    return Use(
        "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=i, logits=x)",
        {
            "x": Input((*shape, classes)),
            "i": Input(tuple(shape), Kind.INDEX, classes),
        },
    )


@operator
def picked_logits(draw):
    """Cross entropy as the logarithm of a sum less one logit."""
    tokens, classes = draw(SEVERAL), draw(SEVERAL)
    return Use(
        "tf.reduce_logsumexp(x, -1) - tf.gather(x, i, batch_dims=1)",
        {"x": Input((tokens, classes)), "i": Input((tokens,), Kind.INDEX, classes)},
        formats=SUMS[:2],
    )
