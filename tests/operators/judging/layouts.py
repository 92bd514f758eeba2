"""Single operators at sizes that all axes divide, for any layout of every tensor.

Random operators seldom meet what several axes do to one op. These are drawn by
`make matrix LAYOUTS=1`: one use of each, some layouts in a program.
"""

from __future__ import annotations

from tests.operators.definitions.use import Input, Kind, Use

_N = (8, 8)
_CUBE = (8, 8, 8)
_IMAGE = (2, 8, 8, 4)


def _of(expression: str, *shapes: tuple[int, ...], indices=None, below=8, **flags):
    inputs = {name: Input(shape) for name, shape in zip("xyz", shapes, strict=False)}
    if indices:
        inputs["i"] = Input(indices, Kind.INDEX, below)
    return Use(expression, inputs, **{"differentiable": False, **flags})


_PRODUCTS = {
    equation: _of(f"tf.einsum({equation!r}, x, y)", *shapes)
    for equation, *shapes in [
        ("ij,jk->ik", _N, _N),
        ("ij,kj->ik", _N, _N),
        ("bij,bjk->bik", _CUBE, _CUBE),
        ("bij,jk->bik", _CUBE, _N),
        ("bi,bj->bij", _N, _N),
        ("bj,bj->b", _N, _N),
        ("ij,ij->", _N, _N),
        ("i,j->ij", _N[:1], _N[:1]),
    ]
}
_READING = {
    "rows": _of("tf.gather(x, i)", _N, indices=_N),
    "rows of a narrow table": _of("tf.gather(x, i)", (8, 2), indices=(8, 4)),
    "rows of an uneven table": _of("tf.gather(x, i)", (7, 6), indices=(8,), below=7),
    "columns": _of("tf.gather(x, i, axis=1)", _N, indices=_N),
    "embedding of a batch": _of("tf.gather(x, i)", _N, indices=_CUBE),
    "inner dim": _of("tf.gather(x, i, axis=1)", _CUBE, indices=_N),
    "batches": _of("tf.gather(x, i, batch_dims=1)", _CUBE, indices=_CUBE),
    "batches of numbers": _of("tf.gather(x, i, batch_dims=1)", _N, indices=_CUBE),
    "points": _of("tf.gather_nd(x, i)", _CUBE, indices=(8, 8, 2)),
    "rows by one coordinate": _of("tf.gather_nd(x, i)", _N, indices=(8, 8, 1)),
}
_WRITING = {
    "segment sum": _of("tf.math.unsorted_segment_sum(x, i, 8)", _N, indices=_N),
    "segment sum of rows": _of(
        "tf.math.unsorted_segment_sum(x, i, 8)", (8, 8, 4), indices=_N
    ),
    "segment maximum": _of(
        "tf.maximum(tf.math.unsorted_segment_max(x, i, 8), -9)", _N, indices=_N
    ),
    "add rows": _of("tf.tensor_scatter_nd_add(x, i, y)", _N, _N, indices=(8, 1)),
    "add at points": _of(
        "tf.tensor_scatter_nd_add(x, i, y)", _CUBE, _N, indices=(8, 2)
    ),
    "add uneven rows": _of(
        "tf.tensor_scatter_nd_add(x, i, y)", (7, 5), (8, 5), indices=(8, 1), below=7
    ),
}
_MOVING = {
    expression: _of(expression, *shapes)
    for expression, *shapes in [
        ("tf.reshape(x, [64])", _N),
        ("tf.reshape(x, [4, 16])", _N),
        ("tf.reshape(x, [2, 4, 8])", _N),
        ("tf.reshape(x, [8, 8])", (2, 4, 8)),
        ("tf.reshape(x, [6, 10])", (4, 15)),
        ("tf.reshape(x, [3, 4, 5])", (12, 5)),
        ("tf.transpose(x, [1, 2, 0])", (8, 4, 8)),
        ("tf.reverse(x, [0])", _N),
        ("tf.reverse(x, [0, 1])", (7, 5)),
        ("tf.pad(x, [[1, 2], [0, 3]])", (7, 8)),
        ("tf.pad(x, [[1, 2], [2, 3]], 'REFLECT')", (7, 8)),
        ("tf.concat([x, y], 0)", _N, _N),
        ("tf.concat([x, y], 1)", (8, 3), (8, 6)),
        ("x[1:7, 2:8]", _N),
        ("x[2:6]", _N),
        ("x[1:5] + x[3:7]", _N),
        ("updated(x, [2, 0], [6, 8], y)", _N, (4, 8)),
        ("tf.roll(x, 3, 0)", _N),
        ("[tf.roll(x, 1, 0), tf.identity(x)]", _N),
        ("[x[:7], x[1:]]", _N),
        ("[x[0:3], x[0:6], tf.identity(x)]", _N),
        ("tf.roll(x, [1, 4], [0, 1])", _N),
        ("tf.tile(x, [2, 1])", _N),
        ("tf.stack([x, y], 1)", _N, _N),
        ("tf.unstack(x, axis=1)", (8, 4, 8)),
        ("tf.broadcast_to(x[:, None], [8, 4, 8])", _N),
        ("tf.linalg.band_part(x, 1, 2)", _N),
        ("tf.linalg.diag(x)", _N),
        ("tf.linalg.diag_part(x)", (4, 8, 8)),
        ("tf.nn.depth_to_space(x, 2)", (2, 4, 4, 8)),
        ("tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])", (2, 4, 4, 8)),
    ]
}
_ALONG = {
    expression: _of(expression, *shapes)
    for expression, *shapes in [
        ("tf.sort(x, 0)", _N),
        ("tf.sort(x, -1)", (4, 6, 8)),
        ("tf.argsort(x, -1, stable=True)", _N),
        ("tf.math.top_k(x, 3)", _N),
        ("tf.cumsum(x, 0)", _N),
        ("tf.cumsum(x, 1, exclusive=True, reverse=True)", (8, 7)),
        ("tf.reduce_sum(x, 1)", (8, 4, 8)),
        ("tf.reduce_max(x, [0, 2])", (8, 4, 8)),
        ("tf.argmax(x, 0)", _N),
        ("tf.nn.softmax(x)", _N),
        ("tf.reduce_sum(x[:, :, None] * x[:, None, :], 0)", (4, 8)),
        ("tf.abs(tf.signal.fft(tf.cast(x, tf.complex64)))", (2, 3, 64)),
        ("tf.abs(tf.signal.rfft(x))", (8, 4, 8)),
        ("tf.linalg.cholesky(tf.matmul(x, x, transpose_b=True) + tf.eye(8))", _CUBE),
    ]
}
_WINDOWS = {
    expression: _of(expression, *shapes, differentiable=True, eager=False)
    for expression, *shapes in [
        ("tf.nn.conv2d(x, y, 1, 'SAME')", _IMAGE, (3, 3, 4, 4)),
        ("tf.nn.conv2d(x, y, 2, 'SAME')", _IMAGE, (3, 3, 4, 4)),
        ("tf.nn.conv2d(x, y, 1, 'VALID')", _IMAGE, (1, 1, 4, 8)),
        ("tf.nn.conv1d(x, y, 1, 'SAME')", (4, 8, 4), (3, 4, 4)),
        ("tf.nn.depthwise_conv2d(x, y, [1, 1, 1, 1], 'SAME')", _IMAGE, (3, 3, 4, 2)),
        ("tf.nn.avg_pool2d(x, 2, 2, 'SAME')", _IMAGE),
        ("tf.nn.max_pool2d(x, 3, 2, 'SAME')", _IMAGE),
        ("tf.nn.max_pool2d(x, 2, 1, 'SAME')", _IMAGE),
    ]
}
_OTHER = {
    "moving slice": _of("tf.slice(x, i, [4, 3])", _N, indices=(2,), below=4),
    "slice out of range": _of(
        "sliced(x, i, [4, 3])", _N, indices=(2,), below=24, eager=False
    ),
    "update out of range": _of(
        "written(x, y, i)", _N, (4, 3), indices=(2,), below=24, eager=False
    ),
    "one hot": _of("tf.one_hot(i, 8)", indices=_CUBE),
    "chosen": _of("tf.where(x > y, x, y)", _N, _N),
    "positions": _of("x + tf.range(8, dtype=tf.float32)[:, None]", _N),
}
_EMPTY = {
    f"{expression} of nothing": _of(expression, *shapes, differentiable=True)
    for expression, *shapes in [
        ("tf.nn.conv2d(x, y, 1, 'SAME')", (0, 8, 8, 4), (3, 3, 4, 4)),
        ("tf.nn.max_pool2d(x, 2, 1, 'SAME')", (0, 8, 8, 4)),
        ("tf.matmul(x, y)", (0, 8), _N),
        ("tf.einsum('ij,jk->ik', x, y)", (8, 0), (0, 8)),
        ("tf.concat([x, y], 0)", (0, 8), _N),
        ("tf.transpose(tf.reshape(x, [8, 2, 0]))", (0, 8, 2)),
    ]
}
LAYOUTS: dict[str, Use] = {
    **_PRODUCTS,
    **_READING,
    **_WRITING,
    **_MOVING,
    **_ALONG,
    **_WINDOWS,
    **_OTHER,
    **_EMPTY,
}
