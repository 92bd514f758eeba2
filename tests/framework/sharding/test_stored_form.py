"""Stored forms: padding to what divides, and exactly back."""

import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm

MESH = DeviceMesh(("X", "Y"), (2, 4))


def form_of(shape, dims_mapping, dtype=tf.float32):
    sharding = Sharding.from_dims_mapping(MESH, dims_mapping)
    return StoredForm.of(tf.TensorSpec(shape, dtype), sharding)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int32, tf.bool])
@pytest.mark.parametrize(
    "shape,dims_mapping,stored",
    [
        ([3, 5], ["X", "Y"], (4, 8)),
        ([3, 5], [("Y", "X"), None], (8, 5)),
        ([4, 1], [None, "Y"], (4, 4)),
        ([], [], ()),
    ],
)
def test_pads_with_zeros_and_unpads_exactly(shape, dims_mapping, stored, dtype):
    form = form_of(shape, dims_mapping, dtype)
    assert form.stored_shape == stored
    logical = np.ones(shape, dtype.as_numpy_dtype)
    padded = form.pad(logical)
    assert padded.shape == stored and padded.dtype == logical.dtype
    assert padded.astype(np.float32).sum() == logical.size
    np.testing.assert_array_equal(form.unpad(padded), logical)
    # The same inside a program, where annotations come with it.
    np.testing.assert_array_equal(form.to_stored(tf.constant(logical)).numpy(), padded)
    np.testing.assert_array_equal(form.to_logical(tf.constant(padded)).numpy(), logical)


def test_what_divides_is_left_alone():
    form = form_of([4, 8], ["X", "Y"])
    assert form.is_logical and form.stored_shape == (4, 8)
    host, tensor = np.ones([4, 8]), tf.ones([4, 8])
    assert form.pad(host) is host
    assert form.to_stored(tensor) is tensor and form.to_logical(tensor) is tensor


def test_a_sharding_of_another_rank_is_refused():
    sharding = Sharding.from_dims_mapping(MESH, ["X"])
    message = re.escape("sharding [X] is of rank 1, and tensor w has shape (3, 5)")
    with pytest.raises(ValueError, match=message):
        StoredForm.of(tf.TensorSpec([3, 5], name="w"), sharding)
