"""The completion report: who, where, why, and what it costs."""

import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.explain import Kind, Why
from meshwright.framework.compiler.explain_text import bytes_text
from meshwright.framework.compiler.topology import topology_devices
from tests.framework import reshards

HERE = pathlib.Path(__file__)
MESH = mw.DeviceMesh(("X", "Y"), (2, 4))
B, M, H = 8, 16, 32
over_partitioners = pytest.mark.parametrize("partitioner", mw.Partitioner)


def split(*dims_mapping):
    return mw.Sharding.from_dims_mapping(MESH, dims_mapping)


def line(marker: str) -> int:
    lines = HERE.read_text().splitlines()
    (number,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))
    return number


def step(state, batch):
    """A product in a loop, a second one, and things nobody splits."""
    ctx = mw.Context()
    w = state.layer.w
    with ctx.scope("stack") as ctx, ctx.scope("dense"):
        w = mw.mesh_split(w, MESH, ["X", "Y"])  # weight

        def body(i, x):
            y = mw.mesh_split(tf.matmul(x, w), MESH, ["X", "Y"])  # forth
            return i + 1, tf.tanh(tf.matmul(y, w, transpose_b=True))  # back

        x = tf.while_loop(lambda i, _: i < 5, body, (tf.constant(0), batch))[1]
    with tf.name_scope("whole"):
        table = tf.cast(tf.range(64), tf.float32) * state.scale  # unsplit
        table = mw.replicate(table[:, None] * state.scale)  # annotated
        near = tf.reduce_sum(x) + tf.reduce_sum(table)  # sum
    return mw.NestedMap(x=x * near, layer=mw.NestedMap(w=state.layer.w))


@functools.cache
def explained(partitioner):
    state = mw.NestedMap(
        layer=mw.NestedMap(w=tf.TensorSpec([M, H])), scale=tf.TensorSpec([])
    )
    weight = mw.NestedMap(w=split("X", "Y"))
    program = mw.compile_program(
        step,
        [state, tf.TensorSpec([B, M])],
        MESH,
        in_shardings=[mw.NestedMap(layer=weight, scale=split()), None],
        out_shardings=mw.NestedMap(x=None, layer=weight),
        partitioner=partitioner,
    )
    return program, mw.explain(program)


def zeros(program):
    return tf.nest.map_structure(lambda s: np.zeros(s.shape), program.inputs)


def tensor(explanation, name, kind=Kind.INSIDE):
    (found,) = (
        one
        for one in explanation.tensors
        if one.kind is kind and one.op_name.endswith(name)
    )
    return found


@over_partitioners
def test_arguments_and_results(partitioner):
    program, explanation = explained(partitioner)
    # What JAX says of what was left to completion.
    inferred = [program._in_shardings[2], program(*zeros(program))["x"].sharding]
    x, y = (str(split(*one.spec, *[None] * (2 - len(one.spec)))) for one in inferred)
    found = {
        (one.kind, one.op_name): (one.shape, str(one.sharding), one.annotated)
        for one in explanation.tensors
        if one.kind is not Kind.INSIDE
    }
    assert found == {
        (Kind.ARGUMENT, "0.layer.w"): ((M, H), "[X,Y]", True),
        (Kind.ARGUMENT, "0.scale"): ((), "[]", True),
        (Kind.ARGUMENT, "1"): ((B, M), x, False),
        (Kind.RESULT, "layer.w"): ((M, H), "[X,Y]", True),
        (Kind.RESULT, "x"): ((B, M), y, False),
    }
    weight = tensor(explanation, "layer.w", Kind.ARGUMENT)
    assert (weight.dtype, weight.bytes) == ("f32", 4 * M * H)
    assert weight.bytes_per_device == weight.bytes // MESH.size
    assert weight.source is None and weight.layer == ""


@over_partitioners
def test_tensors_inside_have_layer_source_sharding_and_collectives(partitioner):
    explanation = explained(partitioner)[1]
    forth = tensor(explanation, "while/MatMul")
    assert (forth.layer, forth.op_type) == ("stack.dense", "MatMul")
    assert forth.source.file == str(HERE) and forth.source.line == line("forth")
    assert (forth.shape, forth.dtype) == ((B, H), "f32")
    assert forth.sharding == split("X", "Y") and not forth.annotated
    assert (forth.bytes, forth.bytes_per_device) == (4 * B * H, 4 * B * H // 8)
    assert forth.why_replicated is None
    back = tensor(explanation, "while/MatMul_1")
    assert back.source.line == line("back")
    (summed,) = (one for one in back.collectives if one.kind == "all-reduce")
    assert (summed.axes, summed.in_loop, summed.times) == (("Y",), True, 5)
    weight = tensor(explanation, "stack/dense/XlaSharding")
    assert weight.annotated and weight.sharding == split("X", "Y")
    assert (weight.layer, weight.source.line) == ("stack.dense", line("weight"))


@over_partitioners
def test_every_collective_of_the_program_is_accounted_for(partitioner):
    program, explanation = explained(partitioner)
    reported = [one for tensor in explanation.tensors for one in tensor.collectives]
    total = sum(
        one.bytes / one.shared_by for one in (*reported, *explanation.elsewhere)
    )
    assert total == pytest.approx(sum(one.bytes for one in program.collectives()))


@over_partitioners
def test_why_tensors_are_replicated(partitioner):
    explanation = explained(partitioner)[1]
    replicated = explanation.replicated()
    assert [one.bytes for one in replicated] == sorted(
        (one.bytes for one in replicated), reverse=True
    )
    why = {one.op_name: one.why_replicated for one in replicated}
    assert why["0.scale"] is Why.PLAN
    assert why["whole/mul"] is Why.NOTHING_SPLIT
    assert why["whole/XlaSharding"] is Why.ANNOTATED
    assert why["whole/Sum"] is Why.UNDECIDED
    assert "0.layer.w" not in why
    large = explanation.replicated(at_least=4 * 64)
    assert {one.bytes for one in large} == {4 * 64}
    assert "whole/mul" in {one.op_name for one in large}


@over_partitioners
def test_no_false_alarm(partitioner):
    explanation = explained(partitioner)[1]
    assert explanation.rematerialized() == []
    assert "No reshard makes a tensor whole on its way." in str(explanation)


@over_partitioners
def test_a_full_rematerialization_is_named_with_its_layer(partitioner):
    ctx = mw.Context()

    def fn(x):
        with ctx.scope("first") as first, first.scope("norm"):
            x = mw.mesh_split(x, MESH, ["X", None])  # from
        with ctx.scope("second"):
            return mw.mesh_split(tf.tanh(x), MESH, [None, "Y"])  # to

    program = mw.compile_program(
        fn, [tf.TensorSpec(reshards.SHAPE)], MESH, partitioner=partitioner
    )
    explanation = mw.explain(program)
    (found,) = explanation.rematerialized()
    assert (found.tensor.layer, found.tensor.line) == ("first.norm", line("from"))
    assert (found.at.layer, found.at.line) == ("second", line("to"))
    assert found.bytes == 4 * reshards.SHAPE[0] * reshards.SHAPE[1]
    text = str(explanation)
    assert "f32[64,256] first.norm: XlaSharding (framework/test_explain.py:" in text
    assert "wanted otherwise at second: Tanh (framework/test_explain.py:" in text


@over_partitioners
def test_reads_well_at_80_columns(partitioner):
    text = str(explained(partitioner)[1])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(
        f"step over X=2, Y=4, completed by {partitioner.value}: "
    )
    for heading in ("arguments", "results", "stack.dense", "whole"):
        assert heading in lines
    row = next(one for one in lines if one.startswith("  0.layer.w"))
    assert row.split() == ["0.layer.w", "f32[16,32]", "[X,Y]", "annotated"]
    at = next(i for i, one in enumerate(lines) if one.startswith("  MatMul_1 "))
    assert lines[at + 1] == f"      framework/test_explain.py:{line('back')}"
    assert lines[at + 2].startswith("      all-gather along X, ")
    assert lines[at + 3].startswith("      all-reduce along Y, ")
    assert lines[at + 3].endswith(", 5 times in a loop")
    assert "its plan names no axis for these dims" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_949, "9.9 kB"),
        (9_951, "10 kB"),
        (999_499, "999 kB"),
        (999_501, "1.0 MB"),
        (2 * 10**12, "2.0 TB"),
    ],
)
def test_bytes(size, text):
    assert bytes_text(size) == text


def test_one_result_and_nothing_replicated():
    def fn(x):
        return mw.mesh_split(tf.tanh(x), MESH, ["X", "Y"])

    explanation = mw.explain(mw.compile_program(fn, [tf.TensorSpec([8, 8])], MESH))
    assert tensor(explanation, "result", Kind.RESULT).sharding == split("X", "Y")
    assert explanation.replicated() == [] and explanation.elsewhere == ()
    assert "No tensor is left replicated." in str(explanation)


def test_a_program_for_a_tpu_topology():
    pytest.importorskip("libtpu")
    devices = topology_devices("v3:2x2")

    def fn(x, w):
        y = tf.nn.relu(tf.matmul(x, mw.mesh_split(w, MESH, ["X", "Y"])))
        y = mw.mesh_split(y, MESH, ["X", None])
        return mw.mesh_split(tf.tanh(y), MESH, [None, "Y"])

    specs = [tf.TensorSpec([64, 256]), tf.TensorSpec([256, 512])]
    explanation = mw.explain(mw.compile_program(fn, specs, MESH, devices=devices))
    product = tensor(explanation, "MatMul")
    assert product.sharding == split("X", "Y")
    assert ("all-gather", ("X",)) in [(c.kind, c.axes) for c in product.collectives]
    assert len(explanation.rematerialized()) == 1
