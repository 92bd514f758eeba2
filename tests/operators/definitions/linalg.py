"""Linear algebra and Fourier transforms."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.operators.definitions.use import (
    BOOLEANS,
    SMALL,
    Input,
    Use,
    of_shape,
    operator,
    shape_of,
)

# Iterations that end at a tolerance of their own.
_ITERATED = 1e-4


def fourier(draw, name: str, rank: int) -> Use:
    *batch, sizes = shape_of(draw, 0, 2, SMALL), shape_of(draw, rank, rank)
    shape = (*batch[0], *sizes)
    return Use(f"tf.signal.{name}(x)", {"x": Input(shape, dtype="complex64")})


@operator
def fft(draw):
    return fourier(draw, draw(st.sampled_from(["fft", "ifft"])), 1)


@operator
def fft2d(draw):
    return fourier(draw, draw(st.sampled_from(["fft2d", "ifft2d"])), 2)


@operator
def fft3d(draw):
    return fourier(draw, "fft3d", 3)


@operator
def rfft(draw):
    name, rank = draw(st.sampled_from([("rfft", 1), ("rfft2d", 2)]))
    shape = (*shape_of(draw, 0, 1), *shape_of(draw, rank, rank))
    return of_shape(f"tf.signal.{name}(x)", shape, formats=())


@operator
def irfft(draw):
    *batch, half = shape_of(draw, 1, 2)
    length = max(1, 2 * (half - 1) + draw(st.integers(0, 1)))
    half_input = Input((*batch, half), dtype="complex64")
    return Use(f"tf.signal.irfft(x, [{length}])", {"x": half_input})


def square(draw) -> tuple[tuple[int, ...], int]:
    size = draw(SMALL)
    return (*shape_of(draw, 0, 1), size, size), size


def of_matrix(draw, expression: str, **kwargs) -> Use:
    """Of a matrix whose diagonal prevails."""
    shape, size = square(draw)
    made = f"(x + {2 * size + 1} * tf.eye({size}))"
    return of_shape(expression.format(made), shape, formats=(), **kwargs)


@operator
def cholesky(draw):
    shape, size = square(draw)
    made = f"tf.matmul(x, x, transpose_b=True) / {size} + tf.eye({size})"
    return of_shape(f"tf.linalg.cholesky({made})", shape, formats=())


@operator
def triangular_solve(draw):
    shape, size = square(draw)
    lower, adjoint = draw(BOOLEANS), draw(BOOLEANS)
    return of_shape(
        f"tf.linalg.triangular_solve(x / {size} + 2 * tf.eye({size}), y, "
        f"lower={lower}, adjoint={adjoint})",
        shape,
        (*shape[:-1], draw(SMALL)),
        formats=(),
    )


@operator
def qr(draw):
    *batch, rows, columns = shape_of(draw, 2, 3, SMALL)
    shape = (*batch, max(rows, columns), min(rows, columns))
    return of_shape(
        "tf.linalg.qr(x)", shape, eager=False, formats=(), tolerance=_ITERATED
    )


@operator
def inverse(draw):
    return of_matrix(draw, "tf.linalg.inv({})")


@operator
def log_determinant(draw):
    shape, size = square(draw)
    made = f"tf.matmul(x, x, transpose_b=True) / {size} + tf.eye({size})"
    return of_shape(f"tf.linalg.logdet({made})", shape, formats=())


@operator
def solve(draw):
    shape, size = square(draw)
    return of_shape(
        f"tf.linalg.solve(x + {2 * size + 1} * tf.eye({size}), y)",
        shape,
        (*shape[:-1], draw(SMALL)),
        formats=(),
    )


@operator
def eigenvalues(draw):
    shape, size = square(draw)
    made = f"x / {size} + tf.linalg.matrix_transpose(x) / {size}"
    return of_shape(
        f"tf.linalg.eigvalsh({made})", shape, formats=(), tolerance=_ITERATED
    )


@operator
def singular_values(draw):
    shape = shape_of(draw, 2, 3, SMALL)
    rows, columns = shape[-2:]
    # Of a matrix with equal ones, or zeros, they have no gradient.
    apart = f"2 * tf.eye({rows}, {columns}) * tf.range(1.0, {columns + 1})"
    return of_shape(
        f"tf.linalg.svd(x / 16 + {apart}, compute_uv=False)",
        shape,
        formats=(),
        tolerance=_ITERATED,
    )


@operator
def trace(draw):
    shape, _ = square(draw)
    return of_shape("tf.linalg.trace(x)", shape)


@operator
def tridiagonal_solve(draw):
    size, columns = shape_of(draw, 2, 2)
    diagonals = f"x / 4 + tf.constant([[0.0], [4.0], [0.0]]) * tf.ones([3, {size}])"
    return of_shape(
        f"tf.linalg.tridiagonal_solve({diagonals}, y, partial_pivoting=False)",
        (3, size),
        (size, columns),
        formats=(),
    )
