"""One program, run: numbers, placement, donation, reports, arguments refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import (
    MESH,
    assert_close,
    over_partitioners,
    specs,
    split,
)

# B batch, M in, H out: B and H do not divide.
B, M, H = 9, 10, 6
RNG = np.random.default_rng(0)
STATE = NestedMap(
    layer=NestedMap(w=RNG.standard_normal([M, H], np.float32)), count=np.int32(4)
)
BATCH = {"x": RNG.standard_normal([B, M], np.float32), "skip": np.bool_(False)}


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


def test_a_donated_buffer_is_no_other_argument():
    mesh = DeviceMesh(("X",), (4,))
    spec = tf.TensorSpec([8])
    program = compile_program(
        lambda a, b: (a + b["c"], b["c"] * 2), [spec, {"c": spec}], mesh, donate=[0]
    )
    host = np.ones(8, np.float32)
    out = program(host, {"c": host})  # Host arrays are not taken over.
    np.testing.assert_array_equal(out[1], 2 * host)
    (a, _) = program.shard(host, {"c": host})
    alias = jax.device_put(a, a.sharding)
    for again in (a, alias):
        with pytest.raises(
            ValueError,
            match=r"argument 1/c has the buffer of argument 0 too, and argument 0 is "
            r"donated: pass a copy, such as array\.copy\(\), or do not donate it",
        ):
            program(a, {"c": again})
    np.testing.assert_array_equal(program(a, {"c": a.copy()})[0], 2 * host)


def test_host_arrays_are_the_callers_again():
    mesh = DeviceMesh(("X",), (4,))
    spec = tf.TensorSpec([4, 256])
    program = compile_program(lambda a, b: a + b, [spec, spec], mesh, donate=[0])
    memory = np.zeros(4 * 256 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # JAX shares what is aligned to 64 bytes.
    host = memory[start:][: 4 * 256 * 4].view(np.float32).reshape(4, 256)
    host[:] = 1.0
    a, b = program.shard(host, host)
    host[:] = 7.0
    np.testing.assert_array_equal(program(a, b), np.full([4, 256], 2.0))


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
    collectives = {(c.kind, c.axes) for c in program.collectives()}
    assert ("all-gather", ("X",)) in collectives  # M of the weight.
    assert ("all-reduce", ("X",)) in collectives  # B of the weight's gradient.


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
def test_device_arrays_with_another_sharding_are_refused_by_name(program):
    state, batch = program.shard(STATE, BATCH)
    leaves = jax.tree.leaves(batch)
    index = next(i for i, leaf in enumerate(leaves) if leaf.shape == (10, 10))
    x = leaves[index]
    on_one_device = jax.device_put(np.asarray(x), jax.devices()[1])
    message = (
        r"train_step: argument 1/x is a device array with the sharding SingleDevice"
        r".*; the program takes .*: pass jax.device_put\(array, "
        rf"program.arguments.shardings\[{index + 2}\]\), or the host array"
    )
    with pytest.raises(ValueError, match=message):
        program(state, {**batch, "x": on_one_device})
    moved = jax.device_put(on_one_device, program.arguments.shardings[index + 2])
    assert_close(
        program.unshard(program(state, {**batch, "x": moved})), in_numpy(STATE, BATCH)
    )


@over_partitioners
def test_what_is_to_be_placed_has_the_structure_of_the_program(program):
    with pytest.raises(
        ValueError, match="its arguments .*: 3 of them, compiled for 2$"
    ):
        program.shard(STATE, BATCH, BATCH)
    with pytest.raises(ValueError, match="its results .*missing .*unknown .'count'"):
        program.unshard(STATE)


def test_integers_that_do_not_fit_are_refused():
    single = DeviceMesh(("X",), (1,))
    program = compile_program(lambda n: n + 1, [tf.TensorSpec([2], tf.int32)], single)
    with pytest.raises(ValueError, match="from 0 to 1099511627776, which int32 cannot"):
        program(np.array([0, 2**40]))
    assert program(np.array([-(2**31), 5])).tolist() == [1 - 2**31, 6]


def test_wider_host_arrays_are_narrowed():
    single = DeviceMesh(("X",), (1,))
    program = compile_program(
        lambda x, n: x * 2, [tf.TensorSpec([2]), tf.TensorSpec([], tf.int32)], single
    )
    out = program(np.array([1.0, 2.0]), 3)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, [2, 4])
