"""Ops at which GSPMD ends the process in a manual region: it is not given them."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.stablehlo.manual import manual_gspmd
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.manual import manual_partition
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
