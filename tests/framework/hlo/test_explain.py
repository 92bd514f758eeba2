"""The completion report: who, where, why, and what it costs."""

import dataclasses
import functools
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.explaining.explain import TensorReport, Why
from meshwright.framework.compiler.explaining.inserted import InsertedCollective
from meshwright.framework.compiler.explaining.texts.explain_text import (
    tensor_name,
)
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.devices.topology import topology_devices
from meshwright.framework.sharding.collectives import all_gather, all_reduce
from meshwright.framework.sizes import counted
from tests.framework.hlo import reshards

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
    (match,) = (
        tensor
        for tensor in explanation.tensors
        if tensor.kind is kind and tensor.op_name.endswith(name)
    )
    return match


@over_partitioners
def test_arguments_and_results(partitioner):
    program, explanation = explained(partitioner)
    # What JAX says of what was left to completion.
    inferred = [program.arguments.shardings[2], program(*zeros(program))["x"].sharding]
    x, y = (str(split(*s.spec, *[None] * (2 - len(s.spec)))) for s in inferred)
    borders = {
        (t.kind, t.op_name): (t.shape, str(t.sharding), t.annotated)
        for t in explanation.tensors
        if t.kind is not Kind.INSIDE
    }
    assert borders == {
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
    (summed,) = (c for c in back.collectives if c.kind == "all-reduce")
    assert (summed.axes, summed.in_loop, summed.times) == (("Y",), True, 5)
    weight = tensor(explanation, "stack/dense/XlaSharding")
    assert weight.annotated and weight.sharding == split("X", "Y")
    assert (weight.layer, weight.source.line) == ("stack.dense", line("weight"))


@over_partitioners
def test_every_collective_of_the_program_is_accounted_for(partitioner):
    program, explanation = explained(partitioner)
    reported = [c for tensor in explanation.tensors for c in tensor.collectives]
    total = sum(c.own_bytes for c in (*reported, *explanation.elsewhere))
    assert total == sum(c.bytes for c in program.collectives())


@over_partitioners
def test_why_tensors_are_replicated(partitioner):
    explanation = explained(partitioner)[1]
    replicated = explanation.replicated()
    assert [tensor.bytes for tensor in replicated] == sorted(
        (tensor.bytes for tensor in replicated), reverse=True
    )
    why = {tensor.op_name: tensor.why_replicated for tensor in replicated}
    assert why["0.scale"] is Why.PLAN
    assert why["whole/mul"] is Why.NOTHING_SPLIT
    assert why["whole/XlaSharding"] is Why.ANNOTATED
    assert why["whole/Sum"] is Why.UNDECIDED
    assert "0.layer.w" not in why
    large = explanation.replicated(at_least=4 * 64)
    assert {tensor.bytes for tensor in large} == {4 * 64}
    assert "whole/mul" in {tensor.op_name for tensor in large}


def explain_fn(fn, shapes, partitioner, mesh=MESH, **kwargs):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return mw.explain(
        mw.compile_program(fn, specs, mesh, partitioner=partitioner, **kwargs)
    )


def whys(explanation):
    return {(t.kind, t.op_name): t.why_replicated for t in explanation.replicated()}


@over_partitioners
def test_a_border_tensor_that_does_not_divide_says_so(partitioner):
    def fn(x, z):
        y = mw.mesh_split(x, MESH, ["X", None])
        return tf.tanh(y), z + 1.0

    explanation = explain_fn(fn, [(63, 64), (63, 64)], partitioner)
    assert whys(explanation) == {
        (Kind.ARGUMENT, "0"): Why.UNEVEN,
        (Kind.RESULT, "0"): Why.UNEVEN,
        (Kind.ARGUMENT, "1"): Why.NOTHING_SPLIT,
        (Kind.RESULT, "1"): Why.NOTHING_SPLIT,
        (Kind.INSIDE, "add"): Why.NOTHING_SPLIT,
    }
    assert "its size does not divide; give its sharding and it is" in str(explanation)


@over_partitioners
def test_a_border_tensor_of_a_loop_that_does_not_divide_says_so(partitioner):
    def body(i, x):
        return i + 1, mw.mesh_split(tf.tanh(x), MESH, [None, "Y"])

    def fn(x):
        return tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x))[1]

    reasons = whys(explain_fn(fn, [(64, 63)], partitioner))
    assert reasons[Kind.ARGUMENT, "0"] is reasons[Kind.RESULT, "result"] is Why.UNEVEN


@over_partitioners
@pytest.mark.parametrize("uneven", [0, 1])
def test_tensors_of_one_type_in_a_loop_keep_their_own_reasons(uneven, partitioner):
    def body(i, x, y):
        xy = [tf.tanh(x), tf.sin(y)]
        xy[uneven] = mw.mesh_split(xy[uneven], MESH, [None, "Y"])
        return i + 1, *xy

    def fn(x, y):
        return tf.while_loop(lambda i, *_: i < 3, body, (tf.constant(0), x, y))[1:]

    reasons = whys(explain_fn(fn, [(64, 63), (64, 63)], partitioner))
    for kind in (Kind.ARGUMENT, Kind.RESULT):
        assert reasons[kind, str(uneven)] is Why.UNEVEN
        assert reasons[kind, str(1 - uneven)] is Why.NOTHING_SPLIT


@over_partitioners
def test_a_border_tensor_that_divides_is_not_called_uneven(partitioner):
    def fn(x):
        return tf.reduce_sum(mw.mesh_split(x, MESH, ["X", None])), x

    reasons = whys(explain_fn(fn, [(64, 64)], partitioner))
    assert reasons[Kind.RESULT, "0"] is reasons[Kind.INSIDE, "Sum"] is Why.UNDECIDED


@over_partitioners
def test_an_annotation_that_was_not_followed(partitioner):
    """Under GSPMD the result itself is what was annotated, and JAX replicates it."""

    def fn(x):
        return mw.mesh_split(tf.tanh(x), MESH, [None, "Y"])  # uneven

    explanation = explain_fn(fn, [(64, 63)], partitioner)
    match, text = tensor(explanation, "XlaSharding"), str(explanation)
    row = next(line for line in text.splitlines() if line.startswith("  XlaSharding"))
    assert match.annotated
    if partitioner is mw.Partitioner.SHARDY:
        assert (match.requested, match.why_replicated) == (None, None)
        assert row.split()[2:] == ["[_,Y]", "annotated"]
    else:
        assert (match.requested, match.why_replicated) == (split(None, "Y"), Why.UNEVEN)
        assert row.split()[2:] == ["[_,_]", "annotated"]
        assert "      annotated [_,Y], which completion did not follow\n" in text
    assert "annotated so" not in text


@over_partitioners
def test_an_annotation_with_open_dims_was_not_the_reason(partitioner):
    def fn(x, y):
        x = mw.mesh_split(tf.tanh(x), MESH, [None, None], unspecified_dims=[0, 1])
        y = mw.mesh_split(y, MESH, ["X", "Y"])
        y = mw.mesh_split(tf.tanh(y), MESH, ["X", None], unspecified_dims=[1])
        return x, mw.mesh_split(y, MESH, ["X", "Y"])

    explanation = explain_fn(fn, [(64, 64), (64, 64)], partitioner)
    assert whys(explanation)[Kind.INSIDE, "XlaSharding"] is Why.NOTHING_SPLIT
    assert tensor(explanation, "XlaSharding_2").sharding == split("X", "Y")
    assert [
        tensor.requested for tensor in explanation.tensors if tensor.requested
    ] == []


@over_partitioners
def test_annotations_over_other_device_orders_are_followed(partitioner):
    mesh = mw.DeviceMesh(("X", "Y"), (2, 4), (3, 1, 4, 0, 5, 7, 2, 6))
    order = np.array([5, 2, 7, 0, 1, 4, 3, 6]).reshape(8, 1)

    def fn(x, y):
        return mw.mesh_split(tf.tanh(x), mesh, ["Y", None]), mw.shard(y, order) + 1.0

    out = [None, mw.Sharding.replicated(mesh, 2)]
    explanation = explain_fn(
        fn, [(64, 64), (64, 64)], partitioner, mesh, out_shardings=out
    )
    annotated = [t for t in explanation.tensors if t.op_type == "XlaSharding"]
    assert len(annotated) == 2 and all(tensor.annotated for tensor in annotated)
    assert [tensor.requested for tensor in annotated] == [None, None]


@over_partitioners
def test_two_annotations_in_a_row_are_a_reshard(partitioner):
    def fn(x):
        x = mw.mesh_split(tf.tanh(x), MESH, ["X", None])
        x = mw.mesh_split(x, MESH, ["X", None])
        return tf.tanh(mw.mesh_split(tf.identity(x), MESH, [None, "X"]))

    explanation = explain_fn(fn, [(64, 64)], partitioner)
    resharded = {
        tensor.op_name: tensor.resharded_from
        for tensor in explanation.tensors
        if tensor.resharded_from is not None
    }
    assert resharded == {"XlaSharding_2": split("X", None)}
    lines = str(explanation).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  XlaSharding_2"))
    again = "      annotated again, differently: resharded from [X,_]"
    assert lines[at + 2] == again
    assert sum("annotated again" in line for line in lines) == 1


@over_partitioners
def test_collectives_of_manual_regions_are_shown(partitioner):
    def body(x):
        return all_reduce(x, MESH, "Y") + all_gather(x, MESH, "Y")[:8]  # manual

    def fn(x):
        over = mw.manual_partition(
            body, mesh=MESH, in_dims=[["X", "Y"]], out_dims=["X", None]
        )
        return over(x)

    explanation = explain_fn(fn, [(16, 16)], partitioner)
    lines = str(explanation).splitlines()
    at = lines.index("body")
    for name, collective in [
        ("all_reduce", "all-reduce"),
        ("all_gather", "all-gather"),
    ]:
        row = next(i for i, line in enumerate(lines) if line.startswith(f"  {name} "))
        assert row > at
        # HLO's words for the sharding leave no room for what comes after them.
        assert lines[row + 1].split() == ["inferred"]
        assert lines[row + 2] == f"      hlo/test_explain.py:{line('manual')}"
        assert lines[row + 3].startswith(f"      {collective} along Y, ")


@over_partitioners
def test_no_false_alarm(partitioner):
    explanation = explained(partitioner)[1]
    assert explanation.rematerialized() == []
    assert (
        "No tensor is gathered in full on every device without an annotation."
        in str(explanation)
    )


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
    (remat,) = explanation.rematerialized()
    assert (remat.tensor.layer, remat.tensor.line) == ("first.norm", line("from"))
    assert (remat.at.layer, remat.at.line) == ("second", line("to"))
    assert remat.bytes == 4 * reshards.SHAPE[0] * reshards.SHAPE[1]
    text = str(explanation)
    assert "f32[64,256] first.norm: XlaSharding (hlo/test_explain.py:" in text
    assert "wanted otherwise at second: Tanh (hlo/test_explain.py:" in text


@over_partitioners
def test_reads_well_at_80_columns(partitioner):
    text = str(explained(partitioner)[1])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(
        f"step over X=2, Y=4, completed by {partitioner.value}: replicated are "
    )
    assert "most is sent by all-" in " ".join(map(str.strip, lines[:3]))
    for heading in ("arguments", "results", "stack.dense", "whole"):
        assert heading in lines
    row = next(line for line in lines if line.startswith("  0.layer.w"))
    assert row.split() == ["0.layer.w", "f32[16,32]", "[X,Y]", "annotated"]
    at = next(i for i, line in enumerate(lines) if line.startswith("  MatMul_1 "))
    assert lines[at + 1] == f"      hlo/test_explain.py:{line('back')}"
    assert lines[at + 2].startswith("      all-gather along X, ")
    assert lines[at + 3].startswith("      all-reduce along Y, ")
    assert lines[at + 3].endswith(", 5 times in a loop")
    assert "its plan names no axis for these dims" in text


@over_partitioners
def test_a_summary_is_first(partitioner):
    explanation = explained(partitioner)[1]
    text = str(explanation)
    summary = text[: text.index("\nShown are")]
    annotated = sum(tensor.annotated for tensor in explanation.tensors)
    assert (
        f"\nOf {len(explanation.tensors)} tensors\n  {annotated} annotated\n" in summary
    )
    count = len(explanation.replicated())
    assert re.search(rf"\n  {count} left replicated +[\d.]+ [KM]?i?B\n", summary)
    assert "\n  0 gathered in full without an annotation\n" in summary
    rows = re.findall(r"  all-reduce along Y +([\d.]+) K?i?B, (\d+) times", summary)
    assert len(rows) == 1 and int(rows[0][1]) >= 5
    assert ", 1 times" not in text


@over_partitioners
def test_a_part_is_chosen_by_a_pattern_and_by_size(partitioner):
    explanation = explained(partitioner)[1]
    text = explanation.text(match=r"^stack\.den")
    assert text.startswith(str(explanation).split("\n")[0])
    assert "arguments" not in text.split("\n")
    inside = [tensor for tensor in explanation.tensors if tensor.layer == "stack.dense"]
    assert f"Shown: {len(inside)} tensors that match '^stack\\.den'." in text
    assert all(re.search(rf"\n  {tensor_name(tensor)} ", text) for tensor in inside)
    size = max(tensor.bytes for tensor in inside)
    text = explanation.text(match=r"^stack\.den", at_least=size)
    largest = [tensor for tensor in inside if tensor.bytes == size]
    assert f"Shown: {counted(len(largest), 'tensor')} that" in text
    text = explanation.text(match="no such layer")
    assert "There are no tensors that match 'no such layer'. Leave" in text
    assert "\n\n\n" not in text and "Left replicated:" not in text
    with pytest.raises(ValueError, match=r"match='up0\(': missing \), .*write \\ bef"):
        explanation.text(match="up0(")


def test_long_names_do_not_break_columns():
    name, long_type = "n" * 40, (1024, 1024, 1024, 4)
    rows = [
        TensorReport(
            kind=Kind.ARGUMENT,
            layer="",
            op_name=op_name,
            op_type="",
            source=None,
            shape=shape,
            dtype="f32",
            sharding=split("X", *[None] * (len(shape) - 1)),
            annotated=True,
            why_replicated=None,
            bytes=1,
            bytes_per_device=1,
        )
        for op_name, shape in (("w", (8,)), (name, (8,)), ("v", long_type))
    ]
    explanation = dataclasses.replace(
        explained(mw.Partitioner.SHARDY)[1], tensors=tuple(rows)
    )
    lines = str(explanation).splitlines()
    at = lines.index("arguments")
    assert lines[at + 1 : at + 6] == [
        f"  w{' ' * 34}f32[8]            [X]          annotated",
        f"  {name}",
        f"{' ' * 37}f32[8]            [X]          annotated",
        f"  v{' ' * 34}f32[1024,1024,1024,4]",
        f"{' ' * 55}[X,_,_,_]    annotated",
    ]


@pytest.mark.parametrize(
    ("axes", "where"),
    [
        (("X", "Y:(1)2"), "along X, Y:(1)2"),
        ((), "along no axis"),
        (None, "in groups that no axes make"),
    ],
)
def test_says_which_devices_a_collective_is_among(axes, where):
    collective = InsertedCollective(
        name="all-gather.1",
        kind="all-reduce",
        axes=axes,
        bytes=8,
        own_bytes=8,
        times=1,
        in_loop=False,
        shared_by=1,
    )
    assert collective.text == f"all-reduce {where}, 8 B"


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
