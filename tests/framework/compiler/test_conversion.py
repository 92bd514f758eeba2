"""Host arrays for arguments of other element types: what is taken, what is refused."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.boundary.conversion import converted
from meshwright.framework.compiler.program import compile_program
from tests.framework.compiler.programs import MESH

BFLOAT16 = tf.bfloat16.as_numpy_dtype


@pytest.mark.parametrize(
    "value,dtype",
    [
        (np.array([1 / 3, np.inf, -np.inf, np.nan]), tf.float32),  # Rounded.
        (np.array([1 / 3, 1e30]), tf.bfloat16),
        (np.array([1 / 3 + 1j]), tf.complex64),
        (np.array([1.5]), tf.complex64),
        (np.array([1 / 3], np.longdouble), tf.float64),
        (np.array([1.5], BFLOAT16), tf.float32),
        (np.array([True, False]), tf.float32),
        (np.array([True, False]), tf.int32),
        (np.array([0, 1]), tf.bool),
        (np.array([-(2**31), 2**31 - 1]), tf.int32),
        (np.array([0, 2**64 - 1], np.uint64), tf.uint64),
        (np.array(5), tf.int32),
        (np.array(5), tf.uint64),
        (np.array([127, -128], np.int8), tf.float16),
        (np.array([2**24, -(2**24)]), tf.float32),
        (np.array([2**60, -(2**63)]), tf.float32),
        (np.array([2**31 - 2**7], np.int32), tf.float32),
        (np.array([2**64 - 2**40], np.uint64), tf.float32),
        (np.array([2**53 + 2]), tf.complex128),
        (np.zeros([0], np.int64), tf.float16),
        (np.zeros([0], np.int64), tf.bool),
    ],
)
def test_what_a_type_can_hold_is_taken(value, dtype):
    with np.errstate(all="raise"):
        got = converted(value, dtype)
    assert got.dtype == dtype.as_numpy_dtype and got.shape == value.shape
    np.testing.assert_array_equal(got, value.astype(dtype.as_numpy_dtype))


def test_an_array_of_the_type_is_not_copied():
    for dtype in (np.int64, np.complex128, BFLOAT16, np.bool_):
        value = np.zeros([3], dtype)
        assert converted(value, tf.as_dtype(dtype)) is value


@pytest.mark.parametrize(
    "value,dtype,message",
    [
        (np.array([1 + 2j]), tf.float32, "is complex128, the program was compiled for"),
        (np.array([1 + 0j]), tf.float64, "is complex128, .* compiled for float64"),
        (np.array([1j]), tf.int32, "is complex128, .* compiled for int32"),
        (np.array([1j]), tf.bool, "is complex128, .* compiled for bool"),
        (
            np.array([1.0]),
            tf.int64,
            "is float64, .* compiled for int64: cast it first$",
        ),
        (np.array([1.0], BFLOAT16), tf.int32, "is bfloat16, .* compiled for int32"),
        (np.array([1.0]), tf.bool, "is float64, .* compiled for bool"),
        (np.array(["1.5"]), tf.float32, "is <U3, the program was compiled for float32"),
        (np.array([2**70]), tf.int64, "is object, .* compiled for int64"),
        (np.array(["2020"], "M8[s]"), tf.int64, r"is datetime64\[s\], .* for int64"),
        (
            np.array([0, 2**31]),
            tf.int32,
            "has values from 0 to 2147483648, which int32",
        ),
        (np.array([-1]), tf.uint64, "has values from -1 to -1, which uint64 cannot"),
        (
            np.array([2**63], np.uint64),
            tf.int64,
            f"to {2**63}, which int64 cannot hold",
        ),
        (np.array([0, 2]), tf.bool, "has values from 0 to 2, which bool cannot hold"),
        (np.array([1, 2**24 + 1]), tf.float32, f"value {2**24 + 1}, which float32 can"),
        (np.array([-(2**53) - 1]), tf.float64, f"value -{2**53 + 1}, which float64"),
        (np.array([2**63 - 1]), tf.float64, f"the value {2**63 - 1}, which float64"),
        (np.array([2**64 - 1], np.uint64), tf.complex64, f"value {2**64 - 1}, which c"),
        (np.array([2**31 - 1], np.int32), tf.float32, f"value {2**31 - 1}, which flo"),
        (np.array([257]), tf.bfloat16, "the value 257, which bfloat16 cannot hold"),
        (np.array([-70000]), tf.float16, "the value -70000, which float16 cannot hold"),
        (np.array([0, -1e39]), tf.float32, r"the value -1e\+39, which float32 cannot"),
        (np.array([1e5], np.float32), tf.float16, "value 100000.0, which float16 can"),
        (np.array([1 + 1e39j]), tf.complex64, r"value \(1\+1e\+39j\), which complex64"),
    ],
)
def test_what_would_be_lost_is_refused(value, dtype, message):
    with pytest.raises(ValueError, match=message):
        converted(value, dtype)


def test_the_argument_is_named():
    program = compile_program(
        lambda batch: batch["x"] * 2, [{"x": tf.TensorSpec([2])}], MESH, name="step"
    )
    for call in (program, program.shard):
        with pytest.raises(
            ValueError, match="step: argument 0/x is complex128, the pr"
        ):
            call({"x": np.array([1, 1j])})
