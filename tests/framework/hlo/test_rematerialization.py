"""Gathers in full on every device, and which of them an annotation asks for."""

import pytest
import tensorflow as tf

from meshwright.framework.compiler.explaining.explain import explain
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.completion import complete
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split, replicate
from tests.framework.compiler.programs import MESH, over_partitioners, split

N, D = 64, 32
WHOLE = (N, D)
ROWS, COLUMNS = ("X", None), (None, "X")


def matrices(x):
    """[64, 4, 4], positive."""
    return tf.einsum("bi,bj->bij", x[:, :4], x[:, :4]) + 4 * tf.eye(4)


def fft(x, i):
    return tf.abs(tf.signal.fft(tf.cast(x, tf.complex64)))


def in_a_loop(x, i):
    def body(j, y):
        return j + 1, mesh_split(fft(y, i), MESH, ROWS)

    return tf.while_loop(lambda j, _: j < 3, body, (0, x))[1]


def ring_of_products(x, i):
    """Each device multiplies its rows with all of them: its part of the work."""
    return x @ tf.transpose(x)


# fn(x, i), how x arrives and the result leaves, what is gathered in full.
GATHERED = {
    "roll by a number of the user's": (lambda x, i: tf.roll(x, i, 0), ROWS, (2 * N, D)),
    "slice from an index": (lambda x, i: tf.slice(x, [i, 0], [32, D]), ROWS, WHOLE),
    "fft over rows": (fft, ROWS, WHOLE),
    "fft over what is split": (fft, COLUMNS, WHOLE),
    "fft in a loop": (in_a_loop, ROWS, WHOLE),
    "running sum": (lambda x, i: tf.cumsum(x, 0), ROWS, WHOLE),
    "reshape of columns": (lambda x, i: tf.reshape(x, [D, N]), COLUMNS, WHOLE),
    "moved to other dim": (
        lambda x, i: mesh_split(tf.tanh(x), MESH, [None, "Y"]) * 2.0,
        ROWS,
        WHOLE,
    ),
}
ONLY_GSPMD = {
    "cholesky": (lambda x, i: tf.linalg.cholesky(matrices(x)), (N, 4, 4)),
    "triangular solve": (
        lambda x, i: tf.linalg.triangular_solve(matrices(x), tf.ones([N, 4, 4])),
        (N, 4, 4),
    ),
}
LEFT_SPLIT = {
    "concat": lambda x, i: tf.concat([x, x * 2], 0),
    "pad": lambda x, i: tf.pad(x, [[3, 5], [0, 0]]),
    "reverse": lambda x, i: tf.reverse(x, [0]),
    "reshape": lambda x, i: tf.reshape(x, [N // 4, 4, D]),
    "steps": lambda x, i: x[::2],
    "sort": lambda x, i: tf.sort(x, 0),
    "top_k": lambda x, i: tf.math.top_k(x, 4)[0],
    "roll": lambda x, i: tf.roll(x, 3, 0),
    "gather of rows": lambda x, i: tf.gather(x, (tf.range(N) * 7 + i) % N),
    "gather of columns": lambda x, i: tf.gather(x, (tf.range(N) + i) % D, axis=1),
    "scatter": lambda x, i: tf.scatter_nd((tf.range(N)[:, None] + i) % N, x, [N, D]),
    "windows": lambda x, i: tf.nn.max_pool1d(x[None], 3, 2, "SAME")[0],
    "repeat": lambda x, i: tf.repeat(x, 3, 0),
    "sum": lambda x, i: x / tf.reduce_sum(x, 0),
    "product with all rows": ring_of_products,
}
ASKED = {
    "replicated": lambda x, i: replicate(tf.tanh(x)) * 2.0,
    "whole before a sort": lambda x, i: tf.sort(replicate(tf.exp(tf.tanh(x))), 0),
    "whole after an fft": lambda x, i: replicate(fft(x, i)) * 2.0,
}


def remats(fn, arrives, leaves, partitioner):
    program = compile_program(
        fn,
        [tf.TensorSpec([N, D]), tf.TensorSpec([], tf.int32)],
        MESH,
        in_shardings=[split(*arrives), None],
        out_shardings=leaves,
        partitioner=partitioner,
    )
    return complete(program.unpartitioned).rematerializations()


@over_partitioners
@pytest.mark.parametrize("name", GATHERED)
def test_gathers_without_an_annotation(name, partitioner):
    fn, dims, shape = GATHERED[name]
    leaves = split(None, "Y") if name == "moved to other dim" else split(*dims)
    (remat,) = remats(fn, dims, leaves, partitioner)
    assert remat.shape == shape
    assert remat.bytes == shape[0] * shape[1] * (8 if "fft" in name else 4)
    again = name in ("running sum", "reshape of columns", "moved to other dim")
    assert remat.alike is not again


@pytest.mark.parametrize("name", ONLY_GSPMD)
def test_factors_of_split_matrices(name):
    fn, shape = ONLY_GSPMD[name]
    leaves = split("X", None, None)
    assert not remats(fn, ROWS, leaves, Partitioner.SHARDY)
    gathered = remats(fn, ROWS, leaves, Partitioner.GSPMD)
    assert shape in {remat.shape for remat in gathered}


@over_partitioners
@pytest.mark.parametrize("name", LEFT_SPLIT)
def test_nothing_is_said_of_what_stays_split(name, partitioner):
    assert remats(LEFT_SPLIT[name], ROWS, None, partitioner) == []


@over_partitioners
@pytest.mark.parametrize("leaves", [None, ROWS, COLUMNS])
@pytest.mark.parametrize("name", ASKED)
def test_what_an_annotation_replicates_is_not_listed(name, leaves, partitioner):
    leaves = leaves and split(*leaves)
    assert remats(ASKED[name], ROWS, leaves, partitioner) == []


@over_partitioners
def test_a_result_that_leaves_replicated_is_not_listed(partitioner):
    assert remats(lambda x, i: tf.tanh(x), ROWS, split(None, None), partitioner) == []


@over_partitioners
def test_a_weight_gathered_for_a_product_is_what_layouts_ask_for(partitioner):
    """Each device multiplies its part of the batch."""

    def fn(weight, i):
        batch = tf.cast(tf.reshape(tf.range(D * N), [D, N]) + i, tf.float32)
        return mesh_split(mesh_split(batch, MESH, ROWS) @ weight, MESH, ROWS)

    assert remats(fn, COLUMNS, None, partitioner) == []


def test_the_text_says_that_all_do_the_same():
    program = compile_program(
        lambda x: fft(x, None),
        [tf.TensorSpec([N, D])],
        MESH,
        in_shardings=[split(*ROWS)],
        out_shardings=split(*ROWS),
    )
    lines = str(explain(program)).splitlines()
    at = lines.index(
        "Gathered in full on every device, without an annotation that asks for it:"
    )
    assert lines[at + 1].startswith("  16.0 KiB c64[64,32] Cast (")
    assert lines[at + 2].startswith("      every device does all of FFT (")
    assert "test_rematerialization.py" in lines[at + 2]
