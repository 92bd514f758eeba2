"""What TF2XLA, XLA and JAX refuse, in our words: op, line, argument and remedy."""

import jax
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.compiler.lowering.lower import LoweringError, lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.repair import check
from meshwright.framework.compiler.stablehlo import module
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import MESH, split

X, N = tf.TensorSpec([8, 4]), tf.TensorSpec([], tf.int32)
IDS = tf.TensorSpec([8], tf.int32)
INPUT = np.random.default_rng(0).random([8, 4], np.float32)
HERE = r"lowering/test_errors.py:\d+"
ONE_DEVICE = DeviceMesh(("X",), (1,))


def masked(x):
    return tf.boolean_mask(x, x[:, 0] > 0.5)


@pytest.mark.parametrize(
    "fn,specs,result,op",
    [
        (masked, [X], r"0 of at most \[8, 4\]", "boolean_mask/Where"),
        (lambda x: {"a": x, "b": tf.unique(x).y}, [IDS], r"b of .* \[8\]", "Unique"),
        (lambda x: (x, tf.where(x > 0)), [X], r"1 of at most \[32, 2\]", "Where"),
        (lambda x, n: x[:n], [X, N], r"0 of at most \[8, 4\]", "strided_slice"),
        (
            lambda x, i: tf.dynamic_partition(x, i, 2),
            [X, IDS],
            r"0 of at most \[8, 4\]",
            "DynamicPartition",
        ),
    ],
)
def test_a_result_of_unknown_size_is_refused(fn, specs, result, op):
    with pytest.raises(
        LoweringError,
        match=rf"step: result {result} has a size that depends on values, made by op "
        rf"'{op}' \(.*{HERE}\): .* tf.where\(mask, x, 0\)",
    ):
        lower(fn, specs, name="step")


def sum_in_a_loop(x, n):
    return tf.while_loop(
        lambda i, _: i < n, lambda i, y: (i + 1, y + tf.reduce_sum(x[:i])), (0, 0.0)
    )[1]


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize(
    "fn,specs,op",
    [
        (lambda x: tf.reduce_sum(masked(x)), [X], "boolean_mask/Where"),
        (lambda x, n: tf.reduce_mean(x[:n]), [X, N], "strided_slice"),
        (sum_in_a_loop, [X, N], "while/strided_slice"),
        # GSPMD would end the process.
        (lambda x: tf.concat([masked(x), x], 0)[0], [X], "boolean_mask/Where"),
    ],
)
def test_a_tensor_of_unknown_size_is_refused_on_a_mesh(partitioner, fn, specs, op):
    with pytest.raises(
        LoweringError,
        match=rf"step: a tensor has a size that depends on values, made by op '{op}' "
        rf"\(.*{HERE}\): on a mesh every tensor has one shape",
    ):
        compile_program(fn, specs, MESH, partitioner=partitioner, name="step")


def test_a_tensor_of_unknown_size_runs_on_one_device():
    program = compile_program(lambda x: tf.reduce_sum(masked(x)), [X], ONE_DEVICE)
    np.testing.assert_allclose(program(INPUT), tf.reduce_sum(masked(INPUT)), rtol=1e-6)


def test_a_size_that_no_result_depends_on_does_not_matter():
    def fn(x, ids):
        return tf.math.unsorted_segment_sum(x, tf.unique(ids).idx, 8)

    ids = np.array([3, 3, 0, 1, 1, 1, 7, 2], np.int32)
    result = compile_program(fn, [X, IDS], MESH)(INPUT, ids)
    np.testing.assert_allclose(result, fn(INPUT, ids), rtol=1e-6)


@pytest.mark.parametrize(
    "fn,specs,op,argument",
    [
        (lambda n: tf.range(n), [N], "range", "0"),
        (lambda b: tf.fill([b["n"]], 1.0), [{"n": N, "x": X}], "Fill", "0/n"),
        (lambda x, n: tf.reduce_sum(x, axis=n), [X, N], "Sum", "1"),
        (lambda i: tf.math.bincount(i), [IDS], "bincount/DenseBincount", "0"),
    ],
)
def test_a_shape_from_the_values_of_arguments_is_refused(fn, specs, op, argument):
    with pytest.raises(
        LoweringError,
        match=rf"step: op '{op}' \(.*{HERE}\) takes a size, shape or axis from the "
        rf"values of argument {argument}, but .*: give it as a Python number",
    ):
        lower(fn, specs, name="step")


@tf.function
def counted(ids):
    return tf.math.bincount(ids)


def test_a_shape_from_values_in_a_called_function_is_refused():
    op = "bincount/DenseBincount"
    with pytest.raises(
        LoweringError, match=rf"op '{op}' \(.*{HERE}\) takes .* the values of tensors, "
    ):
        lower(lambda ids: counted(ids), [IDS])


def ragged_sums(x):
    return tf.reduce_sum(tf.RaggedTensor.from_row_lengths(x, [3, 5]), axis=1)


def bins(x):
    ids = tf.cast(x * 6, tf.int32)
    return tf.math.bincount(ids, minlength=6, maxlength=6, axis=-1)


def fewer_bins(x):
    ids = tf.cast(x * 6, tf.int32)
    return tf.math.bincount(ids, minlength=6, maxlength=3, axis=-1)


def categories(x):
    layer = tf.keras.layers.CategoryEncoding(num_tokens=6, output_mode="multi_hot")
    return layer(tf.cast(x * 6, tf.int32))


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize("fn", [ragged_sums, bins, fewer_bins, categories])
def test_sizes_that_are_constant_after_all_are_accepted(fn, partitioner):
    def split_fn(x):
        return fn(mesh_split(x, MESH, ["X", -1]))

    program = compile_program(split_fn, [X], MESH, partitioner=partitioner)
    want = tf.function(fn)(INPUT)
    assert tuple(program.outputs.shape) == want.shape
    np.testing.assert_allclose(program(INPUT), want, rtol=1e-6)


def test_a_result_whose_size_only_hlo_knows_cannot_be_split_as_it_is():
    with pytest.raises(
        ValueError,
        match=r"result 0 has shape \(None, None\), .* state them by tf.ensure_sh",
    ):
        compile_program(bins, [X], MESH, out_shardings=split("X", None))

    def sized(x):
        return tf.ensure_shape(bins(x), [8, 6])

    program = compile_program(sized, [X], MESH, out_shardings=split("X", None))
    np.testing.assert_array_equal(program(INPUT), bins(INPUT))


@pytest.mark.parametrize("size", [0, 3])
def test_a_list_that_grows_is_refused(size):
    def fn(x):
        rows = tf.TensorArray(tf.float32, size=size, dynamic_size=True)
        return tf.reduce_sum(rows.write(0, x).write(1, x).write(2, x).stack())

    with pytest.raises(
        LoweringError,
        match=rf"step: op 'TensorArrayV2Write/TensorListSetItem' \(.*{HERE}\) writes "
        "to a tf.TensorArray of dynamic_size=True, which XLA does not grow: give its ",
    ):
        lower(fn, [X], name="step")


def test_a_list_of_known_size_is_right():
    def fn(x):
        rows = tf.TensorArray(tf.float32, size=2)
        return rows.write(0, x).write(1, 2 * x).stack()

    results = compile_program(fn, [X], MESH)(INPUT)
    np.testing.assert_array_equal(results, [INPUT, 2 * INPUT])


@pytest.mark.parametrize("partitioner", Partitioner)
def test_what_xla_refuses_names_the_op_and_its_line(partitioner, monkeypatch):
    monkeypatch.setattr(check, "PRESENT", [])  # Else it is repaired.

    def fn(x, ids):
        with tf.name_scope("head"):
            rows = tf.gather(x, ids)
        return mesh_split(rows, MESH, ["Y", -1])

    specs = [tf.TensorSpec([4, 2]), tf.TensorSpec([4], tf.int32)]
    other = "GSPMD" if partitioner is Partitioner.SHARDY else "SHARDY"
    with pytest.raises(
        LoweringError,
        match=rf"step: XLA cannot compile it with .* at op 'head/GatherV2' \(head, "
        rf"{HERE}\): .*verifier.*\w. Try Partitioner.{other}, or annotate the op's ope",
    ):
        compile_program(
            fn,
            specs,
            MESH,
            in_shardings=[split(None, "X"), split("X")],
            partitioner=partitioner,
            name="step",
        )


def test_what_xla_does_not_know_has_another_remedy():
    with pytest.raises(LoweringError, match="such compile option: 'xla_so'. Give comp"):
        compile_program(lambda x: x, [X], MESH, compiler_options={"xla_so": 1})

    def fn(x):
        return xla.custom_call_v2("unheard_of", [x], [X])

    with pytest.raises(
        LoweringError, match=r"to unheard_of .* Leave the custom call out"
    ):
        compile_program(fn, [X], MESH)


def gradients_of_gathered(scaled):
    def fn(a, b, ids):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            table = tf.concat([a, b], 0)
            rows = tf.gather(table * 1.0 if scaled else table, ids)
            loss = tf.reduce_sum(rows**2)
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, [a, b])]

    return fn


def test_a_gather_from_concatenated_tables_has_its_own_remedy():
    specs, ids = [X, X, IDS], np.array([3, 3, 0, 9, 1, 1, 12, 2], np.int32)
    with pytest.raises(LoweringError, match="multiply the concatenated tensor"):
        compile_program(gradients_of_gathered(scaled=False), specs, MESH)
    remedied = gradients_of_gathered(scaled=True)
    program = compile_program(remedied, specs, MESH)
    right = remedied(*map(tf.constant, (INPUT, 2 * INPUT, ids)))
    for part, expected in zip(program(INPUT, 2 * INPUT, ids), right, strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-6)


def test_what_jax_cannot_read_is_refused(monkeypatch):
    def refuse(hlo):
        raise jax.errors.JaxRuntimeError("INTERNAL: Unsupported type: TUPLE.")

    monkeypatch.setattr(module, "stable_hlo_of", refuse)
    with pytest.raises(
        LoweringError,
        match=r"step: JAX cannot read .*: Unsupported type: TUPLE",
    ):
        compile_program(lambda x: x, [X], MESH, name="step")
