"""Two products of a layer, split as FSDP and tensor parallelism do over three axes."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.compiler.programs import assert_close, over_partitioners, specs

CUBE = DeviceMesh(("data", "fsdp", "tensor"), (2, 2, 2))
# Of tokens [batch, length, width], of the first weight, the second, and between them.
USUAL = {
    "megatron": ("[data.fsdp,_,_]", "[_,tensor]", "[tensor,_]", "[data.fsdp,_,tensor]"),
    "fsdp": ("[data.fsdp,_,_]", "[fsdp,_]", "[_,fsdp]", "[data.fsdp,_,_]"),
    "fsdp, tensor": (
        "[data.fsdp,_,_]",
        "[fsdp,tensor]",
        "[tensor,fsdp]",
        "[data.fsdp,_,tensor]",
    ),
    "fsdp over all data, tensor": (
        "[data.fsdp,_,_]",
        "[data.fsdp,tensor]",
        "[tensor,data.fsdp]",
        "[data.fsdp,_,tensor]",
    ),
    "sequence": (
        "[data.fsdp,tensor,_]",
        "[fsdp,tensor]",
        "[tensor,fsdp]",
        "[data.fsdp,_,tensor]",
    ),
    "2D finalized": (
        "[data,_,fsdp]",
        "[fsdp,tensor]",
        "[tensor,fsdp]",
        "[data,_,tensor]",
    ),
}


@over_partitioners
@pytest.mark.parametrize("layout", USUAL)
def test_products_of_a_layer_need_no_repair(layout, partitioner):
    shardings = [Sharding.parse(CUBE, text) for text in USUAL[layout]]

    def layer(x, up, down, lay):
        with tf.GradientTape() as tape:
            tape.watch([x, up, down])
            tokens, first, second = (lay(t, i) for i, t in enumerate((x, up, down)))
            hidden = lay(tf.tanh(tf.einsum("bsd,df->bsf", tokens, first)), 3)
            y = lay(tf.einsum("bsf,fd->bsd", hidden, second), 0)
            loss = tf.reduce_sum(tf.sin(y))
        gradients = tape.gradient(loss, [x, up, down])
        return [y, *(lay(g, i) for i, g in enumerate(gradients))]

    def split(t, number):
        return mesh_split(t, CUBE, [list(axes) for axes in shardings[number].dims])

    rng = np.random.RandomState(0)
    args = [
        (rng.randn(*shape) / 4).astype(np.float32)
        for shape in ((8, 4, 8), (8, 16), (16, 8))
    ]
    program = compile_program(
        lambda *args: layer(*args, split),
        [specs(one) for one in args],
        CUBE,
        partitioner=partitioner,
    )
    assert not program.repairs
    want = layer(*map(tf.constant, args), lambda t, number: t)
    assert_close(program.unshard(program(*args)), [one.numpy() for one in want])
