"""Branches and loops of manual regions that devices take differently."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program, trace_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.collectives import (
    Reduction,
    all_reduce,
    axis_index,
    collective_permute,
)
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import over_partitioners

MESH = DeviceMesh(("X", "Y"), (2, 4))
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
SPECS = [tf.TensorSpec(X.shape)]


def region(body, manual_axes=("X",)):
    dims = ["X", None]
    return manual_partition(
        body, mesh=MESH, in_dims=[dims], out_dims=dims, manual_axes=manual_axes
    )


def rolled(x):
    return tf.roll(mesh_split(x, MESH, [None, "Y"]), 3, axis=1)


def is_first():
    return axis_index(MESH, "X") == 0


def by_index(x):
    return tf.cond(is_first(), lambda: rolled(x), lambda: x)


def by_data(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: rolled(x))


def by_a_loops_data(x):
    _, y = tf.while_loop(
        lambda i, y: tf.cast(i, tf.float32) < 3 + tf.abs(x[0, 0]),
        lambda i, y: (i + 1, rolled(y)),
        (0, x),
    )
    return y


def in_a_loop(x):
    """In the first round all devices choose alike."""

    def step(i, y):
        return i + 1, tf.cond(y[0, 0] > 0.5, lambda: rolled(y), lambda: y) + x

    return tf.while_loop(lambda i, _: i < 2, step, (0, tf.zeros_like(x)))[1]


def by_hand(x):
    def shifted():
        return collective_permute(x, MESH, "X", [(0, 1), (1, 0)])

    return tf.cond(is_first(), shifted, lambda: x)


def summed_by_hand(x):
    return tf.cond(is_first(), lambda: all_reduce(x, MESH, "X"), lambda: x)


WAITING = {
    "an index": (by_index, ("X",)),
    "data": (by_data, ("X",)),
    "a loop's data": (by_a_loops_data, ("X",)),
    "data in a loop": (in_a_loop, ("X",)),
    "a permute by hand": (by_hand, None),
    "a sum by hand": (summed_by_hand, None),
}


@over_partitioners
@pytest.mark.parametrize("case", WAITING)
def test_devices_that_would_wait_forever_are_refused(case, partitioner):
    """The programs stood still, until the watchdog ended the process."""
    body, axes = WAITING[case]
    with pytest.raises(LoweringError) as refusal:
        compile_program(region(body, axes), SPECS, MESH, partitioner=partitioner)
    assert "its predicate differs by device along X" in str(refusal.value)
    assert "test_divergence.py:" in str(refusal.value)
    assert "all_reduce along X" in str(refusal.value)


def test_an_exported_program_is_refused_too():
    traced = trace_program(region(by_index), SPECS, MESH)
    with pytest.raises(LoweringError, match="would wait for the others forever"):
        traced.export(["cpu"])


def by_all_devices(x):
    largest = all_reduce(tf.reduce_max(x), MESH, "X", reduction=Reduction.MAX)
    return tf.cond(largest > 0, lambda: rolled(x), lambda: x)


def by_a_count(x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, rolled(y)), (0, x))[1]


def summed_over_rows(x):
    """Devices that choose alike are the only ones that add up."""
    y = mesh_split(x, MESH, [None, "Y"])
    return tf.cond(
        is_first(), lambda: y - tf.reduce_sum(y, 1, keepdims=True), lambda: x
    )


@over_partitioners
@pytest.mark.parametrize(
    ("body", "right"),
    [
        (by_all_devices, np.roll(X, 3, 1)),
        (by_a_count, np.roll(X, 9, 1)),
        (
            summed_over_rows,
            np.concatenate([X[:4] - X[:4].sum(1, keepdims=True), X[4:]]),
        ),
    ],
    ids=["a reduced predicate", "a count", "sums among those that choose alike"],
)
def test_programs_in_which_nobody_waits_run(body, right, partitioner):
    program = compile_program(region(body), SPECS, MESH, partitioner=partitioner)
    np.testing.assert_allclose(program(X), right, rtol=1e-5, atol=1e-5)
