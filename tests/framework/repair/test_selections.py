"""What is compared with its own maximum is computed once."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.rewrites import selections
from meshwright.framework.compiler.stablehlo.tidy import tidy
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.collectives import Reduction, all_reduce
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import over_partitioners
from tests.operators.judging.apart import left_out

MESH = DeviceMesh(("X", "Y"), (2, 4))
RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((2, 16, 24)).astype(np.float32)
SPEC = tf.TensorSpec(X.shape)
OPTIMIZED = {"xla_backend_optimization_level": 3}  # As users' programs are.
QUICK = {"xla_backend_optimization_level": 0}
SEGMENTS = tf.constant(RNG.integers(0, 5, 16))


def halves(x, w):
    """Sums of two products, which XLA's CPU backend rounds in one way or another."""
    return x * w + 0.3 * x, x * w - 0.7 * x * x


def of_stacked_halves(x, w):
    return tf.reduce_max(tf.stack(halves(x, w)), 0)


def of_rows_in_a_loop(x, w):
    def step(i, total, y):
        y, _ = halves(y, w)
        return i + 1, total + tf.reduce_min(y, 0), y

    start = 0, tf.zeros(24), x
    return tf.while_loop(lambda i, *_: i < 3, step, start, maximum_iterations=3)[1]


def above_the_third(x, w):
    y = tf.concat(halves(x, w), 1)
    return tf.where(y >= tf.math.top_k(y, 3).values[:, 2:], y, 0)


def above_a_sorted_copy(x, w):
    """As a program that computes its operand twice, which XLA makes one."""
    return tf.where(halves(x, w)[0] >= tf.sort(halves(x, w)[0], 1)[:, 9:10], x, 0)


def of_written_rows(x, w):
    a, b = halves(x, w)
    return tf.tensor_scatter_nd_max(a, [[1], [3], [1]], b[:3])


PROGRAMS = {
    "stacked halves": of_stacked_halves,
    "split rows": lambda x, w: tf.reduce_max(mesh_split(x * w + x, MESH, [0, 1]), 0),
    "all elements": lambda x, w: tf.reduce_min(halves(x, w)[0] * w),
    "infinite norm": lambda x, w: tf.norm(halves(x, w)[1], ord=np.inf, axis=1),
    "segments": lambda x, w: tf.math.unsorted_segment_max(halves(x, w)[0], SEGMENTS, 5),
    "written rows": of_written_rows,
    "rows in a loop": of_rows_in_a_loop,
    "above the third": above_the_third,
    "above a sorted copy": above_a_sorted_copy,
}
over_programs = pytest.mark.parametrize("name", PROGRAMS)


def with_gradients(fn):
    def program(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            loss = tf.reduce_sum(fn(x, w) ** 2)
        return tape.gradient(loss, [x, w], unconnected_gradients="zero")

    return program


def branches(fn):
    """How many values of a function's program are computed once for all readers."""
    module = Module(lower(fn, [SPEC, SPEC]), MESH)
    with module.opened():
        tidy(module.write())
        selections.compute_once(module.write())
        return str(module.operation).count('"stablehlo.if"')


def assert_gradients(found, fn):
    for part, right in zip(
        found, with_gradients(fn)(*map(tf.constant, (X, W))), strict=True
    ):
        np.testing.assert_allclose(part, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("partitioner", "options"),
    [(Partitioner.SHARDY, OPTIMIZED), (Partitioner.GSPMD, QUICK)],
    ids=["Shardy", "GSPMD"],
)
@over_programs
def test_selections_have_the_gradients_of_tf(name, partitioner, options):
    fn = with_gradients(PROGRAMS[name])
    assert branches(fn)
    program = compile_program(
        fn, [SPEC, SPEC], MESH, partitioner=partitioner, compiler_options=options
    )
    assert_gradients(program(X, W), PROGRAMS[name])


def of_devices(x, w):
    def body(x, w):
        return all_reduce(tf.abs(halves(x, w)[1]), MESH, "Y", reduction=Reduction.MAX)

    split, whole = [[None, "Y"]] * 2, [None, None]
    return manual_partition(body, mesh=MESH, in_dims=split, out_dims=whole)(x, w)


def of_parts(x, w):
    return tf.reduce_max(tf.split(tf.abs(halves(x, w)[1]), 4, axis=1), 0)


@over_partitioners
def test_a_maximum_over_devices_has_the_gradient_of_tf(partitioner):
    program = compile_program(
        with_gradients(of_devices),
        [SPEC, SPEC],
        MESH,
        partitioner=partitioner,
        compiler_options=QUICK,
    )
    assert_gradients(program(X, W), of_parts)


@pytest.mark.parametrize(
    ("fn", "reference", "options"),
    [
        (of_stacked_halves, of_stacked_halves, OPTIMIZED),
        (PROGRAMS["infinite norm"], PROGRAMS["infinite norm"], QUICK),
        (of_devices, of_parts, QUICK),
    ],
    ids=["stacked halves", "infinite norm", "devices"],
)
def test_xla_gets_these_wrong_alone(fn, reference, options):
    """If they all fail with a new jaxlib, set `until` of the row."""
    with left_out(["values computed again"]):
        program = compile_program(
            with_gradients(fn), [SPEC, SPEC], MESH, compiler_options=options
        )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_gradients(program(X, W), reference)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: tf.nn.relu(halves(x, w)[0]),
        lambda x, w: tf.maximum(*halves(x, w)),
        lambda x, w: tf.clip_by_value(halves(x, w)[0], -1.0, 1.0),
        lambda x, w: tf.nn.log_softmax(halves(x, w)[0]),
        lambda x, w: tf.reduce_max(tf.matmul(x, w, transpose_b=True), 0),
        lambda x, w: tf.reduce_max(x, 0) + tf.reduce_max(w, 0),
        lambda x, w: tf.nn.max_pool1d((x * w + x)[None], 2, 2, "SAME"),
    ],
    ids=["relu", "maximum", "clip", "softmax", "product", "argument", "pool"],
)
def test_other_programs_stay_as_they_are(fn):
    assert not branches(with_gradients(fn))
