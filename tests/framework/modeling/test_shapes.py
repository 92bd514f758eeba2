"""Shapes, and copies along a dim."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.shapes import copies_of_each


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("count", [1, 3])
def test_copies_are_in_a_row(count, dim):
    x = np.arange(24).reshape([2, 3, 4])
    got = copies_of_each(tf.constant(x), count, dim)
    np.testing.assert_array_equal(got, x.repeat(count, dim))


def test_the_batch_may_be_unknown():
    @tf.function(input_signature=[tf.TensorSpec([None, 2, 3])], autograph=False)
    def copies(x):
        return copies_of_each(x, 2, 1)

    x = np.arange(24, dtype=np.float32).reshape([4, 2, 3])
    np.testing.assert_array_equal(copies(x), x.repeat(2, 1))
