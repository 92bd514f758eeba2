"""How often programs are parsed, completed and lowered on their way to XLA."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.step_times import pass_time
from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.passes import run_passes
from meshwright.framework.compiler.program import compile_program, trace_program
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    dot_dims,
    shape_of,
    walk,
)
from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.weight_update_sharding.shard import UpdateSharding
from meshwright.framework.compiler.xla.mesh_program import Target
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard
from tests.framework.compiler.programs import over_partitioners

DATA = DeviceMesh(("data",), (8,))
ONE = DeviceMesh(("data",), (1,))
X = tf.TensorSpec([16, 64])
W = tf.TensorSpec([64, 64])
ROWS = Sharding.from_dims_mapping(DATA, ["data", None])
REPLICATED = Sharding.replicated(DATA, 2)
UPDATES = UpdateSharding(mode=WeightUpdateSharding.ALL, data_axes=("data",))


@pytest.fixture
def counts():
    """A function that counts what happened since its last call."""
    with pass_time.counting() as counted:

        def since():
            seen = {
                "parsed": counted.parsed,
                "completed": counted.completed,
                "lowered": len(counted.lowered_at),
            }
            counted.parsed = counted.completed = 0
            counted.lowered_at.clear()
            return seen

        yield since


def plain(x, w):
    return tf.tanh(mesh_split(x, DATA, ["data", None]) @ w)


def step(w, x):
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_mean(tf.square(x @ w))
    return {"state": w - 0.1 * tape.gradient(loss, w)}


def typed(x, w):
    columns = mesh_split(x, DATA, [None, "data"])
    y = mesh_split(columns @ w, DATA, [None, None], unreduced=["data"])
    return tf.tanh(reshard(y, DATA, ["data", None]))


def typed_step(w, x):
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_mean(tf.square(x @ w))
    gradient = tape.gradient(loss, w)
    gradient = mesh_split(gradient, DATA, [None, None], unreduced=["data"])
    return {"state": w - 0.1 * reshard(gradient, DATA, [None, None])}


STEP = {
    "in_shardings": [REPLICATED, ROWS],
    "out_shardings": {"state": REPLICATED},
    "update_sharding": UPDATES,
}


@pytest.mark.parametrize(
    ("fn", "args", "how", "completed"),
    [
        # Products are guarded, so repairs look at each program.
        pytest.param(plain, [X, W], {}, 1, id="plain"),
        pytest.param(step, [W, X], STEP, 2, id="updates"),
        pytest.param(typed, [X, W], {}, 2, id="typed"),
        pytest.param(typed_step, [W, X], STEP, 3, id="typed updates"),
    ],
)
def test_a_program_is_parsed_once_and_lowered_by_jax_once(
    fn, args, how, completed, counts
):
    traced = trace_program(fn, args, DATA, **how)
    assert counts() == {"parsed": 1, "completed": completed, "lowered": 0}
    if "update_sharding" in how:
        assert traced.updates.sharded
    traced.compile()
    # JAX parses it into its own context.
    assert counts() == {"parsed": 1, "completed": 0, "lowered": 1}


def test_on_one_device_nothing_is_completed(counts):
    compile_program(lambda x, w: tf.tanh(x @ w), [X, W], ONE)
    assert counts() == {"parsed": 2, "completed": 0, "lowered": 1}


def test_gspmd_completes_once_a_round(counts):
    trace_program(plain, [X, W], DATA, partitioner=Partitioner.GSPMD)
    assert counts() == {"parsed": 2, "completed": 0, "lowered": 1}


def test_completed_shardings_are_kept_until_a_pass_writes(counts):
    module = Module(lower(plain, [X, W]), DATA, in_forms=[None] * 2, out_forms=[None])
    with module.opened():
        before = str(module.operation)
        first = module.completed()
        assert module.completed() is first
        assert counts() == {"parsed": 1, "completed": 1, "lowered": 0}
        products = [op for op in walk(module.operation) if "dot" in op.name]
        assert [first.axes(op.results[0]) for op in products] == [{"data"}]
        assert str(module.operation) == before, "reading left something behind"
        module.write()
        second = module.completed()
        assert second is not first and second.shardings == first.shardings
        assert counts() == {"parsed": 0, "completed": 1, "lowered": 0}


CALLED = tf.function(lambda x: tf.sin(x) * 2.0, autograph=False)


@over_partitioners
@pytest.mark.parametrize("mesh", [ONE, DATA], ids=["one", "eight"])
def test_every_program_is_a_single_tidy_function(mesh, partitioner):
    """Also programs without typed annotations or sharded updates."""

    def fn(x, w):
        def body(i, total):
            weights = tf.cast(tf.transpose(w[i]), tf.bfloat16)
            return i + 1, total + tf.cast(CALLED(weights), tf.float32)

        y = CALLED(tf.reshape(x, x.shape))
        return y, tf.while_loop(lambda i, _: i < 4, body, (0, tf.zeros([8, 8])))[1]

    lowered = lower(fn, [X, tf.TensorSpec([4, 8, 8])])
    module = Module(lowered, mesh, in_forms=[None] * 2, out_forms=[None] * 2)
    run_passes(module, Target(partitioner=partitioner))
    with module.opened():
        ops = list(walk(module.operation))
        assert [op.name for op in ops].count("func.func") == 1
        assert not [op for op in ops if op.name == "func.call"]
        idle = [op for op in ops if op.name == "stablehlo.reshape"]
        assert all(op.operands[0].type != op.results[0].type for op in idle)
        # All layers are converted at once, before the loop.
        (loop,) = (op for op in ops if op.name == "stablehlo.while")
        assert "tensor<4x8x8xbf16>" in map(str, (v.type for v in loop.operands))


def test_a_conversion_moves_past_a_transpose_of_its_own():
    def fn(w):
        moved = tf.transpose(w)
        return moved, tf.cast(moved, tf.bfloat16)

    module = Module(lower(fn, [W]), DATA, in_forms=[None], out_forms=[None] * 2)
    run_passes(module, Target(partitioner=Partitioner.SHARDY))
    with module.opened():
        names = [op.name for op in walk(module.operation)]
    assert names.count("stablehlo.transpose") == 1


@over_partitioners
def test_a_sum_of_products_of_rows_is_a_single_product(partitioner):
    """As the gradient of a weight that `tf.matmul` broadcasts."""
    rows = tf.TensorSpec([16, 6, 5]), tf.TensorSpec([5, 3])

    def gradient(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = tf.matmul(mesh_split(x, DATA, ["data", None, None]), w)
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, w)

    program = compile_program(gradient, rows, DATA, partitioner=partitioner)
    assert "lhs_batch_dims" not in program.hlo_text()
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s.shape).astype(np.float32) for s in rows)
    got = program.unshard(program(x, w))
    want = 2 * np.einsum("bsm,bsh->mh", x, x @ w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def whole(*tensors):
    return [tf.cast(tensor, tf.int32) for tensor in tensors]


def products(x, y):
    return tf.matmul(x, y, transpose_a=True)


@pytest.mark.parametrize(
    ("fn", "batched"),
    [
        (lambda x, y: tf.reduce_sum(products(x, y), 0), 0),
        (lambda x, y: tf.reduce_sum(products(*whole(x, y)), 0), 0),
        (lambda x, y: tf.reduce_sum(products(x, y), 1), 1),
        (lambda x, y: tf.reduce_sum(products(x, y), [0, 1]), 1),
        (lambda x, y: tf.reduce_max(products(x, y), 0), 1),
        (lambda x, y: [z := products(x, y), tf.reduce_sum(z, 0)], 1),
        (lambda x, y: tf.reduce_sum(products(x[None], y[None]), 0), 1),
    ],
    ids=["sum", "integers", "other dim", "more", "maximum", "read twice", "some"],
)
def test_which_sums_of_products_are_single_products(fn, batched):
    specs = [tf.TensorSpec([4, 6, 5]), tf.TensorSpec([4, 6, 3])]
    lowered = lower(fn, specs)
    out = len(tf.nest.flatten(lowered.signature.outputs))
    module = Module(lowered, ONE, in_forms=[None] * 2, out_forms=[None] * out)
    run_passes(module, Target(partitioner=Partitioner.SHARDY))
    with module.opened():
        dots = [op for op in walk(module.operation) if "dot" in op.name]
        assert len(dots) == 1
        (rows, _), _ = dot_dims(dots[0], len(shape_of(dots[0].operands[0])))
        assert bool(rows) == bool(batched)


def test_threads_compile_at_once():
    programs, args = {}, [tf.TensorSpec([16, 16])] * 2

    def compile_scaled(number):
        programs[number] = compile_program(
            lambda x, w: number * plain(x, w), args, DATA
        )

    threads = [threading.Thread(target=compile_scaled, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = np.eye(16, dtype=np.float32)
    for number, program in programs.items():
        np.testing.assert_allclose(program(x, x), number * np.tanh(x), rtol=1e-6)
    assert len(programs) == 4
