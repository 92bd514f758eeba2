"""A program's arguments and results: their structures, kinds and shardings."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.explaining.explain import explain
from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.compiler.programs import (
    MESH,
    PERMUTED,
    assert_close,
    over_partitioners,
    specs,
    split,
)

STATE = NestedMap(
    layer=NestedMap(w=np.arange(60, dtype=np.float32).reshape(10, 6)),
    count=np.int32(4),
)


def test_structures_of_shardings_may_leave_whole_branches_to_completion():
    def fn(state, x):
        return NestedMap(a=[x, state.layer.w], b={"c": state.count})

    program = compile_program(
        fn,
        [specs(STATE), tf.TensorSpec([8])],
        MESH,
        in_shardings=[None, split("Y")],
        out_shardings=NestedMap(a=[split(("Y", "X")), None], b=None),
    )
    x = np.arange(8, dtype=np.float32)
    out = program(STATE, x)
    assert out.a[0].sharding.shard_shape((8,)) == (1,)
    assert_close(
        program.unshard(out), NestedMap(a=[x, STATE.layer.w], b={"c": STATE.count})
    )


@pytest.mark.parametrize(
    "in_shardings,out_shardings,message",
    [
        (
            [{"y": split()}],
            None,
            r"in_shardings: shardings of a mapping have \['y'\], and lack \['x'\]",
        ),
        ([split()], None, r"shardings of a mapping have \[\], and lack \['x'\]"),
        ([None, None], None, "shardings for a sequence of 1 have 2 entries"),
        ([], None, "shardings for a sequence of 1 have 0 entries: give a Sharding"),
        (
            [{"x": split("X")}],
            None,
            r"in_shardings: .* is of rank 1, and tensor 0/x has shape \(8, 8\)",
        ),
        (None, [split("X")], "shardings for a sequence of 2 have 1 entries"),
        (
            None,
            [None, split("X")],
            r"out_shardings: .* is of rank 1, and tensor 1 has shape \(8, 8\)",
        ),
        ([{"x": ["X"]}], None, r"in_shardings: sharding \[X\] is of rank 1, and"),
        ([{"x": ["X", "Z"]}], None, "in_shardings: unknown mesh axis 'Z'"),
        (
            [{"x": split("X", None, mesh=PERMUTED)}],
            None,
            r"\[X,_\] is over another device mesh \(X=2, Y=4\) than the program",
        ),
    ],
)
def test_shardings_of_another_structure_or_rank_are_refused(
    in_shardings, out_shardings, message
):
    with pytest.raises(ValueError, match=message):
        compile_program(
            lambda batch: [batch["x"], batch["x"] * 2],
            [{"x": tf.TensorSpec([8, 8], name="x")}],
            MESH,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
        )


def test_a_sharding_may_be_an_axis_for_each_dim():
    program = compile_program(
        lambda batch: batch["x"] + batch["y"],
        [{"x": tf.TensorSpec([8, 8]), "y": tf.TensorSpec([8, 8])}],
        MESH,
        in_shardings=[{"x": ["X", None], "y": (("X", "Y"), None)}],
        out_shardings=[None, "Y"],
        check_types=False,
    )
    assert [str(s) for s in program.in_shardings] == ["[X,_]", "[X.Y,_]"]
    assert [str(s) for s in program.out_shardings] == ["[_,Y]"]


@pytest.mark.parametrize("text", ["[X,?]", "[X,_] manual{Y}", "[Y:(1)2,_]"])
def test_a_border_sharding_is_decided_and_of_full_axes(text):
    sharding = Sharding.parse(MESH, text)
    for borders in ({"in_shardings": [sharding]}, {"out_shardings": sharding}):
        with pytest.raises(ValueError, match="at the border of a program every dim is"):
            compile_program(lambda x: x + 1, [tf.TensorSpec([8, 8])], MESH, **borders)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"mesh": (2, 4)},
            r"fn: the mesh is \(2, 4\), of type tuple; pass a",
        ),
        (
            {"args": tf.TensorSpec([8, 8])},
            "fn: args is of type TensorSpec; pass a",
        ),
        (
            {"in_shardings": ["[X,_]"]},
            r"'\[X,_\]' is of type str; pass a Sharding, or an",
        ),
        ({"partitioner": "sharding"}, "there is no partitioner 'sharding': use Part"),
        ({"partitioner": None}, "there is no partitioner None: use Partitioner.SHARDY"),
    ],
)
def test_what_is_of_another_type_is_refused(how, message):
    def fn(x):
        return x

    given = {"args": [tf.TensorSpec([8, 8])], "mesh": MESH, **how}
    with pytest.raises((TypeError, ValueError), match=message):
        compile_program(fn, **given)


def test_a_partitioner_may_be_given_by_its_name():
    program = compile_program(
        lambda x: x, [tf.TensorSpec([8])], MESH, partitioner="shardy"
    )
    assert program.partitioner is Partitioner.SHARDY


@over_partitioners
def test_an_argument_left_to_completion_may_be_split_by_a_part_of_an_axis(partitioner):
    """Shardy splits its six columns by half of Y, as they do not divide by four."""

    def fn(x, start):
        return tf.slice(mesh_split(x, MESH, ["X", "Y"]), [start, 0], [2, 6])

    replicated = Sharding.replicated(MESH, 0)
    program = compile_program(
        fn,
        [tf.TensorSpec([14, 6]), tf.TensorSpec([], tf.int32)],
        MESH,
        in_shardings=[None, replicated],
        partitioner=partitioner,
    )
    x = np.arange(84, dtype=np.float32).reshape(14, 6)
    for placed in (x, program.shard(x)):
        np.testing.assert_array_equal(program(placed, np.int32(3)), x[3:5])


def test_a_result_left_to_completion_may_be_split_by_a_part_of_an_axis():
    def fn(x):
        x = tf.reshape(mesh_split(x, MESH, ["Y"]), [2, 8])
        return tf.reduce_sum(x, axis=0)  # GSPMD splits it in two along half of Y.

    x = np.arange(16, dtype=np.float32)
    for borders in ({}, {"out_shardings": split("X")}):
        program = compile_program(
            fn, [tf.TensorSpec([16])], MESH, partitioner=Partitioner.GSPMD, **borders
        )
        np.testing.assert_array_equal(program(x), x[:8] + x[8:])
    # So does one of its collectives.
    axes = {c.axes for c in program.collectives()}
    assert axes & {("Y:(1)2",), ("Y:(2)2",)} and None not in axes


@over_partitioners
@pytest.mark.parametrize(
    ("annotation_mesh", "dims"),
    [
        (MESH, ["Y:(2)2"]),
        (PERMUTED, ["Y"]),
        (DeviceMesh(("A", "B"), (4, 2)), ["A"]),
    ],
)
def test_a_result_has_the_sharding_of_its_annotation(
    annotation_mesh, dims, partitioner
):
    def fn(x):
        return mesh_split(tf.sin(x), annotation_mesh, dims), x + 1.0

    program = compile_program(fn, [tf.TensorSpec([16])], MESH, partitioner=partitioner)
    x = np.arange(16, dtype=np.float32)
    results = program(x)
    for got in (results[0], program.unshard(results)[0]):
        np.testing.assert_allclose(got, np.sin(x), rtol=1e-6, atol=1e-6)
    assert "results\n" in str(explain(program))


def test_several_results_are_left_to_completion():
    def fn(x):
        return {"a": x * 2, "b": [tf.reshape(x, [2, 3, 4, 4]), tf.reshape(x, [4, 24])]}

    program = compile_program(
        fn,
        [tf.TensorSpec([24, 4])],
        MESH,
        in_shardings=[split(("X", "Y"), None)],
        partitioner=Partitioner.GSPMD,
    )
    x = np.arange(96, dtype=np.float32).reshape(24, 4)
    got = program(x)
    for result, want in zip(tf.nest.flatten(got), tf.nest.flatten(fn(x)), strict=True):
        np.testing.assert_array_equal(result, want)


def test_an_argument_to_donate_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"donate=\[1\] for a program of 1 arguments"):
        compile_program(lambda x: x, [tf.TensorSpec([8])], MESH, donate=[1])


@pytest.mark.parametrize(
    "fn,args,message",
    [
        (
            lambda x: None,
            [tf.TensorSpec([2])],
            "function returns None; return",
        ),
        (
            lambda x: (x, None),
            [tf.TensorSpec([2])],
            r"returns None as result 1\. A grad",
        ),
        (tf.sin, [np.ones([2])], "argument of type ndarray must be a tf.TensorSpec"),
    ],
)
def test_what_is_no_function_of_tensors_is_refused(fn, args, message):
    with pytest.raises(LoweringError, match=message):
        compile_program(fn, args, MESH, name="step")
