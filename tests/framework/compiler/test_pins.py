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
