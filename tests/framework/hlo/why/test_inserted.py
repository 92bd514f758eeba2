"""What of a collective that XLA combined is an op's own."""

import collections
import types

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.explaining.inserted import inserted_collectives
from tests.framework.hlo.why.why_programs import MESH

TEXT = """
ENTRY %main (p: f32[8]) -> (f32[8], f32[64]) {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %sum = (f32[8]{{0}}, f32[64]{{0}}) {kind}(%p, %p), {attributes}
}}
"""
ATTRIBUTES = 'replica_groups={{}}, metadata={{op_name="{name}"}}'


def step(x, gradient):
    """Sums over rows that X splits, of three sizes."""
    x = mw.mesh_split(x, MESH, ["X", None])
    gradient = mw.mesh_split(gradient, MESH, ["X", None])
    whole = mw.replicate(tf.tanh(x)), mw.replicate(tf.tanh(gradient))
    return (
        tf.matmul(x, gradient, transpose_a=True),
        tf.reduce_sum(gradient, 0),
        tf.reduce_sum(x),
        *whole,
    )


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_an_op_has_its_own_part_of_what_is_combined(partitioner):
    specs = [tf.TensorSpec([8, 16]), tf.TensorSpec([8, 64])]
    program = mw.compile_program(step, specs, MESH, partitioner=partitioner)
    explanation = mw.explain(program)
    parts = collections.defaultdict(int)
    for tensor in explanation.tensors:
        for one in tensor.collectives:
            parts[one.name] += one.own_bytes
            if one.kind == "all-reduce":
                assert one.own_bytes == tensor.bytes_per_device
    assert parts == {one.name: one.bytes for one in program.collectives()}
    assert "all-reduce along X, 256 B, of 4.25 KiB for 3 ops" in str(explanation)


@pytest.mark.parametrize(
    ("name", "kind", "own", "text"),
    [
        ("a/(b:c)", "all-reduce", 32, "32 B, of 288 B for 2 ops"),
        # As libtpu names them.
        ("a/b", "all-reduce", None, "of 288 B for 2 tensors"),
        ("a/(b:c:d)", "all-reduce", None, "of 288 B shared by 3 ops"),
        ("a/b", "all-to-all", 288, "288 B"),
    ],
)
def test_no_part_is_invented(name, kind, own, text):
    hlo = TEXT.format(kind=kind, attributes=ATTRIBUTES.format(name=name))
    program = types.SimpleNamespace(hlo_text=lambda: hlo, mesh=MESH)
    ((one,), *_) = inserted_collectives(program)[0].values()
    assert one.own_bytes == own
    assert one.text == f"{kind} along X, Y, {text}"


def test_what_is_of_no_op_is_kept():
    hlo = TEXT.format(kind="all-reduce", attributes=ATTRIBUTES.format(name="(a:)"))
    program = types.SimpleNamespace(hlo_text=lambda: hlo, mesh=MESH)
    by_op, nameless = inserted_collectives(program)
    (own,), (other,) = by_op["a"], nameless
    assert own.text.endswith(", 32 B, of 288 B for 2 ops")
    assert other.text.endswith(", 256 B, of 288 B for 2 ops")
