"""What is annotated inside of a program: any mesh of its devices, any partitioner."""

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.extend.mlir import ir
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.compiler.xla.experimental import xla_sharding

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program, trace_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split, replicate, shard
from meshwright.framework.sharding.annotations import split as split_dim
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import (
    MESH,
    PERMUTED,
    assert_close,
    over_partitioners,
    specs,
    split,
)

RNG = np.random.default_rng(0)


@over_partitioners
def test_devices_in_any_order(partitioner):
    def fn(x, w):
        x = mesh_split(x, PERMUTED, [None, "Y"])
        w = mesh_split(w, PERMUTED, ["Y", None])
        return mesh_split(tf.matmul(x, w), PERMUTED, ["X", None])

    x, w = RNG.standard_normal([2, 8, 8], np.float32)
    program = compile_program(
        fn,
        specs([x, w]),
        PERMUTED,
        in_shardings=[split("X", "Y", mesh=PERMUTED), None],
        partitioner=partitioner,
    )
    out = program(x, w)
    np.testing.assert_allclose(out, x @ w, rtol=1e-5, atol=1e-5)
    assert [c.axes for c in program.collectives() if c.kind == "all-reduce"] == [("Y",)]
    # Each device holds what its place in the mesh says.
    row_of = {int(id_): row for row, ids in enumerate(PERMUTED.ids) for id_ in ids}
    for piece in out.addressable_shards:
        assert piece.index[0].start == 4 * row_of[piece.device.id]
    # Argument shards are of 4 rows and 2 columns.
    for piece in program.shard(x, w)[0].addressable_shards:
        row, column = np.argwhere(PERMUTED.ids == piece.device.id)[0]
        np.testing.assert_array_equal(
            piece.data, x[4 * row : 4 * row + 4, 2 * column : 2 * column + 2]
        )


@over_partitioners
def test_dims_inside_the_program_need_not_divide(partitioner):
    def fn(x):
        y = mesh_split(tf.sin(x), MESH, ["Y", "X"])
        return replicate(tf.reduce_sum(y, axis=0))

    x = RNG.standard_normal([7, 3], np.float32)
    program = compile_program(fn, specs([x]), MESH, partitioner=partitioner)
    np.testing.assert_allclose(program(x), np.sin(x).sum(0), rtol=1e-5, atol=1e-5)
    assert "f32[2,2]" in program.hlo_text()  # A shard, the last ones padded.


@over_partitioners
def test_an_annotation_over_another_mesh_of_the_devices_is_honoured(partitioner):
    other = DeviceMesh(("data", "model"), (2, 4))
    flat = DeviceMesh(("all",), (8,))

    def fn(x):
        return {
            "names": mesh_split(x * 2, other, [None, "model"]),
            "flat": mesh_split(x * 3, flat, ["all", None]),
            "replicated": replicate(x * 4),
        }

    x = RNG.standard_normal([8, 8], np.float32)
    program = compile_program(fn, specs([x]), MESH, partitioner=partitioner)
    out = program(x)
    assert_close(
        program.unshard(out), {"names": x * 2, "flat": x * 3, "replicated": x * 4}
    )
    shards = {k: v.sharding.shard_shape(v.shape) for k, v in out.items()}
    assert shards == {"names": (8, 2), "flat": (1, 8), "replicated": (8, 8)}


@over_partitioners
@pytest.mark.parametrize(
    "annotation_mesh,mesh,message",
    [
        (
            DeviceMesh(("X", "Y"), (2, 2)),
            MESH,
            r"splits over 4 devices, 0 to 3, and th",
        ),
        (
            MESH,
            DeviceMesh(("X",), (1,)),
            r"splits over 8 devices, .* \(X=1\) has 1: two meshes are in",
        ),
        (
            DeviceMesh(("Y",), (1,)),
            MESH,
            r"over a mesh of one device, .* the program's",
        ),
        (DeviceMesh(("Y",), (2048,)), MESH, r"2046,2047.*: it splits over 2048"),
    ],
)
def test_an_annotation_that_the_mesh_cannot_honour_is_an_error(
    annotation_mesh, mesh, message, partitioner
):
    def fn(x):
        with tf.name_scope("stack/attention"):
            return mesh_split(x, annotation_mesh, ["Y", None])

    with pytest.raises(
        LoweringError,
        match=r"step: op 'stack/attention/XlaSharding' \(stack.attention, "
        r"compiler/test_program_annotations.py:\d+\) has an annotation that would "
        f"be dropped: .*{message}",
    ):
        compile_program(
            fn, [tf.TensorSpec([8, 8])], mesh, partitioner=partitioner, name="step"
        )


@over_partitioners
def test_any_mesh_of_the_programs_devices_is_honoured(partitioner):
    """GSPMD 3.1: another mesh for each tensor, in parts of axes or another order."""
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    for annotation in (
        lambda x: mesh_split(x, DeviceMesh(("A", "B"), (4, 2)), ["B", "A"]),
        lambda x: mesh_split(x, PERMUTED, ["X", "Y"]),
        lambda x: split_dim(x, 1, 8),
        lambda x: shard(x, np.array([[7, 1], [3, 2], [4, 5], [6, 0]])),
        lambda x: mesh_split(x, MESH, ["Y:(2)2", "Y:(1)2"]),
    ):
        program = compile_program(
            lambda x, annotation=annotation: tf.sin(annotation(x * 2.0)) + x,
            [tf.TensorSpec([8, 8])],
            MESH,
            in_shardings=[split("X", "Y")],
            out_shardings=split("X", "Y"),
            partitioner=partitioner,
        )
        np.testing.assert_allclose(program(x), np.sin(2 * x) + x, rtol=1e-6)
        # It is honoured: the data has to move.
        assert program.collectives()


@over_partitioners
def test_no_mesh_is_that_of_the_program_that_is_traced(partitioner):
    def fn(x):
        return tf.sin(mesh_split(x, None, ["X", "Y"]))

    spec = tf.TensorSpec([8, 8])
    program = compile_program(fn, [spec], MESH, partitioner=partitioner)
    x = np.ones([8, 8], np.float32)
    assert program(x).sharding.shard_shape((8, 8)) == (4, 2)
    outside = tf.function(fn)
    np.testing.assert_array_equal(fn(x), outside(x))
    with pytest.raises(ValueError, match="is of rank 1, and the tensor of rank 2"):
        mesh_split(x, None, ["X"])
    for before in outside, outside.get_concrete_function(spec):
        with pytest.raises(LoweringError, match="None in a function that was traced"):
            compile_program(
                lambda x, fn=before: fn(x), [spec], MESH, partitioner=partitioner
            )


@over_partitioners
def test_unspecified_dims_are_left_to_completion(partitioner):
    def fn(x, unspecified):
        y = mesh_split(x, MESH, ["X", None], unspecified_dims=unspecified)
        return tf.sin(y)

    for unspecified, want in ([], (("X",),)), ([1], (("X",), ("Y",))):
        program = compile_program(
            lambda x, dims=unspecified: fn(x, dims),
            [tf.TensorSpec([8, 8])],
            MESH,
            in_shardings=[split(None, "Y")],
            partitioner=partitioner,
        )
        out = program(np.ones([8, 8], np.float32))
        spec = [
            (axes,) if isinstance(axes, str) else axes for axes in out.sharding.spec
        ]
        while spec and spec[-1] is None:
            spec.pop()
        assert tuple(spec) == want


def test_every_annotation_goes_to_the_partitioner_asked_for():
    def text(partitioner):
        traced = trace_program(
            lambda x: mesh_split(x, MESH, ["X", "Y"]),
            [tf.TensorSpec([8, 8])],
            MESH,
            partitioner=partitioner,
        )
        with jax.interpreters.mlir.make_ir_context():
            return str(ir.Module.parse(traced.written.stable_hlo))

    shardy, gspmd = map(text, Partitioner)
    assert "sdy.sharding_constraint" in shardy and "@Sharding" not in shardy
    assert "@Sharding" in gspmd and "sdy" not in gspmd


def test_partitioners_do_not_disturb_each_other():
    x = RNG.standard_normal([8, 8], np.float32)
    setting = jax.config.jax_use_shardy_partitioner

    def compiled(partitioner):
        program = compile_program(
            lambda x: mesh_split(tf.sin(x), MESH, ["Y", "X"]),
            specs([x]),
            MESH,
            partitioner=partitioner,
        )
        assert jax.config.jax_use_shardy_partitioner == setting
        return program

    order = [Partitioner.SHARDY, Partitioner.GSPMD, Partitioner.SHARDY]
    programs = [compiled(partitioner) for partitioner in order]
    assert programs[0].hlo_text() == programs[2].hlo_text()
    for program in reversed(programs):
        out = program(x)
        np.testing.assert_allclose(out, np.sin(x), rtol=1e-5, atol=1e-6)
        assert out.sharding.shard_shape(out.shape) == (2, 4)
    # An error on the way leaves the setting alone as well.
    with pytest.raises(LoweringError):
        compile_program(
            lambda x: x,
            specs([x]),
            MESH,
            partitioner=Partitioner.GSPMD,
            compiler_options={"xla_no_such_option": True},
        )
    assert jax.config.jax_use_shardy_partitioner == setting


@over_partitioners
def test_what_tfs_own_functions_say_is_refused(partitioner):
    def region(x):
        sharding = split("X").to_op_sharding().SerializeToString()
        return gen_xla_ops.xla_spmd_full_to_shard_shape(x, sharding, dim=-1)

    def in_a_loop(x):
        def body(i, x):
            return i + 1, xla_sharding.split(tf.exp(x), 0, 8)

        return tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x))[1]

    for fn, message in [
        (region, "XlaSpmdFullToShardShape' .* is TF's own SPMDFullToShardShape"),
        # Some kernels put it on what the op becomes, some on parts of other shapes, and
        # some lose it.
        (lambda x: xla_sharding.split(tf.sin(x), 0, 8) + 1.0, "op 'Sin' "),
        (lambda x: xla_sharding.split(x * 2.0, 0, 8), "op 'mul' "),
        (lambda x: xla_sharding.split(tf.nn.relu(x), 0, 8), "op 'Relu' "),
        (
            lambda x: xla_sharding.split(x, 0, 8) + 1.0,
            "carries its sharding as an attr",
        ),
        (in_a_loop, "op '.*Exp' .* carries its sharding as an attribute, which would"),
    ]:
        with pytest.raises(LoweringError, match=message):
            compile_program(fn, [tf.TensorSpec([8])], MESH, partitioner=partitioner)
