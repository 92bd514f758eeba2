"""State that leaves a program in the form in which it arrives."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import trace_program
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("x", "y"), (2, 4))
SPLIT = Sharding.from_dims_mapping(MESH, ["y", None], 2)
OTHER = Sharding.from_dims_mapping(MESH, [None, "y"], 2)


def traced(shape, given, wanted):
    return trace_program(
        lambda state: tf.transpose(state) + 1,
        [tf.TensorSpec(shape)],
        MESH,
        in_shardings=[given],
        out_shardings=wanted,
        carried=1,
        name="step",
    )


@pytest.mark.parametrize("given, wanted", [(SPLIT, None), (None, SPLIT)])
def test_the_form_that_is_given_is_that_of_both(given, wanted):
    program = traced([8, 8], given, wanted).compile()
    state = program(np.arange(64.0).reshape(8, 8))
    assert state.sharding.is_equivalent_to(program.arguments.shardings[0], 2)
    assert state.addressable_data(0).shape == (2, 8)
    np.testing.assert_array_equal(program(state), np.arange(64.0).reshape(8, 8) + 2)


@pytest.mark.parametrize(
    "given, wanted, message",
    [
        (
            SPLIT,
            None,
            r"in_shardings stores .* padded to \(8, 6\): .* out_shardings too",
        ),
        (None, SPLIT, r"out_shardings stores .* give it in in_shardings too"),
        (SPLIT, OTHER, "leaf 0 of the state is .* give both the same"),
    ],
)
def test_forms_that_cannot_be_both(given, wanted, message):
    with pytest.raises(ValueError, match=f"step: {message}|step: .*{message}"):
        traced([6, 6], given, wanted)
