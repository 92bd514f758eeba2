"""Scatters of few rows into a split table: rows move, the table does not."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.hlo_text import HloModule
from meshwright.framework.compiler.jax_bridge import (
    bytecode,
    lower_for_mesh,
    neutral_module,
)
from meshwright.framework.compiler.lower import lower
from meshwright.framework.compiler.program import Partitioner
from meshwright.framework.compiler.report import collectives_of
from meshwright.framework.compiler.scatter_layout import (
    Scatter,
    lay_out_scatter,
    scatter_layout,
    scatter_of,
)
from meshwright.framework.compiler.stable_hlo import walk
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.programs import MESH, over_partitioners, specs

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


def laid_out(fn, args, table, split, partitioner):
    """The result, and bytes of the collectives, of a scatter in its layout."""
    texts = (table, f"[{split}]", f"[{split},_]")
    shardings = [Sharding.parse(MESH, text) for text in texts]
    lowered = lower(fn, [specs(one) for one in args], name="scatter")
    with neutral_module(lowered) as module:
        (op,) = (o for o in walk(module.operation) if o.name == "stablehlo.scatter")
        scatter = scatter_of(op)
        index = Sharding.parse(MESH, f"[{split},_]")
        if len(scatter.indices) == 1:
            index = shardings[1]
        layout = scatter_layout(scatter, index, shardings[2], shardings[0])
        lay_out_scatter(op, MESH, layout)
        lowered = dataclasses.replace(lowered, rewritten=bytecode(module))
    program = lower_for_mesh(
        lowered,
        MESH,
        in_shardings=shardings,
        out_shardings=shardings[:1],
        donate=(),
        shardy=partitioner is Partitioner.SHARDY,
    ).compile()
    (result,) = program(*args)
    found = collectives_of(HloModule(program.as_text()), MESH)
    return np.asarray(result), layout, found


@over_partitioners
@pytest.mark.parametrize("split", ["X", "Y", "X.Y"])
@pytest.mark.parametrize("table", ["[X,_]", "[X.Y,_]", "[Y,_]"])
@pytest.mark.parametrize("fn", [update, add, segments, gradient_of_gather])
def test_rows_are_gathered_and_no_table(fn, table, split, partitioner):
    args = TABLE, INDICES if fn is update else TWICE, ROWS
    result, layout, found = laid_out(fn, args, table, split, partitioner)
    np.testing.assert_allclose(result, fn(*map(tf.constant, args)), 1e-5, 1e-5)
    assert layout.bytes == args[1].nbytes + ROWS.nbytes
    assert {one.kind for one in found} == {"all-gather"}
    assert sum(one.bytes for one in found) == layout.bytes


@over_partitioners
def test_columns_stay_split(partitioner):
    args = TABLE, TWICE, ROWS
    result, layout, found = laid_out(add, args, "[X,Y]", "Y", partitioner)
    np.testing.assert_allclose(result, add(*map(tf.constant, args)), 1e-5, 1e-5)
    assert layout.updates == ((), ("Y",))
    kinds = {one.kind: one.bytes for one in found}
    assert kinds == {"all-gather": TWICE.nbytes, "all-to-all": ROWS.nbytes // 4}


def test_there_is_a_layout_only_where_it_saves_something():
    def layout(table, index, rows, updates=K):
        scatter = Scatter(
            operand=(V, M),
            indices=(updates, 1),
            updates=(updates, M),
            index_bytes=4,
            element_bytes=4,
            scattered=(0,),
            window=(None, 1),
        )
        parsed = (Sharding.parse(MESH, text) for text in (index, rows, table))
        return scatter_layout(scatter, *parsed)

    assert layout("[X,_]", "[Y,_]", "[Y,_]").operand == (("X",), ())
    assert layout("[X,_]", "[_,_]", "[Y,_]").indices == ((), ())
    assert layout("[X,_]", "[_,_]", "[_,_]") is None  # It lies so.
    assert layout("[X,_]", "[_,_]", "[_,Y]") is None
    assert layout("[_,Y]", "[X,_]", "[X,_]") is None  # Each device has all rows.
    assert layout("[_,_]", "[X,_]", "[X,_]") is None
    assert layout("[X,_]", "[Y,_]", "[Y,_]", updates=4 * V) is None
