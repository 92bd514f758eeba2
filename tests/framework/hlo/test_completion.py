"""Completion: shardings read back, full rematerializations, the right partitioner."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.completion import Completion, complete
from meshwright.framework.compiler.xla.mesh_program import MeshProgram
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.xla_form import logical
from tests.framework.hlo import reshards

MESH = DeviceMesh(("X", "Y"), (2, 4))
PERMUTED = DeviceMesh(("X", "Y"), (2, 4), (3, 1, 4, 0, 5, 7, 2, 6))
over_partitioners = pytest.mark.parametrize("partitioner", Partitioner)


def program(mesh, partitioner, **kwargs):
    """x [8, 16] @ w [16, 32] in an outer loop of 3 around an inner one of 2."""

    def fn(x, w):
        w = mesh_split(w, mesh, ["X", "Y"])

        def inner(j, x):
            return j + 1, tf.nn.relu(tf.matmul(x, w) @ tf.ones([32, 16]))

        def outer(i, x):
            with tf.name_scope("inner"):
                _, x = tf.while_loop(
                    lambda j, _: j < 2, inner, (tf.constant(0), x), name="loop"
                )
            return i + 1, mesh_split(tf.tanh(x), mesh, ["X", None])

        return tf.while_loop(lambda i, _: i < 3, outer, (tf.constant(0), x))[1]

    specs = [tf.TensorSpec([8, 16]), tf.TensorSpec([16, 32])]
    return compile_program(fn, specs, mesh, partitioner=partitioner, **kwargs)


@over_partitioners
@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=["in order", "permuted"])
def test_reads_shardings_in_nested_loops(mesh, partitioner):
    completion = complete(program(mesh, partitioner).unpartitioned)
    rows = Sharding.from_dims_mapping(mesh, ["X", None])
    assert completion.result_shardings([2]) == [rows]
    instructions = {
        (instruction.opcode, instruction.op_name.rsplit("/", 1)[-1]): instruction
        for instruction in completion.completed.instructions
        if instruction.dtype == "f32" and instruction.shape
    }
    tanh, matmul = instructions["tanh", "Tanh"], instructions["dot", "MatMul"]
    assert completion.sharding(tanh) == rows
    assert matmul.shape == (8, 32)
    assert completion.sharding(matmul).dims[0] == ("X",)
    depth = {
        op.opcode: len(completion.completed.loops_around(op.computation))
        for op in (tanh, matmul)
    }
    assert depth == {"tanh": 1, "dot": 2}
    annotated = [
        op
        for op in completion.completed.instructions
        if op.op_name.endswith("/XlaSharding") and op.shape == (16, 32)
    ]
    split = Sharding.from_dims_mapping(mesh, ["X", "Y"])
    assert {str(completion.sharding(op)) for op in annotated} == {str(split)}


@over_partitioners
def test_trips_of_nested_loops(partitioner):
    module = HloModule(program(MESH, partitioner).hlo_text())
    trips = [
        [loop.trips for loop in module.loops_around(instruction.computation)]
        for instruction in module.instructions
        if instruction.opcode in ("all-gather", "all-reduce")
    ]
    assert trips and all(counts in ([], [3], [2, 3]) for counts in trips)
    assert [2, 3] in trips


def test_a_mesh_of_one_device_has_nothing_to_explain():
    single = DeviceMesh(("X", "Y"), (1, 1))
    with pytest.raises(ValueError, match=r"fn: the mesh \(X=1, Y=1\) has one device"):
        complete(program(single, Partitioner.SHARDY).unpartitioned)


EXPECTED = {"other dim, other axis", "uneven", "tile of a reshape"}


@over_partitioners
@pytest.mark.parametrize("name", reshards.RESHARDS)
def test_finds_full_rematerializations_and_no_others(name, partitioner):
    remats = reshards.completion(name, partitioner).rematerializations()
    assert bool(remats) == (name in EXPECTED)
    for remat in remats:
        assert remat.dtype == "f32"
        assert remat.bytes == 4 * remat.shape[0] * remat.shape[1]
    if name == "other dim, other axis":
        assert remats[0].shape == reshards.SHAPE
        assert remats[0].tensor.endswith("/XlaSharding")
        assert remats[0].at.endswith("/Tanh")


def test_xla_warns_of_the_same_ones(tmp_path):
    """Its warnings, which are hidden where users are, against what is found."""
    ran = subprocess.run(
        [sys.executable, reshards.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[3],
        env={
            **os.environ,
            "PYTHONPATH": ".",
            "JAX_ENABLE_COMPILATION_CACHE": "true",
        },
    )
    assert ran.returncode == 0, ran.stderr
    pattern = r"BEGIN (\w+) (.*)\n((?:.*\n)*?)FOUND (\d+)\n"
    runs = re.findall(pattern, ran.stderr)
    assert len(runs) == 2 * len(reshards.RESHARDS)
    for partitioner, name, log, is_reported in runs:
        warnings = log.count("Involuntary full rematerialization")
        assert warnings == int(is_reported), (partitioner, name)
    # Only the programs themselves went to JAX's cache: one each.
    assert len(list(tmp_path.glob("*-cache"))) == len(runs)


def test_what_makes_xla_fall_back_to_gspmd_is_an_error(monkeypatch):
    gspmd = program(MESH, Partitioner.GSPMD, name="step").unpartitioned
    asked_shardy = dataclasses.replace(gspmd, partitioner=Partitioner.SHARDY)
    with pytest.raises(LoweringError, match="step: .* is left in the program, for whi"):
        asked_shardy.compile()
    monkeypatch.setattr(MeshProgram, "_check_no_fallback", lambda self: None)
    with pytest.raises(
        LoweringError, match="completed the program by sharding-propagation, but shardy"
    ):
        complete(asked_shardy)


NO_MODULE = HloModule("ENTRY %main () -> () {\n}")


@pytest.mark.parametrize(
    ("completed", "annotated", "follows"),
    [
        ("[X,_]", "[X,_]", True),
        ("[X,_]", "[_,X]", False),
        ("[X,Y]", "[X,_]", False),
        ("[X,Y]", "[X,?]", True),
        ("[X.Y,_]", "[X?,_]", True),
        ("[Y.X,_]", "[X?,_]", False),
        ("[_,_]", "[X?,_]", False),
        ("[_,_]", "[?,?]", True),
    ],
)
def test_whether_an_annotation_was_followed(completed, annotated, follows):
    completion = Completion(PERMUTED, NO_MODULE, NO_MODULE)
    completed, annotated = (
        Sharding.parse(PERMUTED, text) for text in (completed, annotated)
    )
    assert completion.follows(completed, annotated) is follows


def test_whether_an_annotation_over_another_device_order_was_followed():
    completion = Completion(PERMUTED, NO_MODULE, NO_MODULE)
    other = Sharding.parse(MESH, "[X.Y,_]")
    text = logical(other, PERMUTED).to_hlo()
    assert completion.follows(text, other)
    assert not completion.follows(text, Sharding.parse(PERMUTED, "[X.Y,_]"))
    assert not completion.follows("{unknown}", other)
