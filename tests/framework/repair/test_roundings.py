"""Roundings of what depends on no argument are constants."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import (
    Stage,
    work_around,
)
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import over_partitioners

MESH = DeviceMesh(("X", "Y"), (3, 2))


def operations(fn, *specs):
    """The text of a function's module that XLA can split."""
    module = Module(lower(fn, specs), MESH)
    with module.opened():
        work_around(Stage.SPLITTABLE, module.write())
        return str(module.operation)


def positions(dtype, scale=1 / 3):
    count = tf.range(12, dtype=dtype)
    return (count + 0.5) * tf.constant(scale, dtype) - 1.5


@pytest.mark.parametrize("rounding", [tf.math.ceil, tf.floor, tf.round])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_a_rounding_of_positions_is_a_constant(rounding, dtype):
    text = operations(
        lambda x: x + rounding(positions(dtype)), tf.TensorSpec([12], dtype)
    )
    assert not any(f"stablehlo.{name}" in text for name in ("ceil", "floor", "round"))


def test_positions_made_integers_are_a_constant():
    def fn(x):
        return tf.gather(x, tf.cast(positions(tf.float32, 0.7) + 1.2, tf.int32))

    text = operations(fn, tf.TensorSpec([12]))
    assert "tensor<12xf32>) -> tensor<12xi32>" not in text


@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (lambda x: tf.math.ceil(x * positions(tf.float32)), "ceil"),
        (lambda x: x[:1] + tf.math.ceil(tf.range(70_000.0) / 3), "ceil"),
        (lambda x: x + tf.math.ceil(tf.exp(positions(tf.float32))), "ceil"),
        (lambda x: tf.cast(positions(tf.float32) * 1e20, tf.int32), "convert"),
        (lambda x: x + tf.floor(sum([positions(tf.float32)] * 400)), "floor"),
    ],
    ids=[
        "of an argument",
        "of many elements",
        "of what NumPy computes otherwise",
        "out of range",
        "of a long chain",
    ],
)
def test_other_roundings_stay(fn, kept):
    assert f"stablehlo.{kept}" in operations(fn, tf.TensorSpec([12]))


@over_partitioners
def test_an_image_is_resized_as_on_one_device(partitioner):
    # A third of these positions lies on a whole number or beside it.
    def fn(image):
        resized = tf.image.resize(image, [12, 6])
        return mesh_split(resized, MESH, [None, "X", "Y", None])

    image = np.random.RandomState(0).randn(2, 4, 2, 3).astype(np.float32)
    specs = [tf.TensorSpec(image.shape)]
    program = compile_program(fn, specs, MESH, partitioner=partitioner)
    want = tf.image.resize(image, [12, 6])
    np.testing.assert_allclose(program(image), want, rtol=1e-5, atol=1e-5)
