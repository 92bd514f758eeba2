"""`program.why`, and the reasons in `explain`: what they say, and of what."""

import dataclasses
import functools
import math
import re

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.explaining.provenance import Decided
from meshwright.framework.compiler.explaining.texts.explain_text import cause_lines
from meshwright.framework.compiler.explaining.why import COMPILED_NOTE, GSPMD_NOTE
from meshwright.framework.compiler.program import trace_program
from meshwright.framework.modeling import random
from tests.framework.hlo.why.why_programs import MESH, flat, kept, lies, traced

over_partitioners = pytest.mark.parametrize("partitioner", mw.Partitioner)


@functools.cache
def explained(partitioner):
    program = traced("looped", partitioner, lies("X", "Y")).compile()
    return program, mw.explain(program, reasons=True)


def one(answer):
    (found,) = answer.tensors
    return found


def test_a_tensor_is_found_by_its_name_its_path_its_line_and_its_kind():
    program = kept("looped")
    tanh = one(program.why("while/Tanh")).tensor
    assert one(program.why("Tanh")).tensor == tanh
    by_line = program.why(tanh.source)
    assert tanh in [found.tensor for found in by_line.tensors]
    assert one(program.why("argument 0")).tensor.shape == (16, 32)
    both = [found.tensor.kind.value for found in program.why("0").tensors]
    assert both == ["argument", "result"]


def test_an_answer_tells_origin_way_competition_and_what_is_sent():
    text = str(kept("looped").why("MatMul_1", "X"))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0].startswith("while/MatMul_1 f32[8,16] [_,X] at why/why_programs.py:")
    assert lines[1].startswith("X on dim 1 is from annotation XlaSharding [X,Y] at ")
    assert lines[2].startswith("across through while (")
    assert lines[3].startswith("forth through while/MatMul_1 (")
    assert "X on dim 0 splits while/XlaSharding beside it, at while/MatMul_1" in lines
    assert any(line.startswith("X on dim 1 won, from annotation") for line in lines)
    assert any(line.startswith("decided by the op") for line in lines)
    sent = lines.index("all-gather along X at while/MatMul_1, 256 B, 5 times in a loop")
    assert lines[sent + 1] == "while/matmul [X,Y] -> [_,Y]"
    assert lines[sent + 2].startswith("before: annotation while/XlaSharding [X,Y] at ")
    assert "along Y" not in text


def test_an_axis_that_splits_nothing_near_is_said_so():
    answer = kept("looped").why("while/add", "Y")
    alone = "as no tensor that shares a dim with it is split along that dim"
    assert flat(answer).endswith(f"is not split along Y: no axis reaches it, {alone}")


def test_the_reasons_of_gspmd_are_said_to_be_shardys():
    answer = flat(traced("reshards", mw.Partitioner.GSPMD).why("Relu"))
    assert answer.endswith(GSPMD_NOTE)
    assert GSPMD_NOTE not in flat(kept("reshards").why("Relu"))


@pytest.mark.parametrize(
    ("target", "axis", "message"),
    [
        (
            "MatMull_1",
            None,
            "no tensor, line or layer 'MatMull_1'; near it are 'while/",
        ),
        ("why_programs.py:1", None, "'why_programs.py:1'; near it are 'why/why_progra"),
        (
            "Zebra12345",
            None,
            "'Zebra12345'; it has '.*', and others: explain",
        ),
        ("while/Tanh", "Z", "unknown mesh axis 'Z'"),
        ("", None, "looped: '' is no name; pass that of a tensor or a layer"),
    ],
)
def test_what_is_not_there_is_refused_with_the_nearest_names(target, axis, message):
    with pytest.raises(ValueError, match=message):
        kept("looped").why(target, axis)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda program: program.why(3), "looped: 3 is no name; pass that of a tensor"),
        (lambda program: program.why("while/Tanh", 3), "axis is 3; pass one of the me"),
        (lambda program: mw.what_if(program, 3), "shardings is 3; pass a dict from a"),
    ],
)
def test_what_is_no_name_is_refused(ask, message):
    with pytest.raises(TypeError, match=message):
        ask(kept("looped"))


def test_a_mesh_of_one_device_has_no_reasons():
    mesh = mw.DeviceMesh(("X",), (1,))
    program = mw.compile_program(lambda x: x + 1, [tf.TensorSpec([4])], mesh)
    with pytest.raises(ValueError, match="has one device, so no tensor is split"):
        program.why("add")


def test_explain_tells_where_every_axis_comes_from():
    explanation = explained(mw.Partitioner.SHARDY)[1]
    known = explanation.known()
    assert known.axes == known.with_reason > 15
    text = str(explanation)
    assert f"{known.axes} of {known.axes} axes with their reason" in text
    assert "X on dim 1 is from annotation" in text
    assert GSPMD_NOTE.split(":")[0] not in text


@over_partitioners
def test_collectives_tell_what_they_bring_together(partitioner):
    explanation = explained(partitioner)[1]
    (back,) = (t for t in explanation.tensors if t.op_name == "while/MatMul_1")
    (gather,) = (c for c in back.collectives if c.kind == "all-gather")
    (between,) = gather.between
    assert (str(between.before), str(between.after)) == ("[X,Y]", "[_,Y]")
    assert [o.name for o in between.before_origins] == ["while/XlaSharding"]
    (total,) = (c for c in back.collectives if c.kind == "all-reduce")
    assert str(total.between[0].before) == "[_,X]{U:Y}"
    # Others at no tensor XLA made of what it moved out of loops.
    assert all(c.between for c in explanation.elsewhere if c.kind == "all-to-all")


def test_of_gspmd_only_axes_that_shardy_has_too_have_a_reason():
    explanation = explained(mw.Partitioner.GSPMD)[1]
    for tensor in explanation.tensors:
        for found in tensor.provenances:
            assert found.axis in tensor.sharding.dims[found.dim]
    assert explanation.known().with_reason > 10
    assert "GSPMD keeps no record of its reasons" in str(explanation)


def test_without_being_asked_explain_has_no_reasons():
    explanation = mw.explain(explained(mw.Partitioner.SHARDY)[0])
    assert not any(tensor.provenances for tensor in explanation.tensors)
    assert "with their reason" not in str(explanation)


def test_text_of_one_axis():
    explanation = explained(mw.Partitioner.SHARDY)[1]
    text = explanation.text(axis="Y")
    assert "that are split or sent along Y" in text
    assert "MatMul_1 " in text  # It is summed along Y.
    assert "Tanh " not in text
    with pytest.raises(ValueError, match="unknown mesh axis 'Z'"):
        explanation.text(axis="Z")


def test_what_was_traced_needs_no_compiling():
    assert str(kept("gradient").why("result 0")).startswith("result 0 f32[16,32]")
    assert kept("gradient").reasons.mesh == MESH


def gathered(w, x):
    """A sum's columns are gathered for an annotation that leaves out their axis."""
    hidden = tf.nn.relu(mw.mesh_split(x, MESH, ["X", None]) @ w)
    return mw.mesh_split(hidden, MESH, ["X", None])


@functools.cache
def gathering():
    return trace_program(
        gathered,
        [tf.TensorSpec([16, 32]), tf.TensorSpec([8, 16])],
        MESH,
        in_shardings=[lies(None, "Y"), None],
    )


def test_what_is_gathered_for_an_annotation_names_it():
    (sent,) = one(gathering().why("Relu", "Y")).transfers
    assert (sent.kinds, sent.axes) == (("all-gather",), ("Y",))
    assert [str(o) for o in sent.before_origins] == ["argument 0 [_,Y]"]
    (asked,) = sent.after_origins
    assert (asked.name, str(asked.sharding)) == ("XlaSharding_1", "[X,_]")


def test_the_annotation_of_what_it_is_put_on_decides():
    reason = one(gathering().why("Relu"))
    (lost,) = (c for c in reason.competitions if c.axis == "Y")
    assert lost.winner is None and lost.decided is Decided.ANNOTATED
    (found,) = reason.provenances
    assert "before all steps)" in str(found.way[0]) and found.step == -1


def test_xlas_collective_at_the_op_that_makes_a_tensor_has_its_reason():
    explanation = mw.explain(gathering().compile(), reasons=True)
    gathers = [
        c for t in explanation.tensors for c in t.collectives if c.kind == "all-gather"
    ]
    (between,) = [sent for c in gathers for sent in c.between]
    assert [o.name for o in between.after_origins] == ["XlaSharding_1"]


def summed_up(w, x):
    """A running sum along a split dim, which XLA gathers; w is gathered as well."""
    x = mw.mesh_split(x, MESH, ["X", "Y", None])
    y = tf.einsum("bsm,mh->bsh", tf.cumsum(x, axis=1) * tf.exp(x), w)
    return mw.mesh_split(y, MESH, ["X", None, None])


@over_partitioners
def test_what_xla_gathers_by_itself_has_no_transfer_of_another_tensor(partitioner):
    program = mw.compile_program(
        summed_up,
        [tf.TensorSpec([64, 8]), tf.TensorSpec([4, 16, 64])],
        MESH,
        in_shardings=[lies("Y", None), None],
        partitioner=partitioner,
    )
    explanation = mw.explain(program, reasons=True)
    gathers = [
        (c, t.op_name)
        for t in explanation.tensors
        for c in t.collectives
        if c.kind == "all-gather"
    ]
    in_full = [c.gathers for c, _ in gathers if c.gathers]
    assert in_full and set(in_full) <= set(explanation.rematerialized())
    for gather, _ in gathers:
        sizes = [math.prod(shape) for shape in gather.shapes]
        for sent in gather.between:
            assert math.prod(sent.after.shard_shape(sent.shape)) in sizes
    text = str(explanation)
    listed = text.index("Gathered in full on every device")
    assert "          gathered in full: XlaSharding" in text[:listed]


@tf.function(autograph=False)
def called(x):
    return tf.exp(tf.tanh(mw.mesh_split(x, MESH, ["X", None])))


def test_the_call_that_holds_the_program_is_no_part_of_printed_names():
    traced = trace_program(
        lambda x: called(x) + tf.tanh(x) + called(x + 1), [tf.TensorSpec([8, 4])], MESH
    )
    names = [tensor.name for tensor in traced.reasons.tensors]
    assert "PartitionedCall/Tanh" in names and "Tanh" in names
    exp = traced.why("PartitionedCall/Exp")
    assert str(exp).startswith("Exp f32[8,4] [X,_]")
    assert "PartitionedCall" not in str(exp)

    def found(target):
        return [reason.tensor.name for reason in traced.why(target).tensors]

    # Of one name are both that print it, or else all that end so.
    assert sorted(found("Tanh")) == ["PartitionedCall/Tanh", "Tanh"]
    assert found("Exp") == ["PartitionedCall/Exp", "PartitionedCall_1/Exp"]
    with pytest.raises(ValueError, match="near it are 'Exp'"):
        traced.why("Expp")


def dropped(state, x, key):
    hidden = mw.mesh_split(x @ state["w"], MESH, ["X", "Y"])
    kept = random.keep_mask(key, 0.5, hidden.shape)
    y = tf.where(kept, hidden, 0.0)
    gradient = {"w": tf.ones_like(state["w"])}  # Is no new value, of the same path.
    new = {"w": state["w"] + tf.reduce_mean(y)}
    return {"state": new, "y": y, "gradient": gradient}


def test_random_bits_of_a_line_and_new_values_are_a_line_each():
    w = lies("X", "Y")
    program = mw.compile_program(
        dropped,
        [
            {"w": tf.TensorSpec([16, 32])},
            tf.TensorSpec([8, 16]),
            tf.TensorSpec([2], tf.uint32),
        ],
        MESH,
        in_shardings=[{"w": w}, None, None],
        out_shardings={"state": {"w": w}, "y": None, "gradient": {"w": w}},
    )
    explanation = mw.explain(program)
    text = str(explanation)
    bits = [t for t in explanation.tensors if t.dtype == "u32" and t.source]
    assert len(bits) > 100
    assert len(re.findall(r" u32\[", text)) < 20
    assert re.search(r"      and \d+ more u32 tensors of this line", text)
    assert "state.w" not in text and "  gradient.w " in text
    assert "  1 new value of arguments of the same names, split as these are" in text
    assert "  state.w " in explanation.text(match="state")
    # What is asked for is shown.
    assert explanation.text(match="BitwiseXor").count("  BitwiseXor") > 10


def test_a_collective_of_no_known_cause_says_so():
    explanation = explained(mw.Partitioner.SHARDY)[1]
    (back,) = (t for t in explanation.tensors if t.op_name == "while/MatMul_1")
    (gather,) = (c for c in back.collectives if c.kind == "all-gather")
    alone = dataclasses.replace(gather, between=())
    assert list(cause_lines(gather)) == []
    assert list(cause_lines(alone)) == [
        "of no known cause: XLA's partitioner may have made it by itself"
    ]


def test_a_collective_of_several_tensors_is_counted_once():
    explanation = explained(mw.Partitioner.SHARDY)[1]
    (back,) = (t for t in explanation.tensors if t.op_name == "while/MatMul_1")
    copies = [dataclasses.replace(c, between=()) for c in back.collectives]
    again = dataclasses.replace(back, op_name="again", collectives=tuple(copies))
    more = dataclasses.replace(explanation, tensors=(*explanation.tensors, again))

    def rows(text):  # Of the summary.
        return re.findall(r"^  [a-z-]+ along .*B, .*(?:once|times)$", str(text), re.M)

    assert len(rows(explanation)) > 2
    assert rows(more) == rows(explanation)


def test_an_axis_that_does_not_divide_an_argument_does_not_split_it():
    mesh = mw.DeviceMesh(("data", "model"), (2, 4))
    h = tf.Variable(tf.ones([64, 10]), name="h")
    c = tf.Variable(tf.zeros([10]), name="c")
    x = tf.TensorSpec([8, 64])
    last = mw.function(lambda x: x @ h + c, mesh, layout={"^h": [None, "model"]})
    program = last.program(x)
    answer = one(program.why("1.c"))
    assert str(answer.tensor.sharding) == "[_]" and not answer.provenances
    assert [c.decided for c in answer.competitions] == [Decided.UNEVEN]
    assert one(program.why("values.0")).tensor.sharding.dims == ((), ())
    text = str(mw.explain(program, reasons=True))
    assert re.search(r"1\.c +f32\[10\] +\[_\] +inferred\n", text)
    by = "annotated\n      by row '^h' of the layout\n"
    assert f"{by}      stored padded; its own shape is [64,10]\n" in text
    last(tf.ones([8, 64]))
    later = mw.function(lambda x: x @ h + c, mesh, name="later").program(x)
    kept = next(t for t in mw.explain(later).tensors if t.op_name == "1.h")
    assert not kept.annotated and kept.kept_from == last.name
    assert "kept\n      as lambda left its variable\n" in str(mw.explain(later))
    assert "model on dim 1 is kept from lambda\n" in f"{later.why('1.h')}\n"
    assert "is given by row '^h' of the layout\n" in str(program.why("1.h"))


def test_axes_that_divide_an_argument_stay():
    mesh = mw.DeviceMesh(("data", "model"), (2, 4))

    def add(c):
        return mw.mesh_split(tf.range(4.0), mesh, [("data", "model")]) + c

    program = mw.compile_program(add, [tf.TensorSpec([4])], mesh)
    explained = {t.kind: str(t.sharding) for t in mw.explain(program).tensors[:2]}
    lies = {t.kind: str(t.sharding) for t in program.reasons.tensors[:2]}
    assert lies == explained and set(lies.values()) == {"[data]"}


def test_what_xla_completes_otherwise_than_propagation_is_marked():
    """XLA removes the slice after the sort, so that other axes come first."""

    def ordered(h, w):
        h = mw.mesh_split(h, MESH, ["Y", None, "X"])
        y = tf.einsum("bsh,hm->bsm", tf.sort(h, axis=-1), w)
        return mw.mesh_split(y, MESH, ["X", None, None])

    program = mw.compile_program(
        ordered,
        [tf.TensorSpec([8, 16, 256]), tf.TensorSpec([256, 64])],
        MESH,
        in_shardings=[None, ["Y", None]],
    )
    explanation = mw.explain(program, reasons=True)
    marked = {t.op_name: t.propagated for t in explanation.tensors if t.propagated}
    assert "XLA's: by propagation alone it is [X,_,Y]" in str(explanation)
    answer = program.why("sort/Neg_1")
    assert one(answer).tensor.sharding == marked["sort/Neg_1"]
    assert flat(answer).endswith(COMPILED_NOTE)
    assert not any(t.propagated for t in explained(mw.Partitioner.SHARDY)[1].tensors)


@over_partitioners
def test_what_weight_update_sharding_gathers_is_said_so(partitioner):
    def step(state, x):
        gradient = tf.matmul(x, tf.tanh(x @ state["w"]), transpose_a=True)
        m = 0.9 * state["m"] + gradient
        return {"state": {"w": tf.subtract(state["w"], m, name="moved"), "m": m}}

    weight = tf.TensorSpec([64, 32])
    program = mw.compile_program(
        step,
        [{"w": weight, "m": weight}, tf.TensorSpec([16, 64])],
        mw.DeviceMesh(("data",), (8,)),
        in_shardings=[{"w": [None, None], "m": [None, None]}, ["data", None]],
        out_shardings={"state": {"w": [None, None], "m": [None, None]}},
        partitioner=partitioner,
        update_sharding=mw.UpdateSharding(
            mode=mw.WeightUpdateSharding.ALL, data_axes=("data",)
        ),
    )
    moved = "weight-update sharding gathers it along data, updated in shards"
    assert one(program.why("moved")).update == moved
    state = "computes its update in shards along data, and gathers the result"
    for border in ("argument 0.w", "result state.w"):
        assert f"{state} " in f"{flat(program.why(border))} "
    assert one(program.why("0.m")).update == ""
    (report,) = [t for t in mw.explain(program).tensors if t.op_name == "moved"]
    assert report.why_text == "weight-update sharding gathers it, updated in shards"
