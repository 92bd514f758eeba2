"""Ops that XLA may get wrong are pinned, for Shardy, to the examined layout."""

import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from tests.framework.compiler.programs import MESH, specs


def layers(x, stack):
    """A loop over stacked weights, which reads each layer's by a dynamic slice."""
    x = mesh_split(x, MESH, ["X", None])
    stack = mesh_split(stack, MESH, [None, None, "Y"])

    def body(i, h):
        return i + 1, tf.tanh(tf.matmul(h, stack[i]))

    return tf.while_loop(lambda i, h: i < 3, body, (tf.constant(0), x))[1]


def test_pins_in_loops_are_attributes_of_the_ops():
    args = np.ones([8, 16], np.float32), np.ones([3, 16, 16], np.float32) / 16
    program = compile_program(layers, [specs(arg) for arg in args], MESH)
    text = str(program.unpartitioned.lowered.compiler_ir("stablehlo"))
    loop = text[text.index("stablehlo.while") :].splitlines()
    slices = [line for line in loop if "stablehlo.dynamic_slice" in line]
    constraints = [line for line in loop if "sdy.sharding_constraint" in line]
    assert slices and all("sdy.sharding = #sdy" in line for line in slices)
    # The loop's own stack has no op that makes it.
    assert all("sdy.sharding_constraint %iterArg" in line for line in constraints)
    want = np.tanh(np.tanh(np.tanh(args[0])))
    np.testing.assert_allclose(program.unshard(program(*args)), want, rtol=1e-5)


def there_and_back(x):
    """Transposes that are none together, of a result of a loop."""
    x = mesh_split(x, MESH, [None, "X", None])

    def body(i, count, h):
        return i + 1, count + 2, tf.tanh(h) + tf.cast(count, tf.float32)

    state = (tf.constant(0), tf.constant(1), x)
    h = tf.while_loop(lambda i, *_: i < 3, body, state)[2]
    moved = tf.transpose(tf.transpose(h, [1, 0, 2]), [1, 0, 2])
    return tf.concat([moved[i : i + 1] @ moved[i] for i in range(3)], 0)


def test_transposes_that_xla_merges_do_not_pin_a_loop():
    x = np.random.default_rng(0).standard_normal((4, 8, 8)).astype(np.float32)
    program = compile_program(there_and_back, [specs(x)], MESH)
    got = program.unshard(program(x))
    np.testing.assert_allclose(got, there_and_back(x), rtol=1e-5, atol=1e-5)
