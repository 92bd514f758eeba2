"""Rolls along split dims: border rows go to the neighbour, and nothing else moves."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import MESH, over_partitioners, specs, split

ROW = DeviceMesh(("X",), (8,))
ROWS, COLUMNS = 64, 4
ROW_BYTES = 4 * COLUMNS


def rows(count=ROWS):
    return np.arange(count * COLUMNS, dtype=np.float32).reshape(count, COLUMNS)


def moved(fn, x, partitioner, sharding):
    """The result on one device and on eight; kind and bytes of each collective."""
    program = compile_program(
        fn,
        [specs(x)],
        sharding.mesh,
        in_shardings=[sharding],
        out_shardings=sharding,
        partitioner=partitioner,
    )
    got = program.unshard(program(program.shard(x)))
    np.testing.assert_allclose(got, fn(tf.constant(x)), atol=1e-5)
    return [(collective.kind, collective.bytes) for collective in program.collectives()]


@over_partitioners
@pytest.mark.parametrize(
    ("shift", "permuted"),
    [
        (3, [3]),
        (-3, [3]),
        (67, [3]),
        (-131, [3]),
        (8, [8]),
        (16, [8]),
        (-24, [8]),
        (11, [3, 5]),
        (0, []),
        (64, []),
    ],
)
def test_only_rows_that_cross_a_border_move(shift, permuted, partitioner):
    moves = moved(
        lambda x: tf.roll(x, shift, 0) * 2.0,
        rows(),
        partitioner,
        split("X", None, mesh=ROW),
    )
    expected = [("collective-permute", ROW_BYTES * n) for n in permuted]
    assert moves == expected


@over_partitioners
@pytest.mark.parametrize(
    ("fn", "dims", "permuted"),
    [
        (lambda x: tf.roll(x, [3, 1], [0, 1]), ("X", "Y"), [12, 128]),
        (lambda x: tf.roll(x, [3, 1], [0, 0]), ("X", "Y"), [16]),
        (lambda x: tf.roll(tf.roll(x, 3, 0), -3, 0), ("X", "Y"), []),
        (lambda x: tf.roll(x, 3, 0), (["X", "Y"], None), [48]),
        (lambda x: tf.roll(x, 3, 0), ("Y", None), [48]),
        (lambda x: tf.roll(x, 3, 0), (None, "Y"), []),
        (lambda x: tf.roll(x, 1, 0) - tf.roll(x, -1, 0), ("X", "Y"), [4, 4]),
        (tf.signal.fftshift, ("X", "Y"), [128, 128]),
        (lambda x: tf.roll(x, tf.shape(x)[0] // 4, 0), ("Y", None), [256]),
        (lambda x: tf.roll(x, tf.constant(3, tf.int64), 0), ("X", "Y"), [12]),
        (lambda x: tf.cast(tf.roll(x > 7, 3, 0), tf.float32), ("X", None), [12]),
    ],
    ids=range(11),
)
def test_rolls_of_several_dims_and_axes(fn, dims, permuted, partitioner):
    moves = moved(lambda x: fn(x) + 1.0, rows(), partitioner, split(*dims))
    assert moves == [("collective-permute", n) for n in permuted]


@over_partitioners
def test_gradients_and_loops_roll_back(partitioner):
    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.sin(tf.roll(x, 5, 0)) * rows())
        gradient = tape.gradient(loss, x)

        def turn(i, y):
            return i + 1, mesh_split(tf.roll(y, 2, 0), ROW, ["X", None])

        return tf.while_loop(lambda i, _: i < 3, turn, (0, gradient))[1]

    moves = moved(fn, rows(), partitioner, split("X", None, mesh=ROW))
    assert sorted(moves) == [("collective-permute", n) for n in (32, 80, 80)]


@over_partitioners
@pytest.mark.parametrize("count", [61, 9])
@pytest.mark.parametrize("shift", [1, 3, -5, 8])
def test_uneven_rolls_gather_nothing(count, shift, partitioner):
    moves = moved(
        lambda x: tf.sin(tf.roll(x, shift, 0)),
        rows(count),
        partitioner,
        split("X", None, mesh=ROW),
    )
    assert {kind for kind, _ in moves} == {"collective-permute"}
    shard = -(-count // 8) * ROW_BYTES
    assert sum(size for _, size in moves) <= 3 * shard


@over_partitioners
def test_a_shift_that_only_the_running_program_knows(partitioner):
    program = compile_program(
        lambda x, shift: tf.roll(x, shift, 0) + 1.0,
        [tf.TensorSpec([ROWS, COLUMNS]), tf.TensorSpec([], tf.int32)],
        ROW,
        in_shardings=[split("X", None, mesh=ROW), None],
        partitioner=partitioner,
    )
    for shift in (0, 5, -70):
        got = program(*program.shard(rows(), np.int32(shift)))
        np.testing.assert_array_equal(got, np.roll(rows(), shift, 0) + 1)


def test_what_is_split_nowhere_is_cut_and_joined_once():
    program = compile_program(
        lambda x: tf.roll(x, 3, 0) + 1.0, [specs(rows())], MESH, in_shardings=[None]
    )
    np.testing.assert_array_equal(program(rows()), np.roll(rows(), 3, 0) + 1)
    assert not program.collectives()
    assert "dynamic-slice" not in program.hlo_text()


@over_partitioners
@pytest.mark.parametrize("shift", [1, 32])
def test_a_roll_that_nothing_else_reads_is_left_to_xla(shift, partitioner):
    """Though it is resharded, so that it is no permute."""

    def fn(x):
        x = mesh_split(x, MESH, ["X", None])
        return mesh_split(tf.roll(x, shift, 0), MESH, ["Y", "X"])

    x = rows()
    program = compile_program(fn, [specs(x)], MESH, partitioner=partitioner)
    np.testing.assert_array_equal(program.unshard(program(x)), np.roll(x, shift, 0))
    assert not program.repairs
