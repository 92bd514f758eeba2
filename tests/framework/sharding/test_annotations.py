"""Annotations in the lowered program, and outside of any program."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.sharding.annotations import (
    annotate,
    mesh_split,
    replicate,
    shard,
    split,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y"), (2, 4))
X = tf.TensorSpec([8, 16])
REPLICATED = xla_data_pb2.OpSharding(type=xla_data_pb2.OpSharding.REPLICATED)


def annotations(fn, *specs):
    """Annotations in the HLO of `fn`: (operand's opcode, OpSharding) of each."""
    module = hlo_pb2.HloModuleProto.FromString(lower(fn, specs).hlo)
    instructions = [op for c in module.computations for op in c.instructions]
    by_id = {op.id: op for op in instructions}
    return [
        (by_id[op.operand_ids[0]].opcode, op.sharding)
        for op in instructions
        if op.opcode == "custom-call" and op.custom_call_target == "Sharding"
    ]


@pytest.mark.parametrize("dims_mapping", [[0, 1], [None, ("Y", "X")], [-1, 0]])
def test_mesh_split_annotates_the_tensor(dims_mapping):
    ops = annotations(lambda x: mesh_split(tf.sin(x), MESH, dims_mapping), X)
    sharding = Sharding.from_dims_mapping(MESH, dims_mapping)
    assert ops == [("sine", sharding.to_op_sharding())]


def test_the_gradient_is_annotated_by_a_copy():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.sin(mesh_split(x, MESH, ["X", "Y"])))
        return tape.gradient(loss, x)

    split = Sharding.from_dims_mapping(MESH, ["X", "Y"]).to_op_sharding()
    forward, backward = annotations(gradient, X)
    assert forward[1] == backward[1] == split
    assert backward[0] == "multiply"  # The gradient of the sine.


def test_replicate_annotates_tensor_and_gradient():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.sin(replicate(x)))
        return tape.gradient(loss, x)

    assert [sharding for _, sharding in annotations(gradient, X)] == [REPLICATED] * 2
    # No axis at all says the same.
    unsplit = annotations(lambda x: mesh_split(x, MESH, [None, None]), X)
    assert [sharding for _, sharding in unsplit] == [REPLICATED]


def test_a_mesh_of_one_device_says_so():
    """A program for more devices can tell it from an annotation of its own."""
    mesh = DeviceMesh(("X", "Y"), (1, 1))
    ((_, sharding),) = annotations(lambda x: mesh_split(x, mesh, ["X", "Y"]), X)
    assert sharding.type == xla_data_pb2.OpSharding.MAXIMAL


def test_split_and_shard_name_devices():
    (split_dim,) = annotations(lambda x: split(x, -1, 8), X)
    assert list(split_dim[1].tile_assignment_dimensions) == [1, 8]
    assert list(split_dim[1].tile_assignment_devices) == list(range(8))
    order = np.array([[3, 1], [2, 0]])
    (sharded,) = annotations(lambda x: shard(x, order), X)
    assert list(sharded[1].tile_assignment_dimensions) == [2, 2]
    assert list(sharded[1].tile_assignment_devices) == [3, 1, 2, 0]


@pytest.mark.parametrize(
    "wrong,message",
    [
        (lambda x: split(x, 2, 8), "split: tensor has shape (8, 16), which has no dim"),
        (lambda x: shard(x, np.arange(8)), "device_assignment (8,) with 8 distinct"),
        (lambda x: shard(x, np.zeros([2, 4], int)), "assignment (2, 4) with 1 distin"),
    ],
)
def test_a_wrong_split_or_shard_is_refused(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong(tf.zeros([8, 16]))


def test_unspecified_dims_are_carried():
    hlo = lower(lambda x: mesh_split(x, MESH, [0, -1], unspecified_dims=[1]), [X]).hlo
    assert b"unspecified_dims=[1]" in hlo


def test_in_eager_execution_the_tensor_stays_as_it_is():
    x = tf.reshape(tf.range(6.0), [2, 3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(replicate(mesh_split(x, MESH, ["X", None])) ** 2)
    assert mesh_split(x, MESH, ["X", None]) is x
    np.testing.assert_array_equal(tape.gradient(loss, x), 2 * x)


@pytest.mark.parametrize("eager", [True, False])
def test_a_rank_mismatch_names_the_shape(eager):
    sharding = Sharding.from_dims_mapping(MESH, ["X"])
    message = r"sharding \[X\] is of rank 1, and tensor.* has shape \(8, 16\)"
    with pytest.raises(ValueError, match=message):
        if eager:
            annotate(tf.zeros([8, 16]), sharding)
        else:
            lower(lambda x: annotate(x, sharding), [X])
    with pytest.raises(ValueError, match="is of rank 1, and the tensor of rank 2"):
        mesh_split(tf.zeros([8, 16]), MESH, ["X"])
    # A wrong axis is told of first, and what is no axis as such.
    with pytest.raises(ValueError, match="unknown mesh axis 'W': the mesh has"):
        mesh_split(tf.zeros([8, 16]), MESH, ["W"])
    with pytest.raises(ValueError, match="entry Ellipsis is no axis of the mesh"):
        mesh_split(tf.zeros([8, 16]), MESH, [..., "X"])


def test_in_a_program_the_tensor_and_with_it_the_layer_is_named():
    def twice(x):
        with tf.name_scope("stack/attention"):
            return mesh_split(tf.sin(x), MESH, ["X", "X"])

    message = "mesh_split: tensor 'stack/attention/Sin:0' has shape (8, 16): mesh axis"
    with pytest.raises(ValueError, match=re.escape(f"{message} 'X' is used twice")):
        lower(twice, [X])


def test_an_annotation_cannot_make_a_tensor_manual():
    with pytest.raises(ValueError, match="use auto_to_manual or manual_partition"):
        annotate(tf.zeros([8, 16]), Sharding.parse(MESH, "[_,_] manual{X}"))
