"""Annotations in what TF vectorizes: `tf.vectorized_map`, and a tape's Jacobians."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.vectorize import our_rules

MESH = DeviceMesh(("X", "Y"), (2, 4))


def jacobian(x, split):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(split(x * x, ["X", -1]))
    return tape.jacobian(y, x)


def batch_jacobian(x, split):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(split(x * x, ["X", -1]))
    return tape.batch_jacobian(y, x)


def mapped(x, split):
    return tf.vectorized_map(lambda row: tf.sin(split(row, ["Y"])), x)


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize("fn", [jacobian, batch_jacobian, mapped])
def test_as_on_one_device(fn, partitioner):
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    program = compile_program(
        lambda x: fn(x, lambda y, dims: mesh_split(y, MESH, dims)),
        [tf.TensorSpec(x.shape)],
        MESH,
        partitioner=partitioner,
    )
    want = fn(tf.constant(x), lambda y, dims: y)
    np.testing.assert_allclose(program(x), want, rtol=1e-5, atol=1e-6)


def test_our_rules_last_as_long_as_any_context():
    """As when two threads trace at once, and the first one ends first."""
    rules = pfor._pfor_converter_registry
    of_tf = rules["XlaSharding"]
    first, second = our_rules(), our_rules()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert rules["XlaSharding"] is not of_tf
    second.__exit__(None, None, None)
    assert rules["XlaSharding"] is of_tf
