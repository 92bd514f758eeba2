"""What tests of programs share: meshes, specs of arrays, comparison with numpy."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y"), (2, 4))
PERMUTED = DeviceMesh(("X", "Y"), (2, 4), (3, 1, 4, 0, 5, 7, 2, 6))
over_partitioners = pytest.mark.parametrize("partitioner", Partitioner, scope="module")


def split(*dims_mapping, mesh=MESH):
    return Sharding.from_dims_mapping(mesh, dims_mapping)


def specs(nest):
    return tf.nest.map_structure(lambda v: tf.TensorSpec(v.shape, v.dtype), nest)


def assert_close(got, want):
    tf.nest.assert_same_structure(got, want)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
