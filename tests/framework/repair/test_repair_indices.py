"""Scatters and gathers that lie as XLA gets them right are left alone."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import MESH, over_partitioners, specs

RNG = np.random.default_rng(0)
STEPS, ROWS, COLUMNS = 4, 64, 8
TABLE = RNG.standard_normal([STEPS, COLUMNS]).astype(np.float32)
ROW = RNG.standard_normal([1, COLUMNS]).astype(np.float32)


def compiled(fn, args, partitioner):
    """The result, what TF makes of it, and the repairs by name."""
    program = compile_program(fn, map(specs, args), MESH, partitioner=partitioner)
    got = program.unshard(program(*args))
    repairs = [repair.fault.name for repair in program.repairs]
    return got, fn(*map(tf.constant, args)).numpy(), repairs


@over_partitioners
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ([None, "X"], []),
        ([None, ("X", "Y")], []),
        (["X", None], ["scatter of a single index"]),
        (["X", "Y"], ["scatter of a single index"]),
    ],
)
def test_a_row_split_by_columns_is_written_as_it_is(split, expected, partitioner):
    """As loops write the rows of a step, of batches that are split."""

    def write(table, step, row):
        table = mesh_split(table, MESH, split)
        row = mesh_split(row, MESH, [None, split[1]])
        written = tf.tensor_scatter_nd_update(table, step, row)
        return mesh_split(written, MESH, split)

    args = TABLE, np.array([[2]], np.int32), ROW
    got, want, repairs = compiled(write, args, partitioner)
    np.testing.assert_array_equal(got, want)
    assert repairs == expected


def add(table, i, rows):
    return tf.tensor_scatter_nd_add(table, i[:, None], rows)


def read(table, i, rows):
    return tf.gather(table, i) + rows


def gradient(table, i, rows):
    with tf.GradientTape() as tape:
        tape.watch(table)
        loss = tf.reduce_sum(tf.gather(table, i) * rows)
    return tf.convert_to_tensor(tape.gradient(loss, table))


@over_partitioners
@pytest.mark.parametrize("fn", [add, read, gradient])
@pytest.mark.parametrize(
    ("of_table", "of_rows"), [(["X", "Y"], ["X", "Y"]), ([None, "X"], ["X", None])]
)
def test_a_table_and_its_indices_may_be_split_alike(of_table, of_rows, fn, partitioner):
    """The table by rows; or by columns, if what is read of it is as the indices."""

    def split(table, i, rows):
        table = mesh_split(table, MESH, of_table)
        rows = mesh_split(rows, MESH, of_rows)
        result = fn(table, mesh_split(i, MESH, ["X"]), rows)
        return mesh_split(result, MESH, of_rows if fn is read else of_table)

    args = (
        RNG.standard_normal([STEPS, COLUMNS]).astype(np.float32),
        RNG.integers(0, STEPS, ROWS).astype(np.int32),
        RNG.standard_normal([ROWS, COLUMNS]).astype(np.float32),
    )
    got, want, repairs = compiled(split, args, partitioner)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not repairs


CUBE = DeviceMesh(("data", "fsdp", "tensor"), (2, 2, 2))
BOTH = ("data", "fsdp")


@over_partitioners
@pytest.mark.parametrize(
    ("of_table", "of_indices", "of_result"),
    [
        (["tensor", "fsdp"], [BOTH, None], [BOTH, None, None]),
        (["tensor", "fsdp"], [BOTH, None], [BOTH, None, "tensor"]),
        (["tensor", None], [BOTH, None], [BOTH, None, None]),
        ([None, "tensor"], [BOTH, None], [BOTH, None, "tensor"]),
        (["tensor", "fsdp"], ["data", None], ["data", None, "fsdp"]),
        (["tensor", "fsdp"], ["data", "fsdp"], ["data", "fsdp", None]),
    ],
)
def test_embeddings_over_three_axes_stay_as_they_are(
    of_table, of_indices, of_result, partitioner
):
    def embed(table, indices):
        with tf.GradientTape() as tape:
            tape.watch(table)
            rows = tf.gather(
                mesh_split(table, CUBE, of_table),
                mesh_split(indices, CUBE, of_indices),
            )
            rows = mesh_split(rows, CUBE, of_result)
            loss = tf.reduce_sum(rows**2)
        return rows, tf.convert_to_tensor(tape.gradient(loss, table))

    args = RNG.integers(-3, 4, [64, 8]).astype(np.float32), np.arange(32).reshape(8, 4)
    program = compile_program(embed, map(specs, args), CUBE, partitioner=partitioner)
    got = program.unshard(program(*args))
    for result, want in zip(got, embed(*map(tf.constant, args)), strict=True):
        np.testing.assert_array_equal(result, want)
    assert not [repair for repair in program.repairs if repair.is_costly]


@over_partitioners
def test_an_axis_of_size_1_changes_nothing(partitioner):
    """A gather over two axes, which XLA gets right, over a mesh of three."""
    mesh = DeviceMesh(("X", "Y", "Z"), (4, 2, 1))

    def fn(table, indices):
        table = mesh_split(table, mesh, ["X", None])
        indices = mesh_split(indices, mesh, ["X", None])
        return mesh_split(tf.gather(table, indices), mesh, ["Y", None, None])

    args = RNG.integers(-3, 4, [8, 8]).astype(np.float32), np.arange(64).reshape(8, 8)
    args = args[0], (args[1] % 8).astype(np.int32)
    program = compile_program(fn, map(specs, args), mesh, partitioner=partitioner)
    np.testing.assert_array_equal(program.unshard(program(*args)), args[0][args[1]])
    assert not program.repairs
