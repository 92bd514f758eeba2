"""Pools along split dims: devices send halos, and have the numbers of one device."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.compiler.programs import MESH, over_partitioners
from tests.operators.definitions.functions import window_reduced

ONE = DeviceMesh(("X",), (1,))
ROWS, BOTH = (None, "Y", None, None), (None, "X", "Y", None)
OVERLAPPING, FAR, PADDING = "overlapping windows", "far halos", "windows of padding"


def image(*shape):
    return np.random.RandomState(0).randn(*shape).astype(np.float32)


def laid(x, mesh, dims):
    return x if mesh is ONE else mesh_split(x, mesh, dims)


def compiled(pool, x, dims, mesh=MESH, gradient=True, **how):
    """A program of a pool and its gradient, all images split alike."""

    def with_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = laid(pool(laid(x, mesh, dims)), mesh, dims)
            weights = np.cos(np.arange(y.shape.num_elements())).reshape(y.shape)
            loss = tf.reduce_sum(y * laid(tf.constant(weights, x.dtype), mesh, dims))
        return (y, tape.gradient(loss, x)) if gradient else (y,)

    border = Sharding.from_dims_mapping(mesh, [None] * 4 if mesh is ONE else dims)
    results = (border,) * (2 if gradient else 1)
    return compile_program(
        with_gradient,
        [tf.TensorSpec(x.shape)],
        mesh,
        in_shardings=[border],
        out_shardings=results,
        compiler_options={"xla_backend_optimization_level": 0},
        **how,
    )


def assert_right(program, pool, x, dims):
    alone = compiled(pool, x, dims, ONE, len(program.out_shardings) == 2)
    results = (run.unshard(run(x)) for run in (program, alone))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def max_pool(size, stride, padding):
    return lambda x: tf.nn.max_pool2d(x, size, stride, padding)


POOLS = {
    "3 by 2, by both": (max_pool(3, 2, "SAME"), (2, 16, 16, 3), BOTH),
    "of several blocks": (max_pool((6, 1), (1, 1), "SAME"), (2, 8, 8, 3), ROWS),
    "uneven": (max_pool(2, 1, "VALID"), (2, 13, 15, 3), BOTH),
    "uneven, with rows unread": (max_pool(3, 2, "VALID"), (2, 58, 4, 3), ROWS),
}


@over_partitioners
@pytest.mark.parametrize("name", POOLS)
def test_gradients_of_max_pools_send_halos_only(name, partitioner):
    pool, shape, dims = POOLS[name]
    x = image(*shape)
    program = compiled(pool, x, dims, partitioner=partitioner)
    (repair,) = program.repairs
    assert repair.fault.name == OVERLAPPING
    assert not list(repair.changes())
    assert {c.kind for c in program.collectives()} == {"collective-permute"}
    assert_right(program, pool, x, dims)


@over_partitioners
def test_even_shards_receive_the_rows_that_they_need(partitioner, caplog):
    x = image(2, 32, 8, 3)
    pool = max_pool(3, 2, "SAME")
    program = compiled(pool, x, ROWS, partitioner=partitioner, strict=True)
    (repair,) = program.repairs
    row = x[:, 0].nbytes
    assert repair.bytes == repair.halos == 2 * row  # Of the image, and sums back.
    # The pool itself needs the row of the image too.
    assert sum(collective.bytes for collective in program.collectives()) == 3 * row
    assert "pools exchange border rows (halos)" in str(repair)
    assert not [r for r in caplog.records if "which XLA" in r.getMessage()]


@over_partitioners
def test_the_first_of_equal_elements_gets_all(partitioner):
    """Halos lie on both sides; padding is no larger than what is least of all."""
    x = np.float32(image(2, 16, 8, 3) > 0)
    x[:, :5] = x[:, 11:] = -np.inf
    pool = max_pool(3, 1, "SAME")
    program = compiled(pool, x, ROWS, partitioner=partitioner)
    assert {c.kind for c in program.collectives()} == {"collective-permute"}
    assert_right(program, pool, x, ROWS)


@over_partitioners
def test_windows_as_far_as_the_image_make_it_whole(partitioner):
    x, pool = image(2, 8, 8, 3), max_pool((8, 3), (1, 1), "SAME")
    program = compiled(pool, x, BOTH, partitioner=partitioner)
    (repair,) = program.repairs
    assert {str(new) for *_, new in repair.changes()} == {"[_,_,Y,_]"}
    assert repair.bytes > repair.halos > 0
    assert_right(program, pool, x, BOTH)


def summed(size, stride, hole, pad):
    return lambda x: window_reduced(
        x, [1, *size, 1], [1, *stride, 1], [1, *hole, 1], [[0, 0], *pad, [0, 0]], "sum"
    )


SUMS = {
    "far": (summed([2, 11], [2, 1], [1, 1], [[0, 0], [5, 5]]), BOTH, FAR),
    "padding": (summed([2, 2], [3, 1], [1, 1], [[3, 0], [0, 0]]), ROWS, PADDING),
    "holes": (summed([3, 1], [2, 1], [2, 1], [[1, 3], [0, 0]]), ROWS, PADDING),
}


@over_partitioners
@pytest.mark.parametrize("name", SUMS)
def test_windows_of_sums_send_halos_only(name, partitioner):
    pool, dims, fault = SUMS[name]
    x = image(2, 16, 16, 3)
    program = compiled(pool, x, dims, gradient=False, partitioner=partitioner)
    (repair,) = program.repairs
    assert repair.fault.name == fault
    assert not list(repair.changes())
    assert {c.kind for c in program.collectives()} <= {"collective-permute"}
    assert_right(program, pool, x, dims)


@over_partitioners
def test_blocks_may_lie_in_padding(partitioner):
    """Their rows are no device's."""
    x, pool = image(2, 16, 4, 3), summed([2, 1], [3, 1], [1, 1], [[20, 0], [0, 0]])
    program = compiled(pool, x, ROWS, gradient=False, partitioner=partitioner)
    (repair,) = program.repairs
    assert repair.fault.name == FAR
    assert not list(repair.changes())
    assert_right(program, pool, x, ROWS)
