"""Sources: layer, file and line of ops, by the names that programs give them."""

import gc
import pathlib

import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.lowering.sources import Sources, program_name
from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import Context, WeightSpec, annotate_weights
from meshwright.framework.modeling.recompute import Recompute, split_function
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import mesh_split, replicate
from meshwright.framework.sharding.manual import auto_to_manual
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding

HERE = pathlib.Path(__file__)
X = tf.TensorSpec([4, 4])
CTX = Context(plan=ShardingPlan())


def line(marker: str) -> int:
    """The number of the line of this file that ends with `# marker`."""
    lines = HERE.read_text().splitlines()
    (number,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))
    return number


def hlo_names(lowered) -> set[str]:
    module = hlo_pb2.HloModuleProto.FromString(lowered.hlo)
    return {
        op.metadata.op_name
        for computation in module.computations
        for op in computation.instructions
    }


def helper(x):
    return tf.nn.softmax(x)  # softmax


@tf.function(autograph=False)
def called(x):
    return tf.tanh(x)  # in a call


def program(x):
    with CTX.scope("outer") as ctx, ctx.scope("inner"):
        y = helper(tf.matmul(x, x))  # matmul
    with tf.name_scope("no_layer"):
        y = y + called(x)  # call

    def body(i, y):
        with CTX.scope("looped"):
            return i + 1, tf.cos(y)  # in a loop

    def branch():
        return tf.sin(y)  # in a branch

    with CTX.scope("loops"):
        _, y = tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), y))  # loop
    return tf.cond(x[0, 0] > 0, branch, lambda: y)


@pytest.fixture(scope="module")
def lowered():
    lowered = lower(program, [X])
    gc.collect()  # TF takes a function's graphs apart when nobody holds it.
    return lowered


@pytest.mark.parametrize(
    ("name", "op_type", "layer", "marker"),
    [
        ("outer/inner/MatMul", "MatMul", "outer.inner", "matmul"),
        ("outer/inner/Softmax", "Softmax", "outer.inner", "softmax"),
        ("no_layer/PartitionedCall/Tanh", "Tanh", "no_layer", "in a call"),
        ("no_layer/add", "AddV2", "no_layer", "call"),
        ("loops/while/looped/Cos", "Cos", "looped", "in a loop"),
        ("loops/while", "StatelessWhile", "loops", "loop"),
        ("cond/Sin", "Sin", "", "in a branch"),
    ],
)
def test_finds_layer_file_and_line(lowered, name, op_type, layer, marker):
    # TF numbers names that repeat, and calls whichever way it likes.
    source = lowered.signature.sources.find(name) or lowered.signature.sources.find(
        name.replace("Partitioned", "StatefulPartitioned")
    )
    assert source is not None
    assert (source.op_type, source.layer) == (op_type, layer)
    assert (source.file, source.line) == (str(HERE), line(marker))
    assert str(source) == f"lowering/test_sources.py:{line(marker)}"
    assert not source.is_gradient


def test_names_are_those_of_the_compiled_program(lowered):
    """All that HLO names, except what XLA makes itself, is found by that name."""
    names = hlo_names(lowered) - {"", "XLA_Args", "XLA_Retvals"}
    assert len(names) > 7
    assert [
        name for name in names if lowered.signature.sources.find(name) is None
    ] == []


def test_what_jax_and_xla_add_to_a_name_is_taken_off(lowered):
    name = "outer/inner/MatMul"
    assert program_name(f"jit(train)/tf_program/{name}") == name
    assert program_name(f"jit(train)/tf_program/call.12/{name}") == name
    merged = f"jit(train)/tf_program/no_layer/add;outer/inner/{'MatMul'}"
    assert lowered.signature.sources.find(merged).op_type == "MatMul"
    assert lowered.signature.sources.find("args[0]") is None
    assert lowered.signature.sources.find("") is None


def test_ops_of_one_name_are_told_apart_by_shape():
    def loops(x):
        first = lambda i, y: (i + 1, tf.tanh(y))  # noqa: E731  # first
        second = lambda i, y: (i + 1, tf.tanh(y))  # noqa: E731  # second
        for body, y in ((first, x), (second, x[:2])):
            # Not scoped by the name of the graph that they lie in.
            with tf.name_scope("same/"):
                outputs = tf.while_loop(
                    lambda i, _: i < 2, body, (tf.constant(0), y), name="loop"
                )
            yield outputs[1]

    sources = lower(lambda x: list(loops(x)), [X]).signature.sources
    line_by_shape = {
        shape: source.line
        for shape in ((4, 4), (2, 4))
        for name in ("same/loop/Tanh", "same/loop_1/Tanh")
        if (source := sources.find(name, shape)) and shape in source.shapes
    }
    assert line_by_shape == {(4, 4): line("first"), (2, 4): line("second")}


def test_a_gradient_is_of_the_line_and_layer_of_its_forward_op():
    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with CTX.scope("dense"):
                y = tf.matmul(x, x)  # forward
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)  # gradient

    source = lower(fn, [X]).signature.sources.find("gradient_tape/dense/MatMul/MatMul")
    assert source.is_gradient
    assert (source.layer, source.line) == ("dense", line("forward"))


def test_gradients_without_scopes_are_of_the_line_that_reads_the_same():
    mesh = DeviceMesh(("X", "Y"), (2, 4))

    def fn(x, y, i, j):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            x, y = (mesh_split(table, mesh, ["X", "Y"]) for table in (x, y))
            first = tf.gather(x, mesh_split(i, mesh, ["X"]))  # first gather
            second = tf.gather(y, mesh_split(j, mesh, ["Y"]))  # second gather
            loss = tf.reduce_sum(first) + tf.reduce_sum(second**2)
        return tape.gradient(loss, [x, y])  # gradients

    index = tf.TensorSpec([8], tf.int32)
    traced = tf.function(fn, autograph=False)
    function = traced.get_concrete_function(X, X, index, index)
    sources = Sources(function)
    lines = {
        sources.find(op.name).line
        for op in function.graph.get_operations()
        if op.type == "UnsortedSegmentSum"
    }
    assert lines == {line("first gather"), line("second gather")}


def test_the_annotation_of_a_weight_names_the_weight():
    plan = ShardingPlan(mesh_shape=(2, 4), weights={"in": "X"})
    weight = WeightSpec(shape=(4, 4), dims=("in", "out"), initializer=Constant(0))
    specs = NestedMap(dense=NestedMap(w=weight))

    def fn(w):
        theta = annotate_weights(plan, specs, NestedMap(dense=NestedMap(w=w)))
        return theta.dense.w + 1.0

    source = lower(fn, [X]).signature.sources.find("XlaSharding")
    assert (source.op_type, source.layer) == ("XlaSharding", "dense.w")


def test_what_an_annotation_asks_for():
    mesh = DeviceMesh(("X", "Y"), (2, 4), (3, 1, 4, 0, 5, 7, 2, 6))

    def fn(x):
        y = mesh_split(x, mesh, ["Y", None], unspecified_dims=[1])
        return tf.tanh(replicate(y))

    sources = lower(fn, [X]).signature.sources
    matches = [sources.find(name) for name in ("XlaSharding", "XlaSharding_1", "Tanh")]
    first, second, none = (source.annotation for source in matches)
    assert first.sharding(mesh, 2) == Sharding.parse(mesh, "[Y,?]")
    assert second.sharding(mesh, 2) == Sharding.replicated(mesh, 2)
    assert none is None


def test_a_placeholder_is_no_layer():
    mesh = DeviceMesh(("X", "Y"), (2, 4))

    def fn(x):
        with tf.name_scope("dense"):
            return auto_to_manual(x, mesh, ["X", "Y"])

    sources = Sources(tf.function(fn, autograph=False).get_concrete_function(X))
    source = sources.find("dense/auto_to_manual/XlaCustomCallV2")
    assert (source.op_type, source.layer) == ("XlaCustomCallV2", "dense")


@pytest.mark.parametrize("recompute", [Recompute.EVERYTHING, Recompute.NOTHING])
def test_parts_cut_out_of_a_function_remember_its_lines(recompute):
    def layer(x):
        with CTX.scope("cut"):
            return [tf.tanh(tf.matmul(x, x))]  # cut

    def fn(x):
        split = split_function(layer, [X], [], [], recompute=recompute)
        y, *saved = split.forward(x)
        return split.backward(x, *saved, y)

    lowered = lower(fn, [X])
    names = hlo_names(lowered)
    (forward,) = (n for n in names if n.endswith("Call/cut/MatMul"))
    (backward,) = (n for n in names if n.endswith("gradients/cut/MatMul_grad/MatMul"))
    for name, is_gradient in ((forward, False), (backward, True)):
        source = lowered.signature.sources.find(name)
        assert (source.layer, source.line) == ("cut", line("cut"))
        assert source.file == str(HERE) and source.is_gradient is is_gradient


def test_functions_of_tf1_have_no_sources():
    """`tf.nn.ctc_loss` calls some; they keep no graph."""

    def fn(logits):
        lengths, labels = tf.fill([4], 3), tf.fill([4, 2], 1)
        return tf.nn.ctc_loss(
            labels,
            logits,
            tf.fill([4], 2),
            lengths,
            logits_time_major=False,
            blank_index=0,
        )

    sources = lower(fn, [tf.TensorSpec([4, 3, 5])]).signature.sources
    assert sources.find("ctc_loss_dense/TensorScatterAdd").line
