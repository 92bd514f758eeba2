"""Programs: numbers on both partitioners, placement, donation, reports, bad input."""

import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.extend.mlir import ir
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.compiler.xla.experimental import xla_sharding

from meshwright.framework.compiler import jax_bridge
from meshwright.framework.compiler.lower import LoweringError, lower
from meshwright.framework.compiler.program import Partitioner, compile_program
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import mesh_split, replicate, shard
from meshwright.framework.sharding.annotations import split as split_dim
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y"), (2, 4))
PERMUTED = DeviceMesh(("X", "Y"), (2, 4), (3, 1, 4, 0, 5, 7, 2, 6))
# B batch, M in, H out: B and H do not divide.
B, M, H = 9, 10, 6
RNG = np.random.default_rng(0)
STATE = NestedMap(
    layer=NestedMap(w=RNG.standard_normal([M, H], np.float32)), count=np.int32(4)
)
BATCH = {"x": RNG.standard_normal([B, M], np.float32), "skip": np.bool_(False)}
over_partitioners = pytest.mark.parametrize("partitioner", Partitioner, scope="module")


def split(*dims_mapping, mesh=MESH):
    return Sharding.from_dims_mapping(mesh, dims_mapping)


def specs(nest):
    return tf.nest.map_structure(lambda v: tf.TensorSpec(v.shape, v.dtype), nest)


def train_step(state, batch):
    w, x = state.layer.w, batch["x"]
    y = mesh_split(tf.matmul(x, w), MESH, ["X", "Y"])
    dw = tf.matmul(x, y, transpose_a=True)
    w = tf.where(batch["skip"], w, w - 0.1 * dw)
    state = NestedMap(layer=NestedMap(w=w), count=state.count + 1)
    return state, {"loss": tf.reduce_mean(y**2), "y": y}


def in_numpy(state, batch):
    y = batch["x"] @ state.layer.w
    w = state.layer.w - 0.1 * batch["x"].T @ y
    state = NestedMap(layer=NestedMap(w=w), count=state.count + 1)
    return state, {"loss": np.mean(y**2), "y": y}


def assert_close(got, want):
    tf.nest.assert_same_structure(got, want)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def program(partitioner):
    state = NestedMap(layer=NestedMap(w=split("X", "Y")), count=split())
    return compile_program(
        train_step,
        [specs(STATE), specs(BATCH)],
        MESH,
        in_shardings=[state, {"x": split("X", None), "skip": None}],
        out_shardings=(state, {"loss": None, "y": split("X", "Y")}),
        donate=[0],
        partitioner=partitioner,
    )


@over_partitioners
def test_computes_what_numpy_does_from_host_arrays(program):
    assert_close(program.unshard(program(STATE, BATCH)), in_numpy(STATE, BATCH))


@over_partitioners
def test_results_feed_the_next_call(program):
    state, _ = program(STATE, BATCH)
    assert_close(
        program.unshard(program(state, BATCH)),
        in_numpy(in_numpy(STATE, BATCH)[0], BATCH),
    )


@over_partitioners
def test_stores_in_even_shards_and_gives_back_the_exact_tensor(program):
    state, batch = program.shard(STATE, BATCH)
    assert isinstance(state, NestedMap) and isinstance(batch, dict)
    w = state.layer.w
    assert w.shape == (10, 8) and w.sharding.shard_shape(w.shape) == (5, 2)
    assert batch["x"].shape == (10, 10)
    assert program.inputs[0].layer.w.shape == (10, 8)
    assert program.outputs[1]["y"].shape == (10, 8)
    padded = np.asarray(w)
    np.testing.assert_array_equal(padded[:, :H], STATE.layer.w)
    assert not padded[:, H:].any()

    out = program(state, batch)
    assert out[1]["y"].shape == (10, 8)
    # Padding never leaks into the results, nor survives in the state.
    assert not np.asarray(out[0].layer.w)[:, H:].any()
    assert_close(program.unshard(out), in_numpy(STATE, BATCH))


@over_partitioners
def test_donated_arguments_are_taken_over(program):
    state, batch = program.shard(STATE, BATCH)
    w = state.layer.w
    new, _ = program(state, batch)
    jax.block_until_ready(new)
    assert w.is_deleted() and state.count.is_deleted()
    assert not batch["x"].is_deleted()
    message = "train_step: argument 0/count was donated to an earlier call"
    with pytest.raises(ValueError, match=message):
        program(state, batch)


@over_partitioners
def test_reports_memory_cost_and_collectives(program):
    memory = program.memory()
    w, count, x, skip = 5 * 2 * 4, 4, 5 * 10 * 4, 1
    assert memory.arguments == w + count + x + skip
    assert memory.aliased == w + count
    assert memory.outputs >= 2 * w + count
    assert memory.peak == (
        memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    )
    assert program.cost()["flops"] > 2 * 2 * (5 * 10 * 2)
    assert program.name == "train_step" and "HloModule" in program.hlo_text()
    found = {(c.kind, c.axes) for c in program.collectives()}
    assert ("all-gather", ("X",)) in found  # M of the weight.
    assert ("all-reduce", ("X",)) in found  # B of the weight's gradient.


@over_partitioners
@pytest.mark.parametrize(
    "batch,message",
    [
        (
            {"x": np.zeros([B, 7], np.float32), "skip": np.bool_(False)},
            r"train_step: argument 1/x has shape \(9, 7\), .* compiled for \(9, 10\)",
        ),
        (
            {"x": BATCH["x"], "skip": np.float32(0)},
            r"train_step: argument 1/skip is float32, .* compiled for bool",
        ),
        (
            {"x": BATCH["x"]},
            r"structure .*: missing \['1/skip'\], unknown \[\]",
        ),
    ],
)
def test_an_argument_that_is_not_what_was_compiled_for_is_refused(
    program, batch, message
):
    with pytest.raises(ValueError, match=message):
        program(STATE, batch)


@over_partitioners
def test_device_arrays_of_another_shape_or_kind_are_refused(program):
    placed = program.shard(STATE, BATCH)
    logical = jnp.zeros([B, M])  # The stored form has one row more.
    for x, message in [
        (
            logical,
            r"1/x is a device array float32\(9, 10\), .* takes float32\(10, 10\)",
        ),
        (jnp.zeros([10, 10], jnp.int32), r"1/x is a device array int32\(10, 10\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            program(placed[0], {**placed[1], "x": x})


@over_partitioners
def test_what_is_to_be_placed_has_the_structure_of_the_program(program):
    with pytest.raises(ValueError, match="its arguments .*unknown .'2/skip', '2/x'.$"):
        program.shard(STATE, BATCH, BATCH)
    with pytest.raises(ValueError, match="its results .*missing .*unknown .'count'"):
        program.unshard(STATE)


def test_integers_that_do_not_fit_are_refused():
    one = DeviceMesh(("X",), (1,))
    program = compile_program(lambda n: n + 1, [tf.TensorSpec([2], tf.int32)], one)
    with pytest.raises(ValueError, match="from 0 to 1099511627776, which int32 cannot"):
        program(np.array([0, 2**40]))
    assert program(np.array([-(2**31), 5])).tolist() == [1 - 2**31, 6]


def test_wider_host_arrays_are_narrowed():
    one = DeviceMesh(("X",), (1,))
    program = compile_program(
        lambda x, n: x * 2, [tf.TensorSpec([2]), tf.TensorSpec([], tf.int32)], one
    )
    out = program(np.array([1.0, 2.0]), 3)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, [2, 4])


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
    for own in out.addressable_shards:
        assert own.index[0].start == 4 * row_of[own.device.id]
    # Argument shards are of 4 rows and 2 columns.
    for own in program.shard(x, w)[0].addressable_shards:
        row, column = np.argwhere(PERMUTED.ids == own.device.id)[0]
        np.testing.assert_array_equal(
            own.data, x[4 * row : 4 * row + 4, 2 * column : 2 * column + 2]
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
            r"splits over 8 devices, .* \(X=1\) has 1: ann",
        ),
        (
            DeviceMesh(("Y",), (1,)),
            MESH,
            r"over a mesh of one device, and the program's",
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
        r"framework/test_program.py:\d+\) annotates what would be dropped: "
        f".*{message}",
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
    lowered = lower(lambda x: mesh_split(x, MESH, ["X", "Y"]), [tf.TensorSpec([8, 8])])

    def text(shardy):
        with jax.interpreters.mlir.make_ir_context():
            return str(ir.Module.parse(jax_bridge.stable_hlo(lowered, MESH, shardy)))

    assert "sdy.sharding_constraint" in text(True) and "@Sharding" not in text(True)
    assert "@Sharding" in text(False) and "sdy" not in text(False)


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
            lambda x: mesh_split(x, PERMUTED, ["Y", "X"]),
            specs([x]),
            MESH,
            partitioner=Partitioner.GSPMD,
        )
    assert jax.config.jax_use_shardy_partitioner == setting


def test_structures_of_shardings_may_leave_whole_branches_to_completion():
    def fn(state, x):
        return NestedMap(a=[x, state.layer.w], b={"c": state.count})

    program = compile_program(
        fn,
        [specs(STATE), tf.TensorSpec([8])],
        MESH,
        in_shardings=[None, split("Y")],
        out_shardings=NestedMap(a=[split(("Y", "X")), None], b=None),
    )
    x = np.arange(8, dtype=np.float32)
    out = program(STATE, x)
    assert out.a[0].sharding.shard_shape((8,)) == (1,)
    assert_close(
        program.unshard(out), NestedMap(a=[x, STATE.layer.w], b={"c": STATE.count})
    )


@pytest.mark.parametrize(
    "in_shardings,out_shardings,message",
    [
        ([{"y": split()}], None, r"do not have the entries \['x'\]"),
        ([split()], None, r"do not have the entries \['x'\]"),
        ([None, None], None, "do not match a sequence of 1"),
        (
            [{"x": split("X")}],
            None,
            r"1 dims but tensor 0/x has shape \(8, 8\)",
        ),
        (None, [split("X")], r"do not match a sequence of 2"),
        (None, [None, split("X")], r"1 dims but tensor 1 has shape \(8, 8\)"),
        (
            [{"x": split("X", None, mesh=PERMUTED)}],
            None,
            r"\[X,_\] is over another device mesh \(X=2, Y=4\) than the program",
        ),
    ],
)
def test_shardings_of_another_structure_or_rank_are_refused(
    in_shardings, out_shardings, message
):
    with pytest.raises(ValueError, match=message):
        compile_program(
            lambda batch: [batch["x"], batch["x"] * 2],
            [{"x": tf.TensorSpec([8, 8], name="x")}],
            MESH,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
        )


@pytest.mark.parametrize(
    "mesh,message",
    [
        (
            DeviceMesh(("X", "Y"), (4, 4)),
            "device mesh (X=4, Y=4) needs 16 devices but 8 cpu devices exist (no "
            "device 8); use a smaller mesh or, on CPU, ask for more",
        ),
        (DeviceMesh(("X",), (2,), (0, 9)), "8 cpu devices exist (no device 9)"),
    ],
)
def test_a_mesh_of_devices_that_do_not_exist_is_refused(mesh, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        compile_program(lambda x: x, [tf.TensorSpec([8])], mesh)


def test_an_argument_to_donate_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"donate=\[1\] for a program of 1 arguments"):
        compile_program(lambda x: x, [tf.TensorSpec([8])], MESH, donate=[1])


@pytest.mark.parametrize("dtype", [tf.int64, tf.float64])
def test_64_bit_arguments_are_refused(dtype):
    with pytest.raises(LoweringError, match="step: argument .* has 64-bit elements"):
        compile_program(lambda x: x, [tf.TensorSpec([8], dtype)], MESH, name="step")


def test_a_result_whose_sharding_no_axes_express_is_refused():
    def fn(x):
        x = tf.reshape(mesh_split(x, MESH, ["Y"]), [2, 8])
        return tf.reduce_sum(x, axis=0)  # GSPMD splits it in two along half of Y.

    spec = [tf.TensorSpec([16])]
    with pytest.raises(LoweringError, match="cannot express; give its out_shardings"):
        compile_program(fn, spec, MESH, partitioner=Partitioner.GSPMD)
    program = compile_program(
        fn, spec, MESH, partitioner=Partitioner.GSPMD, out_shardings=split("X")
    )
    x = np.arange(16, dtype=np.float32)
    np.testing.assert_array_equal(program(x), x[:8] + x[8:])
    # Its collectives span no whole axes.
    assert None in {c.axes for c in program.collectives()}


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


def test_describes_arrays_for_a_checkpoint():
    array = jax_bridge.abstract_array([8, 8], tf.bfloat16, split(("X", "Y"), None))
    assert array.shape == (8, 8) and array.dtype == jax.numpy.bfloat16
    assert array.sharding.shard_shape(array.shape) == (1, 8)


def test_the_platform_is_chosen_first_thing_in_the_process():
    code = """
        import os
        from meshwright.framework import set_platform
        set_platform("cpu", 2)
        assert "terminate_timeout_seconds=1200" in os.environ["XLA_FLAGS"]
        import jax
        assert len(jax.devices()) == 2
        set_platform("cpu", 2)
        set_platform("cpu")
        for platform, count in [("cpu", 4), ("cuda", None)]:
            try:
                set_platform(platform, count)
            except ValueError as e:
                print(e)
    """
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment.pop("JAX_PLATFORMS", None)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"{asked} devices were asked for but 2 cpu devices are in use already: choose "
        "the platform first thing in the process"
        for asked in ("4 cpu", "some cuda")
    ]


@pytest.mark.parametrize("text", ["[X,?]", "[X,_] manual{Y}", "[Y:(1)2,_]"])
def test_a_border_sharding_is_decided_and_of_whole_axes(text):
    sharding = Sharding.parse(MESH, text)
    for borders in ({"in_shardings": [sharding]}, {"out_shardings": sharding}):
        with pytest.raises(ValueError, match="at the border of a program every dim is"):
            compile_program(lambda x: x + 1, [tf.TensorSpec([8, 8])], MESH, **borders)


@pytest.mark.parametrize(
    "fn,args,message",
    [
        (lambda x: None, [tf.TensorSpec([2])], "step: the function returns None"),
        (lambda x: (x, None), [tf.TensorSpec([2])], "step: the function returns None"),
        (tf.sin, [np.ones([2])], "argument of type ndarray must be a tf.TensorSpec"),
    ],
)
def test_what_is_no_function_of_tensors_is_refused(fn, args, message):
    with pytest.raises(LoweringError, match=message):
        compile_program(fn, args, MESH, name="step")
