"""Completion as GSPMD's figures 3, 4 and 6 draw it, under both partitioners.

Figure 1, the three kinds of sharding, is in test_sharding_forms.py; the merging rule
that figure 3 rests on is in test_sharding.py.
"""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.completion import complete
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh

MESH = DeviceMesh(("x", "y"), (2, 4))
over_partitioners = pytest.mark.parametrize("partitioner", list(Partitioner))


def completed(program, opcode, shape):
    """The text of the shardings that completion gave to ops of this kind and shape."""
    completion = complete(program.unpartitioned)
    return {
        str(completion.sharding(instruction))
        for instruction in completion.completed.instructions
        if instruction.opcode == opcode and instruction.shape == shape
    }


@over_partitioners
def test_figure_3_a_dot_merges_the_shardings_of_its_operands(partitioner):
    def dot(a, b):
        return mesh_split(a, MESH, ["y", None]) @ mesh_split(b, MESH, [None, "x"])

    specs = [tf.TensorSpec([8, 16]), tf.TensorSpec([16, 12])]
    program = compile_program(dot, specs, MESH, partitioner=partitioner)
    assert completed(program, "dot", (8, 12)) == {"[y,x]"}
    assert not program.collectives()


@over_partitioners
def test_figure_4_elementwise_ops_come_first(partitioner):
    """Dot may give BxD or BDx; what comes after it decides, and all BD are alike."""

    def layer(inputs, weight, bias):
        inputs = mesh_split(inputs, MESH, ["x", "y"])  # BxFy
        weight = mesh_split(weight, MESH, ["y", "x"])  # FyDx
        return mesh_split(tf.nn.relu(inputs @ weight + bias), MESH, ["x", "y"])  # BxDy

    specs = [tf.TensorSpec([8, 16]), tf.TensorSpec([16, 12]), tf.TensorSpec([12])]
    program = compile_program(layer, specs, MESH, partitioner=partitioner)
    for opcode in ("dot", "broadcast", "add", "maximum"):
        assert completed(program, opcode, (8, 12)) == {"[x,y]"}, opcode
    bias = completed(program, "parameter", (12,))  # Backward through the broadcast.
    assert bias == {"[y]"}
    x, w, b = np.ones([8, 16]), np.ones([16, 12]), np.arange(12) - 20
    np.testing.assert_allclose(program(x, w, b), np.tile(np.maximum(b + 16, 0), (8, 1)))


@over_partitioners
def test_figure_6_an_inner_partitioner_gathers_in_subgroups(partitioner):
    """AC = einsum(AB, BC): A is matched along x, and B is gathered along y inside."""
    mesh = DeviceMesh(("x", "y"), (2, 2))

    def einsum(ab, bc):
        ab = mesh_split(ab, mesh, ["x", "y"])
        bc = mesh_split(bc, mesh, [None, "y"])
        return mesh_split(tf.einsum("AB,BC->AC", ab, bc), mesh, ["x", "y"])

    specs = [tf.TensorSpec([8, 16]), tf.TensorSpec([16, 64])]
    program = compile_program(einsum, specs, mesh, partitioner=partitioner)
    (gather,) = program.collectives()
    assert (gather.kind, gather.axes) == ("all-gather", ("y",))
    assert set(map(frozenset, gather.groups)) == {frozenset({0, 1}), frozenset({2, 3})}
    assert gather.shapes == ((4, 16),)
