"""What would be otherwise, and what is: by propagation, and as compiled."""

import dataclasses
import functools
import re

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.explaining.difference import (
    Difference,
    LaidOut,
    Sent,
    Side,
)
from meshwright.framework.compiler.explaining.provenance import Origin, OriginKind
from meshwright.framework.compiler.program import trace_program
from tests.framework.hlo.why.why_programs import MESH, kept, traced

TALL = mw.DeviceMesh(("X", "Y"), (4, 2))
M, H = 64, 256


def feed_forward(mesh, hidden):
    """Whose hidden layer is split so."""

    def fn(w_in, w_out, x):
        y = mw.mesh_split(tf.nn.relu(x @ w_in), mesh, [None, hidden])
        return y @ w_out

    return fn


def of_plan(mesh=MESH, hidden="Y", **how):
    weights = [
        mw.Sharding.from_dims_mapping(mesh, d) for d in ([None, "Y"], ["Y", None])
    ]
    return trace_program(
        feed_forward(mesh, hidden),
        [tf.TensorSpec([M, H]), tf.TensorSpec([H, M]), tf.TensorSpec([8, M])],
        mesh,
        in_shardings=[*weights, None],
        name="plan",
        **how,
    )


def named(found, name):
    (match,) = (one for one in found if getattr(one, "name", None) == name)
    return match


def test_a_tensor_split_otherwise_changes_its_neighbours_and_what_is_sent():
    difference = mw.what_if(of_plan(), {"Relu": [None, "X"]}, topology="v3:2x2")
    relu = named(difference.tensors, "Relu")
    assert (relu.before.sharding, relu.after.sharding) == ("[_,Y]", "[_,X]")
    (origin,) = relu.after.origins
    assert origin.kind.value == "what was asked for,"
    # To be annotated again by Y it moves, which it did not before.
    new = [one for one in difference.collectives if one.what == "new"]
    assert any(one.at == "XlaSharding" for one in new)
    before, after = difference.sent_bytes
    assert after > before
    assert difference.sent_seconds[1] > difference.sent_seconds[0] > 0
    text = str(difference)
    assert "plan -> with Relu [_,X]" in text
    assert "Relu f32[8,256] [_,Y] -> [_,X] at why/test_what_if.py:" in text
    assert "now by what was asked for, Relu [_,X]" in text


def test_what_if_says_what_the_program_with_that_annotation_does():
    asked = mw.what_if(of_plan(), {"XlaSharding": [None, "X"]})
    written = mw.explain_difference(of_plan(), of_plan(hidden="X"))

    def lies(difference):
        return {
            t.name: (t.before.sharding, t.after.sharding) for t in difference.tensors
        }

    assert lies(asked) == lies(written) != {}
    assert asked.sent_bytes == written.sent_bytes


def test_an_annotation_and_an_argument_can_be_left_to_completion():
    difference = mw.what_if(of_plan(), {"XlaSharding": None, "argument 1": None})
    assert difference.only_before == ["XlaSharding"]
    # The first weight is still split along Y, and the second follows it.
    assert not difference.tensors
    nothing = dict.fromkeys(["XlaSharding", "argument 0", "argument 1"])
    relu = named(mw.what_if(of_plan(), nothing).tensors, "Relu")
    assert (relu.before.sharding, relu.after.sharding) == ("[_,Y]", "[_,_]")
    assert relu.before.origins and not relu.after.origins


def test_of_a_result_the_sharding_can_be_asked_for():
    difference = mw.what_if(of_plan(), {"result": ["X", None]})
    result = named(difference.tensors, "result result")
    assert (result.before.sharding, result.after.sharding) == ("[_,_]", "[X,_]")
    assert result.after.bytes_per_device * 2 == result.before.bytes_per_device


ROWS = {"^w_out": ["Y", None]}


def stepped(rows, **how):
    """A step of momentum SGD, whose slots have no row."""
    weights = {
        name: tf.Variable(tf.ones(shape), name=name)
        for name, shape in [("w_in", [M, H]), ("w_out", [H, M])]
    }
    slots = {
        n: tf.Variable(tf.zeros(w.shape), name=f"m_{n}") for n, w in weights.items()
    }

    def step(x):
        x = mw.mesh_split(x, MESH, ["X", None])
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(x @ weights["w_in"])
            loss = tf.reduce_sum((hidden @ weights["w_out"]) ** 2)
        for name, gradient in tape.gradient(loss, weights).items():
            slots[name].assign(0.9 * slots[name] + gradient)
            weights[name].assign_sub(0.1 * slots[name])
        return loss

    return mw.function(step, MESH, layout=rows, **how).program(tf.ones([8, M]))


def shardings(side):
    return {name: tensor.sharding for name, tensor in side.tensors.items()}


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_of_a_variable_it_says_what_the_program_with_that_row_does(partitioner):
    """Its slot and what completion gave other variables follow."""
    with_row = stepped(ROWS, partitioner=partitioner)
    none = stepped({}, partitioner=partitioner)
    asked = mw.what_if(none, {"w_out": ["Y", None]})
    assert shardings(asked.after) == shardings(mw.what_if(with_row, {}).after)
    slot = named(asked.tensors, "argument 0.m_w_out")
    assert (slot.before.sharding, slot.after.sharding) == ("[_,_]", "[Y,_]")
    (origin,) = slot.after.origins
    assert "what was asked for, w_out [Y,_]" in str(origin)
    assert named(asked.tensors, "result state.m_w_in").after.sharding == "[_,Y]"
    assert not asked.notes
    back = mw.what_if(with_row, {"w_out": None})
    assert shardings(back.after) == shardings(asked.before)
    assert back.sent_bytes == asked.sent_bytes[::-1]


def test_causes_of_the_same_are_told_together():
    asked = {"w_in": [None, "Y"], "w_out": ["Y", None]}
    sent = str(mw.what_if(stepped({}), asked)).partition("Collectives that differ")[2]
    both = r"now by what was asked for, w_\w+ .*\n  and now by what was asked for, w_"
    assert re.search(both, sent)
    heads = re.findall(r"^  (?! )(?:and )?(\w+ by .*)\n(?:  and .*\n)*(.*)", sent, re.M)
    assert heads and all(first.startswith("    ") for _, first in heads)
    groups = re.findall(r"^  (?:\w+ by .*\n(?:  and .*\n)*)", sent, re.M)
    alike = [frozenset(re.findall(r"\w+ by .*", group)) for group in groups]
    assert len(alike) == len(set(alike))


def test_a_cause_is_told_once_and_what_was_asked_for_first():
    difference = mw.what_if(stepped({}), {"w_out": ["Y", None]})
    text = str(difference)
    tensors, sent = text.split("Collectives that differ")
    causes = re.findall(r"\n  (\w+ by .*)", tensors)
    # Of tensors, and of what is sent.
    assert text.count("now by what was asked for, w_out [Y,_]") == 2
    assert len(difference.tensors) > len(causes) == len(set(causes)) > 0
    assert causes[0] == "now by what was asked for, w_out [Y,_]"
    # Slots, which nobody touched, are no cause.
    assert "inferred from" not in text and "by argument 0.m_w" not in text
    others = re.findall(r"and (\d+) more of this cause", tensors)
    printed = tensors.count("on one device ") - 1  # That of the arguments.
    assert printed + sum(map(int, others)) == len(difference.tensors)


def laid_out(sharding, *origins):
    return LaidOut(
        type="f32[8,8]",
        sharding=sharding,
        bytes_per_device=128,
        file="",
        line=0,
        origins=origins,
    )


def test_ops_of_random_numbers_are_told_together_and_parts_of_axes_explained():
    drawn = "layer_of_a_long_name/stateless_random_uniform"
    whole = "layer/" * 14 + "Relu"
    names = (f"{drawn}/StatelessRandomUniformV2", drawn, whole)

    def side(sharding, mesh):
        tensors = {name: laid_out(sharding) for name in names}
        return Side(name="", mesh=mesh, tensors=tensors, sent={})

    before = side("[Y:(4)2,_]", mw.DeviceMesh(("X", "Y"), (1, 8)))
    text = str(Difference(before=before, after=side("[_,Y:(2)2]", MESH)))
    assert text.index(f"\n    {whole}\n") < text.index(names[0])
    assert text.count(drawn) == 1 and "and 1 more of the same random numbers" in text
    lines = text.splitlines()
    assert max(len(line) for line in lines if whole not in line) <= 80
    notes = " ".join(" ".join(lines[-6:]).split())
    assert notes == " ".join(
        f"Y:({before})2 is a part of the axis Y, whose {size} devices it divides into "
        f"groups of 2 {how}."
        for before, size, how in (
            (4, 8, "neighbours"),
            (2, 8, "devices, each 2 apart"),
            (2, 4, "neighbours"),
        )
    )


def test_what_one_annotation_splits_otherwise_is_by_that():
    row = Origin(
        kind=OriginKind.ANNOTATION,
        name="w",
        layer="",
        file="",
        line=0,
        sharding=mw.Sharding.from_dims_mapping(MESH, ["X", None]),
    )
    kept = dataclasses.replace(row, kind=OriginKind.ARGUMENT, inferred_from=row)

    def side(sharding, sent, *origins):
        tensor = laid_out(sharding, *origins)
        moved = Sent(bytes=sent, seconds=None, origins=origins)
        return Side(
            name="", mesh=MESH, tensors={"t": tensor}, sent={("t", "", ("X",)): moved}
        )

    text = str(
        Difference(before=side("[X,_]", 8, row), after=side("[_,X]", 16, kept)),
    )
    assert re.findall(r"\n  (\S*by .*)", text) == ["by annotation w [X,_]"] * 2


def test_what_stays_as_it_is_is_noted():
    all_of_them = mw.UpdateSharding(mode=mw.WeightUpdateSharding.ALL, data_axes=["X"])
    updated = stepped({}, update_sharding=all_of_them)
    assert updated.updates.sharded
    (note,) = mw.what_if(updated, {"w_out": ["Y", None]}).notes
    assert "weight updates stay in shards as they are" in note
    w = tf.Variable(tf.ones([M, H]), name="w")
    first = mw.function(lambda x: x @ w, MESH, layout={"^w": [None, "Y"]}, name="first")
    first(tf.ones([8, M]))
    later = mw.function(lambda x: x @ w, MESH, name="later").program(tf.ones([8, M]))
    (note,) = mw.what_if(later, {"argument 3.0": ["X", None]}).notes
    assert note.startswith("1 argument stays as first keeps it: ask with None for one")
    for asked in [None, "X"], None:
        assert not mw.what_if(later, {"w": asked}).notes
    anew = named(mw.what_if(later, {"w": None}).tensors, "argument 1.w")
    assert (anew.before.sharding, anew.after.sharding) == ("[_,Y]", "[_,_]")


def of_state(dims):
    """A step of momentum SGD, a pure function of its state, whose slots are given."""

    def step(state, x):
        w, m = state["theta"]["w"], state["slots"]["w"]["m"]
        m = 0.9 * m + tf.matmul(x, x @ w, transpose_a=True)
        return {
            "state": {"theta": {"w": w - m}, "slots": {"w": {"m": m}}},
            "loss": w[0],
        }

    spec = tf.TensorSpec([M, M])
    sharding = mw.Sharding.from_dims_mapping(MESH, dims)
    specs = {"theta": {"w": spec}, "slots": {"w": {"m": spec}}}
    state = tf.nest.map_structure(lambda _: sharding, specs)
    return trace_program(
        step,
        [specs, tf.TensorSpec([8, M])],
        MESH,
        in_shardings=[state, None],
        out_shardings={"state": state, "loss": None},
    )


def test_of_state_argument_and_result_change_and_given_slots_are_noted():
    difference = mw.what_if(of_state([None, None]), {"theta.w": [None, "Y"]})
    after = shardings(difference.after)
    assert after["argument 0.theta.w"] == after["result state.theta.w"] == "[_,Y]"
    (note,) = difference.notes
    slots = "argument 0.slots.w.m, result state.slots.w.m"
    assert note == f"the given shardings stay of {slots}"


def test_of_uneven_dims_it_is_noted_that_nothing_is_padded():
    w = tf.Variable(tf.ones([6, 10]), name="w")

    def program(**layout):
        fn = mw.function(lambda x: w.assign_add(x), MESH, name="step", **layout)
        return fn.program(tf.ones([6, 10]))

    asked = {"w": [None, "Y"]}
    (note,) = mw.what_if(program(), asked).notes
    assert note.startswith(
        "a program with 0.w [_,Y] stores it padded, (6, 10) as (6, 12): what that sends"
    )
    padded = program(layout={"^w": [None, "Y"]})
    message = (
        r"0.w of shape \(6, 10\) is stored as \(6, 12\), and ops of step are for that: "
        "trace .* compare the two by explain_difference"
    )
    with pytest.raises(ValueError, match=message):
        mw.what_if(padded, {"w": None})


def test_what_is_updated_in_shards_is_refused():
    in_shards = mw.UpdateSharding(mode=mw.WeightUpdateSharding.ALL, data_axes=["X"])
    with pytest.raises(ValueError, match=r"0.m_w_in of .* is stored in shards \[X,_\]"):
        mw.what_if(stepped({}, update_sharding=in_shards), {"m_w_in": [None, "Y"]})


def test_results_that_are_one_tensor_have_their_own_origins():
    """Shardy names no origin of the first."""
    w = tf.Variable(tf.ones([6, 10]), name="w")
    program = mw.function(lambda x: w.assign_add(x), MESH).program(tf.ones([6, 10]))
    difference = mw.what_if(program, {"result state.w": [None, "Y"]})
    (state,) = (t for t in difference.tensors if t.name == "result state.w")
    assert [o.name for o in state.after.origins] == ["state.w"]


def test_state_of_a_traced_program_is_asked_for_by_its_argument():
    state = trace_program(
        lambda w, x: (w + x, tf.reduce_sum(w)),
        [tf.TensorSpec([8, 8])] * 2,
        MESH,
        carried=1,
    )
    difference = mw.what_if(state, {"argument 0": ["X", None]})
    assert named(difference.tensors, "result 0").after.sharding == "[X,_]"


def test_what_prints_alike_is_told_apart_by_whole_names():
    called = tf.function(lambda x: tf.tanh(x), autograph=False)
    program = trace_program(
        lambda x: called(x) + tf.tanh(2 * x), [tf.TensorSpec([8, 8])], MESH
    )
    for name in ("Tanh", "PartitionedCall/Tanh"):
        difference = mw.what_if(program, {name: ["X", None]})
        assert named(difference.tensors, name).after.sharding == "[X,_]"
        assert f"with {name} [X,_]" in str(difference)


def test_the_call_that_holds_the_program_is_no_part_of_printed_names():
    difference = mw.what_if(stepped({}), {"w_out": ["Y", None]})
    assert any("PartitionedCall" in one.name for one in difference.tensors)
    assert "PartitionedCall" not in str(difference)


def test_a_variable_has_one_sharding():
    asked = {"argument 0.w_in": [None, "X"], "result state.w_in": [None, "Y"]}
    with pytest.raises(ValueError, match=r"asked for twice, as \[_,X\] and as \[_,Y\]"):
        mw.what_if(stepped({}), asked)


def test_nothing_changes_where_nothing_is_asked_for():
    difference = mw.what_if(kept("looped"), {})
    assert not difference.tensors and not difference.collectives
    assert difference.sent_seconds is None


@pytest.mark.parametrize(
    ("asked", "topology", "message"),
    [
        ({"Reluu": ["X", None]}, None, "no tensor, line or layer 'Reluu'; near it"),
        ({"Relu": ["X"]}, None, r"Relu has 2 dims, \(8, 256\), and the sharding"),
        ({"Relu": ["Z", None]}, None, "Z"),
        ({"Relu": ["X", None]}, "v3:4x4", "has 32 devices, but the device mesh"),
        ({"test_what_if.py:LINE": [None, "X"]}, None, "has 3 tensors .*; name one"),
        ({"Relu": 3}, None, "dims_mapping 3 is no sequence: give a sequence with an"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(asked, topology, message):
    program = of_plan()
    (relu,) = program.why("Relu").tensors
    line = str(relu.tensor.line)
    asked = {name.replace("LINE", line): dims for name, dims in asked.items()}
    with pytest.raises(ValueError, match=message):
        mw.what_if(program, asked, topology=topology)


@functools.cache
def compiled(mesh=MESH, hidden="Y", partitioner=mw.Partitioner.SHARDY):
    return of_plan(mesh, hidden, partitioner=partitioner).compile()


def test_of_two_plans_it_tells_tensors_collectives_and_annotations():
    difference = mw.explain_difference(
        mw.explain(compiled(), reasons=True), compiled(hidden="X"), topology="v3:2x2"
    )
    relu = named(difference.tensors, "Relu")
    assert (relu.before.sharding, relu.after.sharding) == ("[_,Y]", "[_,X]")
    assert "[_,Y]" in str(relu.before.origins[0])
    assert "annotation" in str(relu.after.origins[0])
    assert {one.what for one in difference.collectives} & {"new", "grew"}
    sent = sum(c.bytes for c in compiled(hidden="X").collectives())
    assert difference.sent_bytes[1] == pytest.approx(sent)
    assert difference.sent_seconds[0] > 0
    assert "XlaSharding" in str(difference) or "annotation" in str(difference)


def test_of_two_partitioners_and_of_two_meshes():
    gspmd = compiled(partitioner=mw.Partitioner.GSPMD)
    difference = mw.explain_difference(compiled(), gspmd)
    assert "completed by shardy -> " in str(difference)
    other = mw.explain_difference(compiled(), compiled(TALL))
    assert "X=2, Y=4" in other.before.name and "X=4, Y=2" in other.after.name
    weight = other.before.tensors["argument 0"], other.after.tensors["argument 0"]
    assert weight[0].bytes_per_device * 2 == weight[1].bytes_per_device


def test_an_explanation_cannot_be_compared_with_what_is_only_traced():
    with pytest.raises(ValueError, match="compile the other program too"):
        mw.explain_difference(mw.explain(compiled()), traced("looped"))


def test_a_difference_is_of_plain_values():
    difference = mw.what_if(of_plan(), {"Relu": [None, "X"]})
    fields = dataclasses.asdict(difference)
    assert set(fields) == {"before", "after", "notes"}
    assert fields["after"]["tensors"]["Relu"]["sharding"] == "[_,X]"
