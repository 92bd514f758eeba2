"""Scatters of few rows into a split table: rows move, the table does not."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.compiler.programs import MESH, over_partitioners, specs

V, M, K = 64, 8, 8
TABLE = np.random.RandomState(0).randn(V, M).astype(np.float32)
INDICES = np.array([3, 60, 7, 8, 31, 12, 45, 0], np.int32)
ROWS = np.random.RandomState(1).randn(K, M).astype(np.float32)
TWICE = np.array([3, 60, 7, 7, 31, 12, 45, 7], np.int32)


def update(table, i, rows):
    return tf.tensor_scatter_nd_update(table, i[:, None], rows)


def add(table, i, rows):
    return tf.tensor_scatter_nd_add(table, i[:, None], rows)


def segments(table, i, rows):
    return table + tf.math.unsorted_segment_sum(rows, i, V)


def gradient_of_gather(table, i, rows):
    with tf.GradientTape() as tape:
        tape.watch(table)
        loss = tf.reduce_sum(tf.gather(table, i) * rows)
    return table - 0.1 * tf.convert_to_tensor(tape.gradient(loss, table))


def laid_out(fn, args, table, rows, partitioner):
    """The program, whose result is right."""
    texts = (table, f"[{rows}]", f"[{rows},_]")
    shardings = [Sharding.parse(MESH, text) for text in texts]
    program = compile_program(
        fn,
        [specs(arg) for arg in args],
        MESH,
        in_shardings=shardings,
        out_shardings=shardings[0],
        partitioner=partitioner,
    )
    result = program.unshard(program(*program.shard(*args)))
    np.testing.assert_allclose(result, fn(*map(tf.constant, args)), 1e-5, 1e-5)
    return program


@over_partitioners
@pytest.mark.parametrize("split", ["X", "Y", "X.Y"])
@pytest.mark.parametrize("table", ["[X,_]", "[X.Y,_]", "[Y,_]"])
@pytest.mark.parametrize("fn", [update, add, segments, gradient_of_gather])
def test_rows_are_gathered_and_no_table(fn, table, split, partitioner):
    args = TABLE, INDICES if fn is update else TWICE, ROWS
    program = laid_out(fn, args, table, split, partitioner)
    collectives = program.collectives()
    assert {collective.kind for collective in collectives} == {"all-gather"}
    assert sum(c.bytes for c in collectives) == args[1].nbytes + ROWS.nbytes


@over_partitioners
def test_columns_stay_split(partitioner):
    program = laid_out(add, (TABLE, TWICE, ROWS), "[X,Y]", "Y", partitioner)
    kinds = {collective.kind: collective.bytes for collective in program.collectives()}
    assert kinds == {"all-gather": TWICE.nbytes, "all-to-all": ROWS.nbytes // 4}
