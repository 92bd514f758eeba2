"""Programs in regions that are manual along some axes only, and tensors of nothing."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import over_partitioners, specs

CUBE = DeviceMesh(("X", "A", "Y"), (2, 2, 2))
WIDE = DeviceMesh(("X", "Y"), (2, 4))
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def region(fn, mesh, axis, ranks, rank):
    """`fn` where all devices along an axis compute the same."""
    return manual_partition(
        fn,
        mesh=mesh,
        in_dims=[[None] * r for r in ranks],
        out_dims=[None] * rank,
        manual_axes=[axis],
    )


def check(fn, args, mesh, partitioner, want):
    program = compile_program(fn, map(specs, args), mesh, partitioner=partitioner)
    got = tf.nest.flatten(program.unshard(program(*args)))
    for result, other in zip(got, tf.nest.flatten(want), strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-5, atol=1e-4)
    return program


def test_a_transform_stays_row_major():
    def transform(x):
        x = mesh_split(x, CUBE, [None, "X", None])
        y = tf.abs(tf.signal.fft(tf.cast(x, tf.complex64)))
        return mesh_split(y, CUBE, [None, "Y", None])

    x = array(2, 3, 64)
    fn = region(transform, CUBE, "A", [3], 3)
    check(fn, [x], CUBE, Partitioner.SHARDY, np.abs(np.fft.fft(x)))


@over_partitioners
@pytest.mark.parametrize("inside", [[None, "X"], [None, None]])
def test_a_branch_may_be_annotated_unlike_others(inside, partitioner):
    def choose(x, i):
        branches = [
            lambda: mesh_split(x + 1, CUBE, inside),
            lambda: x * 2,
            lambda: tf.cumsum(x, 1),
        ]
        return mesh_split(tf.switch_case(i, branches), CUBE, ["Y", None])

    x = array(8, 4)
    fn = region(choose, CUBE, "A", [2, 0], 2)
    check(fn, [x, np.int32(2)], CUBE, partitioner, np.cumsum(x, 1))


@over_partitioners
def test_regions_along_different_axes_may_have_equal_constants(partitioner):
    def band(axis, split):
        def fn(x):
            return tf.linalg.band_part(mesh_split(x, WIDE, [None, split]), 1, 2)

        return region(fn, WIDE, axis, [2], 2)

    def fn(x):
        outside = tf.linalg.band_part(mesh_split(x, WIDE, ["Y", "X"]), 1, 2)
        return band("X", "Y")(x), band("Y", "X")(x), outside

    x = array(8, 8)
    check(fn, [x], WIDE, partitioner, [tf.linalg.band_part(x, 1, 2)] * 3)


@over_partitioners
def test_a_slice_that_starts_in_range_keeps_its_layout(partitioner):
    def fn(x, i):
        start = tf.clip_by_value(i, 0, 4)
        part = tf.slice(mesh_split(x, CUBE, ["X", "Y"]), [start, 0], [4, 8])
        return mesh_split(part, CUBE, [None, "Y"])

    x = array(8, 8)
    inside = region(fn, CUBE, "A", [2, 0], 2)
    program = check(inside, [x, np.int32(3)], CUBE, partitioner, x[3:7])
    assert not [repair for repair in program.repairs if repair.is_costly]


def test_gspmd_refuses_what_would_end_the_process():
    def norm(x, y):
        return tf.compat.v1.nn.fused_batch_norm(
            x, y, y, mean=y, variance=y + 1, is_training=False
        )[0]

    args = array(2, 2, 2, 4), np.ones(4, np.float32)
    fn = region(norm, CUBE, "A", [4, 1], 4)
    check(fn, args, CUBE, Partitioner.SHARDY, norm(*map(tf.constant, args)))
    with pytest.raises(
        LoweringError, match=r"test_regions\.py:\d+\).*batch_norm_.*use "
    ):
        compile_program(fn, map(specs, args), CUBE, partitioner=Partitioner.GSPMD)


NOTHING = {
    "convolution": (
        lambda x, y: tf.nn.conv2d(x, y, 1, "SAME"),
        [(0, 8, 8, 4), (3, 3, 4, 4)],
        [[None, "X", None, None], [None, None, "Y", None], ["X", None, "Y", None]],
    ),
    "product": (tf.matmul, [(0, 8), (8, 8)], [["Y", None], [None, "X"], ["Y", "X"]]),
    "sum": (tf.matmul, [(8, 0), (0, 8)], [[None, "Y"], [None, None], [None, "Y"]]),
}


@over_partitioners
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", NOTHING)
def test_tensors_of_no_elements(name, inside, partitioner):
    op, shapes, splits = NOTHING[name]

    def split(x, y):
        x, y = mesh_split(x, CUBE, splits[0]), mesh_split(y, CUBE, splits[1])
        return mesh_split(op(x, y), CUBE, splits[2])

    def gradients(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            result = fn(x, y)
        return [result, *map(tf.convert_to_tensor, tape.gradient(result, [x, y]))]

    args = [array(*shape) for shape in shapes]
    ranks = [len(shape) for shape in shapes]
    fn = region(split, CUBE, "A", ranks, ranks[0]) if inside else split
    result = op(*map(tf.constant, args))
    want = [result, *(np.zeros(shape, np.float32) for shape in shapes)]
    check(gradients, args, CUBE, partitioner, want)
