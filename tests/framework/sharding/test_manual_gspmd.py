"""Ops at which GSPMD ends the process in a manual region: it is not given them."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.stablehlo.manual import manual_gspmd
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.collectives import (
    all_reduce,
    axis_index,
    collective_permute,
)
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.sharding.test_manual import MESH, X, close


def positive(x):
    return tf.matmul(x, x, transpose_b=True) + tf.eye(4)


def normed_by_given_means(x):
    ones = tf.ones([4])
    normed = tf.compat.v1.nn.fused_batch_norm(
        x[None], ones, ones, mean=ones, variance=ones, is_training=False
    )
    return normed[0][0]


ENDING = {
    "transform": lambda x: tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64))),
    "factor": lambda x: tf.linalg.cholesky(positive(x)),
    "solution": lambda x: tf.linalg.triangular_solve(positive(x), x),
    "norm": normed_by_given_means,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDING)
def test_gspmd_ends_the_process_at_what_we_refuse(name, monkeypatch):
    """If this fails with a new jaxlib, GSPMD may be given the op from then on."""
    monkeypatch.setattr(manual_gspmd, "ABORTING", ())
    region = manual_partition(
        ENDING[name],
        mesh=MESH,
        manual_axes=["X"],
        in_dims=[["X", None, None]],
        out_dims=["X", None, None],
    )
    specs = [tf.TensorSpec([8, 4, 4])]
    with pytest.raises(LoweringError, match="the child process .* ended by SIGABRT"):
        compile_program(
            region, specs, MESH, partitioner=Partitioner.GSPMD, in_child=True
        )


@pytest.mark.parametrize("axes", [["X", None], ["X", "Y"]], ids=str)
@pytest.mark.parametrize(
    ("before", "after", "shape"),
    [(tf.int32, tf.int16, (8, 8)), (tf.int16, tf.int32, (8, 4, 2))],
)
def test_elements_of_another_width_in_a_region(before, after, shape, axes):
    """TF's bitcast then adds or removes a last dim."""

    def region(x):
        return tf.bitcast(x + 1, after) + 1

    rank = len(shape) + (1 if before.size > after.size else -1)
    manual = manual_partition(
        region,
        mesh=MESH,
        manual_axes=["X"],
        in_dims=[["X"] + [None] * (len(shape) - 1)],
        out_dims=["X"] + [None] * (rank - 1),
    )
    program = compile_program(
        lambda x: manual(mesh_split(x, MESH, axes + [None] * (len(shape) - 2))),
        [tf.TensorSpec(shape, before)],
        MESH,
        partitioner=Partitioner.GSPMD,
    )
    x = np.arange(np.prod(shape)).reshape(shape).astype(before.as_numpy_dtype) * 77
    np.testing.assert_array_equal(np.asarray(program(x)), region(tf.constant(x)))


def test_gspmd_refuses_what_it_would_end_the_process_at():
    def fft(x):
        return tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64)))

    borders = {"in_dims": [["X", None]], "out_dims": ["X", None]}
    for manual_axes in (None, ["X"]):
        region = manual_partition(fft, mesh=MESH, manual_axes=manual_axes, **borders)
        for partitioner in Partitioner:
            spec = [tf.TensorSpec(X.shape)]
            if partitioner is Partitioner.GSPMD and manual_axes:
                with pytest.raises(
                    LoweringError, match="fft in a manual subgroup, which"
                ):
                    compile_program(region, spec, MESH, partitioner=partitioner)
            else:
                program = compile_program(region, spec, MESH, partitioner=partitioner)
                close(program(X), np.fft.fft(X).real)


def test_axis_index_has_its_own_constants():
    """The mark of its constants would hold for equal ones outside of the region."""

    def shifted(x):
        return x + tf.cast(axis_index(MESH, "X"), x.dtype)

    region = manual_partition(
        shifted,
        mesh=MESH,
        manual_axes=["X"],
        in_dims=[["X", None]],
        out_dims=["X", None],
    )

    def fn(x, n):
        # Sizes and strides of the mesh's axes, unsigned as those of the index.
        numbers = (n + np.uint32(4)) // np.uint32(2) + np.uint32(0)
        return region(x * tf.cast(numbers, x.dtype))

    specs = [tf.TensorSpec([8, 4]), tf.TensorSpec([4], tf.uint32)]
    program = compile_program(
        fn, specs, MESH, partitioner=Partitioner.GSPMD, in_child=True
    )
    x, n = X[:, :4], np.arange(4, dtype=np.uint32)
    close(program(x, n), x * ((n + 4) // 2) + np.repeat([0, 1], 4)[:, None])


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize(
    "send",
    [
        lambda x: collective_permute(x, MESH, "X", [(0, 1), (1, 0)]),
        lambda x: all_reduce(x, MESH, "X"),
    ],
)
def test_what_is_annotated_and_sent_stays_split_by_automatic_axes(send, partitioner):
    def body(x):
        split = mesh_split(x, MESH, [None, "Y"])
        return mesh_split(send(split), MESH, [None, "Y"])

    region = manual_partition(
        body, mesh=MESH, manual_axes=["X"], in_dims=[["X", None]], out_dims=["X", None]
    )
    both = [Sharding.parse(MESH, "[X,Y]")]
    program = compile_program(
        region,
        [tf.TensorSpec(X.shape)],
        MESH,
        in_shardings=both,
        out_shardings=both[0],
        partitioner=partitioner,
    )
    (sent,) = program.collectives()
    assert sent.axes == ("X",) and sent.shapes == ((4, 4),)
