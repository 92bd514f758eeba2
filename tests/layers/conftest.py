"""What the tests of layers share."""

import pytest
import tensorflow as tf


def _hlo_text(fn, *args) -> str:
    flat_specs = tf.nest.flatten(args)
    function = tf.function(
        lambda *flat: fn(*tf.nest.pack_sequence_as(args, list(flat))),
        jit_compile=True,
        autograph=False,
    )
    return function.experimental_get_compiler_ir(*flat_specs)(stage="hlo")


@pytest.fixture
def hlo_text():
    """(function, *nests of tf.TensorSpec) -> text of its unpartitioned HLO."""
    return _hlo_text
