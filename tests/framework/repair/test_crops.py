"""Images that a convolution crops on one side of a dim and pads on the other."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import (
    Stage,
    work_around,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import MESH, specs

ONE = DeviceMesh(("X", "Y"), (1, 1))
RNG = np.random.default_rng(0)
IMAGE = RNG.integers(-3, 4, [2, 8, 6, 2]).astype(np.float32)
KERNEL = RNG.integers(-3, 4, [2, 2, 2, 3]).astype(np.float32)
PADDING = [[0, 0], [2, 0], [3, 2], [0, 0]]  # More than the kernel reaches over.


def gradients(strides, mesh, image, kernel):
    with tf.GradientTape() as tape:
        tape.watch([image, kernel])
        split = mesh_split(image, mesh, [None, "X", "Y", None])
        y = tf.nn.conv2d(split, kernel, strides, PADDING)
        loss = tf.reduce_sum(y * y)
    return tape.gradient(loss, [image, kernel])


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize("mesh", [ONE, MESH], ids=["one", "eight"])
@pytest.mark.parametrize("strides", [1, [2, 1]], ids=str)
def test_gradients_of_more_padding_than_kernel(strides, mesh, partitioner):
    def fn(image, kernel):
        return gradients(strides, mesh, image, kernel)

    args = IMAGE, KERNEL
    program = compile_program(fn, map(specs, args), mesh, partitioner=partitioner)
    for got, want in zip(
        program.unshard(program(*args)), fn(*map(tf.constant, args)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_no_image_is_cropped_and_padded_along_one_dim():
    """What lies in memory beyond an image may be right by chance; this is not."""

    def fn(image, kernel):
        return gradients(1, ONE, image, kernel)

    def crops(text):
        pads = [line for line in text.splitlines() if "stablehlo.convolution" in line]
        return [pad for pad in pads if "[-1, 1]" in pad]

    lowered = lower(fn, [specs(IMAGE), specs(KERNEL)])
    module = Module(lowered, ONE)
    with module.opened():
        assert len(crops(str(module.operation))) == 1
        work_around(Stage.SPLITTABLE, module.write())
        assert not crops(str(module.operation))
