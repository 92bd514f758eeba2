"""Random numbers of TF's ops: those of TF's jit, drawn where they are read."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

import meshwright.framework as mw

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
SEED = np.array([3, -7], np.int32)
SEED_SPEC = [tf.TensorSpec([2], tf.int32)]
PHILOX = 1


def drawn(dtype, shape):
    ends = {"minval": None, "maxval": None} if dtype.is_integer else {}
    return lambda seed: tf.random.stateless_uniform(shape, seed, dtype=dtype, **ends)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int32", "uint64"]
)
@pytest.mark.parametrize("shape", [[8, 12], [4, 5, 3], []])
def test_numbers_are_those_of_tfs_jit(shape, dtype, partitioner):
    draw = drawn(tf.as_dtype(dtype), shape)

    def split(seed):
        return mw.mesh_split(draw(seed), MESH, ["data", "model", None][: len(shape)])

    program = mw.compile_program(split, SEED_SPEC, MESH, partitioner=partitioner)
    want = tf.function(draw, jit_compile=True)(tf.constant(SEED))
    np.testing.assert_array_equal(np.asarray(program(SEED)), want.numpy())


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_dropout_and_its_gradient_draw_only_what_a_device_holds(partitioner):
    def step(seed, x):
        x = mw.mesh_split(x, MESH, ["data", "model"])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.experimental.stateless_dropout(x, 0.3, seed) ** 2
        return y, tape.gradient(y, x)

    specs = [*SEED_SPEC, tf.TensorSpec([26, 36])]
    program = mw.compile_program(step, specs, MESH, partitioner=partitioner)
    x = np.random.default_rng(1).normal(size=[26, 36]).astype(np.float32)
    want = tf.function(step, jit_compile=True)(tf.constant(SEED), tf.constant(x))
    for ours, theirs in zip(program(SEED, x), want, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-6)
    sizes = re.findall(r"\b[usf]\d+\[([\d,]+)\]", program.hlo_text())
    assert max(np.prod([int(n) for n in size.split(",")]) for size in sizes) == 13 * 9
    assert not program.collectives()


@pytest.mark.parametrize("with_state", [False, True])
def test_counters_beyond_64_bits(with_state):
    """Blocks are counted by 128 bits; an op whose new state is read stays as it is."""
    state = np.array([5, 2**64 - 2, 7], np.uint64)

    def draw(state):
        after, bits = xla.rng_bit_generator(PHILOX, state, [40], tf.uint32)
        return (bits, after) if with_state else (bits,)

    specs = [tf.TensorSpec([3], tf.uint64)]
    program = mw.compile_program(draw, specs, MESH)
    want = tf.function(draw, jit_compile=True)(tf.constant(state))
    for ours, theirs in zip(program(state), want, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs.numpy())
