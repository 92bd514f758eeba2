"""Two products of a layer, split as FSDP and tensor parallelism do over three axes."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.repair import check
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


# Weights whose axes are not in the mesh's order.
OUT_OF_ORDER = {
    "fsdp over all data, tensor": (
        "[data.fsdp,_,_]",
        "[fsdp.data,tensor]",
        "[tensor,fsdp.data]",
        "[data.fsdp,_,tensor]",
    ),
    "fsdp of columns": (
        "[data.fsdp,_,_]",
        "[_,tensor.fsdp]",
        "[tensor.fsdp,_]",
        "[data.fsdp,_,tensor]",
    ),
}
RNG = np.random.RandomState(0)
ARGS = [
    (RNG.randn(*shape) / 4).astype(np.float32)
    for shape in ((8, 4, 8), (8, 16), (16, 8))
]


def layer(x, up, down, lay):
    """The layer's result and gradients, each laid out by `lay(tensor, number)`."""
    with tf.GradientTape() as tape:
        tape.watch([x, up, down])
        tokens, first, second = (lay(t, i) for i, t in enumerate((x, up, down)))
        hidden = lay(tf.tanh(tf.einsum("bsd,df->bsf", tokens, first)), 3)
        y = lay(tf.einsum("bsf,fd->bsd", hidden, second), 0)
        loss = tf.reduce_sum(tf.sin(y))
    gradients = tape.gradient(loss, [x, up, down])
    return [y, *(lay(g, i) for i, g in enumerate(gradients))]


def compiled(texts, partitioner):
    """The program of a layer whose tensors are split so."""
    shardings = [Sharding.parse(CUBE, text) for text in texts]

    def split(t, number):
        return mesh_split(t, CUBE, [list(axes) for axes in shardings[number].dims])

    return compile_program(
        lambda *args: layer(*args, split),
        [specs(arg) for arg in ARGS],
        CUBE,
        partitioner=partitioner,
    )


def assert_right(program):
    want = layer(*map(tf.constant, ARGS), lambda t, number: t)
    assert_close(program.unshard(program(*ARGS)), [tensor.numpy() for tensor in want])


@over_partitioners
@pytest.mark.parametrize("layout", USUAL)
def test_products_of_a_layer_need_no_repair(layout, partitioner):
    program = compiled(USUAL[layout], partitioner)
    assert not program.repairs
    assert_right(program)


@over_partitioners
@pytest.mark.parametrize("layout", OUT_OF_ORDER)
def test_repairs_of_other_layers_receive_no_more(layout, partitioner):
    """Than XLA alone, which gets these right: the row is wider than the fault."""
    program = compiled(OUT_OF_ORDER[layout], partitioner)
    assert {repair.fault.name for repair in program.repairs} == {"regrouped product"}
    assert_right(program)
    with mock.patch.multiple(check, PRESENT=[], GUARDED=frozenset()):
        alone = compiled(OUT_OF_ORDER[layout], partitioner)
    assert_right(alone)
    received, without = (
        sum(c.bytes for c in each.collectives()) for each in (program, alone)
    )
    assert received < without
