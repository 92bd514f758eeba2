"""Ops that XLA may get wrong are pinned, for Shardy, to the examined layout."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from tests.framework.compiler.programs import MESH, specs
from tests.operators.definitions.functions import window_reduced


@pytest.mark.parametrize("place", ["alone", "read_elsewhere"])
def test_an_op_keeps_the_layout_that_was_examined(place):
    """XLA would propagate the annotation of the result to it: 2, 4 in place of 1, 3."""

    def fn(x):
        x = mesh_split(x, MESH, [None])
        y = window_reduced(x, [1], [2], [1], [[1, 0]], "product")
        y = mesh_split(y, MESH, ["X"])
        return y + (mesh_split(x, MESH, ["X"])[:2] if place != "alone" else 0)

    x = np.array([2, 3, 4], np.float32)
    program = compile_program(fn, [specs(x)], MESH)
    got = program.unshard(program(x))
    np.testing.assert_array_equal(
        got, np.array([1, 3]) + (x[:2] if place != "alone" else 0)
    )


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
