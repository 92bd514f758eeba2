"""64-bit elements as arguments, results and state, against TF eager on one device.

JAX is at its default here, `jax_enable_x64` off, as in a user's process.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.explaining.explain import explain
from meshwright.framework.compiler.program import compile_program, trace_program
from meshwright.framework.compiler.weight_update_sharding.shard import UpdateSharding
from meshwright.framework.compiler.xla.jax_mesh import named_sharding
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.collectives import all_reduce, collective_permute
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard
from tests.framework.compiler.programs import MESH, over_partitioners, specs, split
from tests.framework.updates.updates import ALL

LARGE = 2**40
WIDE = [np.int64, np.uint64, np.float64, np.complex128]


@pytest.fixture(autouse=True)
def _setting_is_left_alone():
    assert not jax.config.jax_enable_x64
    yield
    assert not jax.config.jax_enable_x64
    assert jnp.asarray(np.int64(1)).dtype == jnp.int32


def numbers(dtype, *shape):
    """Values that 32 bits cannot hold."""
    count = np.arange(np.prod(shape)).reshape(shape)
    if np.issubdtype(dtype, np.integer):
        most = np.iinfo(dtype).max
        return (np.array(most - most // 7, dtype) + count.astype(dtype)).astype(dtype)
    value = 1 / 3 + count
    return (value * (1 - 0.7j) if dtype is np.complex128 else value).astype(dtype)


def of_one_device(fn):
    """TF's own compiled function: its random numbers are others than its eager ops'."""
    return tf.function(fn, jit_compile=True, autograph=False)


def run_like_tf(fn, args, partitioner, *, rtol=0.0, reference=lambda fn: fn, **how):
    """What a program gives, compared with what TF gives: eager, or by `reference`."""
    program = compile_program(
        fn, [specs(arg) for arg in args], MESH, partitioner=partitioner, **how
    )
    got = program.unshard(program(*args))
    want = reference(fn)(*tf.nest.map_structure(tf.constant, args))
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        b = np.asarray(b)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=0)
    return got


@over_partitioners
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("rows", [16, 13])
def test_arguments_and_results_keep_64_bits(partitioner, dtype, rows):
    def fn(x, y):
        x = mesh_split(x, MESH, ["X", "Y"])
        return {"same": x, "sum": x + y, "rows": tf.reduce_sum(x - y, axis=1)}

    x, y = numbers(dtype, rows, 6), np.array(3, dtype)
    # The sums of whole numbers wrap around, in the same way.
    exact = np.issubdtype(dtype, np.integer)
    run_like_tf(
        fn,
        [x, y],
        partitioner,
        rtol=0.0 if exact else 1e-14,
        in_shardings=[split("X", "Y"), None],
        out_shardings={"same": split("Y", "X"), "sum": split("X", "Y"), "rows": None},
    )


@over_partitioners
def test_gradients_are_those_of_float64(partitioner):
    def fn(w, x):
        w = mesh_split(w, MESH, [-1, "Y"])
        with tf.GradientTape() as tape:
            tape.watch([w, x])
            h = mesh_split(tf.tanh(x @ w), MESH, ["X", "Y"])
            loss = tf.reduce_mean(tf.square(h)) + 1e-12 * tf.reduce_sum(x)
        return loss, *tape.gradient(loss, [w, x])

    draw = np.random.default_rng(0)
    run_like_tf(
        fn,
        [draw.normal(size=[12, 20]), draw.normal(size=[16, 12])],
        partitioner,
        rtol=1e-12,
        in_shardings=[None, split("X")] and [split(None, "Y"), split("X", None)],
    )


@over_partitioners
def test_state_of_64_bits_goes_round_a_loop_and_is_donated(partitioner):
    def step(state, x):
        positive = tf.reduce_sum(tf.cast(x > 0, tf.int64), axis=0)
        noise = tf.random.stateless_normal(
            [10], tf.stack([state.seed, state.step]), dtype=tf.float64
        )
        return NestedMap(
            w=state.w - 0.1 * tf.reduce_mean(x, axis=0) + 1e-9 * noise,
            seen=state.seen + positive,
            seed=state.seed * 6364136223846793005 + 1442695040888963407,
            step=state.step + 1,
        )

    state = NestedMap(
        w=np.linspace(0, 1, 10),
        seen=np.full([10], LARGE),
        seed=np.int64(2**62 + 12345),
        step=np.int64(LARGE),
    )
    # 10 over 8 devices: stored padded.
    forms = NestedMap(w=split(("X", "Y")), seen=split(("X", "Y")), seed=None, step=None)
    program = compile_program(
        step,
        [specs(state), tf.TensorSpec([16, 10], tf.float64)],
        MESH,
        in_shardings=[forms, None],
        out_shardings=forms,
        donate=[0],
        partitioner=partitioner,
    )
    draw = np.random.default_rng(0)
    on_devices, one_device = program.shard(state), state.map(tf.constant)
    for _ in range(4):
        x = draw.normal(size=[16, 10])
        before = on_devices
        on_devices = program(on_devices, x)
        assert before.w.is_deleted() and before.seen.is_deleted()
        one_device = of_one_device(step)(one_device, tf.constant(x))
    assert on_devices.seen.shape == (16,) and on_devices.seen.dtype == np.int64
    got = program.unshard(on_devices)
    assert int(got.step) == LARGE + 4
    for name in ("seen", "seed", "step"):
        np.testing.assert_array_equal(got[name], one_device[name].numpy())
    np.testing.assert_allclose(got.w, one_device.w.numpy(), rtol=1e-14)


@over_partitioners
@pytest.mark.parametrize("indices", [16, 5, 3])
def test_gathers_by_int64_indices(partitioner, indices):
    def fn(table, ids):
        ids = mesh_split(ids, MESH, ["X"])
        rows = tf.gather(table, ids)
        return rows, tf.argmax(rows, axis=1), tf.argmin(rows, axis=0)

    ids = np.arange(indices, dtype=np.int64) * 7 % 24
    table = np.random.default_rng(0).normal(size=[24, 10])
    got = run_like_tf(
        fn, [table, ids], partitioner, in_shardings=[split(None, "Y"), split("X")]
    )
    assert got[1].dtype == np.int64


@over_partitioners
def test_random_numbers_of_an_int64_seed(partitioner):
    def fn(seed):
        return (
            tf.random.stateless_uniform([8, 6], seed, dtype=tf.float64),
            tf.random.stateless_uniform(
                [8], seed, minval=0, maxval=2**50, dtype=tf.int64
            ),
        )

    seed = np.array([2**40 + 1, -(2**50)])
    run_like_tf(
        fn,
        [seed],
        partitioner,
        reference=of_one_device,
        out_shardings=(split("X", None), split("Y")),
    )


@over_partitioners
def test_what_counts_in_64_bits_inside_of_a_program(partitioner):
    def fn(x, n):
        def body(i, total):
            return i + 1, mesh_split(total + tf.cast(i, tf.int64) * x, MESH, ["X"])

        i, total = tf.while_loop(lambda i, _: i < n, body, (n - 5, x))
        first = tf.cond(i > LARGE, lambda: total[0], lambda: total[1])
        return (
            i,
            total,
            first,
            tf.sort(x, direction="DESCENDING"),
            tf.cumsum(x),
            tf.math.unsorted_segment_sum(x, x % 3, 3),
            tf.bitwise.right_shift(x, tf.constant(3, tf.int64)),
            tf.one_hot(x % 3, 3, dtype=tf.float64),
        )

    x = numbers(np.int64, 16)[::-1] // 1000
    run_like_tf(fn, [x, np.int64(LARGE + 3)], partitioner, in_shardings=None)


@over_partitioners
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("manual_axes", [None, ["X"]])
def test_collectives_of_manual_regions(partitioner, dtype, manual_axes):
    def body(x):
        shifted = collective_permute(x, MESH, "X", [(0, 1), (1, 0)])
        return all_reduce(x, MESH, "X") + 3 * shifted

    dims = ["X", None]
    region = manual_partition(
        body, mesh=MESH, manual_axes=manual_axes, in_dims=[dims], out_dims=dims
    )

    def single_device(x):
        return tf.concat([x[:4] + 4 * x[4:], 4 * x[:4] + x[4:]], 0)

    run_like_tf(
        region,
        [numbers(dtype, 8, 16)],
        partitioner,
        reference=lambda _: single_device,
        rtol=1e-14 if dtype in (np.float64, np.complex128) else 0.0,
    )


@over_partitioners
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.complex128])
def test_partial_sums(partitioner, dtype):
    def fn(x, y):
        p = mesh_split(
            tf.einsum("bm,bn->mn", x, y), MESH, [None, None], unreduced=["X"]
        )
        return reshard(p - 3 * p, MESH, [None, None])

    def single_device(x, y):
        return -2 * tf.einsum("bm,bn->mn", x, y)

    run_like_tf(
        fn,
        [numbers(dtype, 8, 4), numbers(dtype, 8, 6)],
        partitioner,
        reference=lambda _: single_device,
        rtol=0.0 if dtype is np.int64 else 1e-13,
        in_shardings=[split("X", None), split("X", None)],
    )


@over_partitioners
def test_convolutions_and_their_gradients(partitioner):
    def fn(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.nn.conv2d(x, kernel, 1, "SAME")
            loss = tf.reduce_sum(tf.sin(mesh_split(y, MESH, ["X", "Y", -1, -1])))
        return loss, *tape.gradient(loss, [x, kernel])

    draw = np.random.default_rng(0)
    run_like_tf(
        fn,
        [draw.normal(size=[4, 8, 6, 3]), draw.normal(size=[3, 3, 3, 4])],
        partitioner,
        rtol=1e-10,
        in_shardings=[split("X", "Y", None, None), None],
    )


def adam_step(state, x):
    """As Keras has it: `iterations` of 64 bits, one branch for every second step."""
    with tf.GradientTape() as tape:
        tape.watch(state.w)
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ state.w) - 0.5))
    g = tape.gradient(loss, state.w)
    iterations = state.iterations + 1
    t = tf.cast(iterations - LARGE, tf.float64)
    m, v = 0.9 * state.m + 0.1 * g, 0.99 * state.v + 0.01 * g * g
    update = 0.01 * m / (1 - 0.9**t) / (tf.sqrt(v / (1 - 0.99**t)) + 1e-7)
    w = tf.cond(iterations % 2 == 0, lambda: state.w - update, lambda: state.w)
    positive = tf.reduce_sum(tf.cast(x > 0, tf.int64), axis=0)
    seen = state.seen + positive[:, None]
    new = NestedMap(w=w, m=m, v=v, iterations=iterations, seen=seen)
    return {"state": new, "loss": loss}


@over_partitioners
def test_sharded_weight_updates(partitioner):
    mesh = DeviceMesh(("data",), (8,))
    draw = np.random.default_rng(0)
    state = NestedMap(
        w=draw.normal(size=[13, 24]),
        m=np.zeros([13, 24]),
        v=np.zeros([13, 24]),
        iterations=np.int64(LARGE),
        seen=np.full([13, 24], LARGE),
    )
    replicated = state.map(lambda leaf: Sharding.replicated(mesh, np.ndim(leaf)))
    program = trace_program(
        adam_step,
        [specs(state), tf.TensorSpec([16, 13], tf.float64)],
        mesh,
        in_shardings=[replicated, Sharding.from_dims_mapping(mesh, ["data", -1])],
        out_shardings={"state": replicated, "loss": None},
        donate=[0],
        partitioner=partitioner,
        update_sharding=UpdateSharding(mode=ALL, data_axes=("data",)),
    ).compile()
    assert {line.names for line in program.updates.lines if line.format} == {
        ("m", "v", "w"),
        ("seen",),
    }
    on_devices, eager = program.shard(state), state.map(tf.constant)
    for _ in range(4):
        x = draw.normal(size=[16, 13])
        out = program(on_devices, x)
        on_devices, eager = out["state"], adam_step(eager, tf.constant(x))["state"]
    assert on_devices.m.addressable_data(0).size < state.m.size
    for path, got in program.unshard(out)["state"].items_by_path():
        assert got.dtype == eager[path].dtype
        rtol = 1e-11 if got.dtype == np.float64 else 0
        np.testing.assert_allclose(got, eager[path], rtol=rtol, err_msg=path)


@pytest.mark.parametrize("dtype", WIDE)
def test_arrays_that_jax_has_seen_before_keep_64_bits(dtype):
    # JAX 0.10 remembers of a NumPy array the 32 bits that it made of it.
    x = numbers(dtype, 16)
    program = compile_program(
        lambda x: x,
        [specs(x)],
        MESH,
        in_shardings=[split("X")],
        out_shardings=split("X"),
    )
    for _ in range(3):
        cut = jax.device_put(x, program.arguments.shardings[0])
        assert cut.dtype.itemsize < x.dtype.itemsize
        np.testing.assert_array_equal(program(x), x)


def test_arrays_that_jax_cut_are_refused():
    x = np.arange(8)
    program = compile_program(
        lambda x: x, [specs(x)], MESH, out_shardings=split("X"), name="step"
    )
    with pytest.raises(ValueError, match=r"argument 0 is a device array int32.*x64"):
        program(jnp.asarray(x))
    with jax.enable_x64(True):
        given = jnp.asarray(x)
    result = program(given)
    np.testing.assert_array_equal(result, x)
    # JAX 0.10 calls this one int64 all the same.
    cut = jax.device_put(result, named_sharding(split(None)))
    assert cut.dtype == np.int64
    with pytest.raises(ValueError, match="called int64, but its elements are int32. J"):
        program(cut)


@over_partitioners
def test_bytes_are_counted(partitioner):
    x, z = numbers(np.int64, 16, 8), numbers(np.complex128, 16, 8)
    program = compile_program(
        lambda x, z: (x + 1, z * 2),
        [specs(x), specs(z)],
        MESH,
        in_shardings=[split("X", "Y"), split("X", None)],
        partitioner=partitioner,
    )
    assert program.memory().arguments == 16 * 8 * 8 // 8 + 16 * 8 * 16 // 2
    arguments = explain(program).tensors[:2]
    assert [argument.dtype for argument in arguments] == ["s64", "c128"]
    assert [argument.bytes for argument in arguments] == [16 * 8 * 8, 16 * 8 * 16]


def test_exported_programs_take_64_bits():
    x = numbers(np.int64, 16, 8)
    traced = trace_program(
        lambda x: (x + 1, tf.cast(x, tf.float64)),
        [specs(x)],
        MESH,
        in_shardings=[split("X", "Y")],
    )
    exported = jax.export.deserialize(bytearray(traced.export(["cpu", "cuda", "tpu"])))
    assert [a.dtype for a in (*exported.in_avals, *exported.out_avals)] == [
        np.int64,
        np.int64,
        np.float64,
    ]
