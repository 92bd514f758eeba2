"""What users are told of repairs, and when a repair is not made."""

import dataclasses
import importlib

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.explaining.explain import explain
from meshwright.framework.compiler.lowering.lower import LoweringError, lower
from meshwright.framework.compiler.program import compile_program, trace_program
from meshwright.framework.compiler.repair import check
from meshwright.framework.compiler.repair.op_layout import even_layout
from meshwright.framework.compiler.repair.table import faults
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.rewrites import workarounds
from meshwright.framework.compiler.stablehlo.rewrites.rolls import rotate
from meshwright.framework.compiler.xla.jax_bridge import JAXLIB
from meshwright.framework.sharding.annotations import mesh_split
from tests.framework.compiler.programs import MESH, over_partitioners

TABLE = np.arange(64, dtype=np.float32).reshape(16, 4)
TWO = np.array([3, 7], np.int32)
ROWS = [tf.TensorSpec([16, 4]), tf.TensorSpec([2], tf.int32)]


def costly(table, i):
    return tf.gather(table, mesh_split(i, MESH, ["Y"]))


def free(table, i):
    """The rows are split, and each device has all of them anyway."""
    table, i = (mesh_split(x, MESH, [None] * x.shape.rank) for x in (table, i))
    return mesh_split(tf.gather(table, i), MESH, ["Y", None])


def slow(table, i):
    rows = mesh_split(tf.ones([2, 4]) * table[:2], MESH, [None, None])
    i = mesh_split(i[:, None], MESH, ["X", None])
    table = mesh_split(table, MESH, ["Y", None])
    rows = mesh_split(rows, MESH, ["X", None])
    return mesh_split(tf.tensor_scatter_nd_add(table, i, rows), MESH, ["Y", None])


def compiled(fn, **how):
    return compile_program(fn, ROWS, MESH, **how)


def repairs_logged(caplog):
    return [r.getMessage() for r in caplog.records if "which XLA" in r.getMessage()]


@pytest.fixture
def table_of_faults(monkeypatch):
    """Makes the compiler start with another table."""

    def set_table(table):
        monkeypatch.setattr(faults, "FAULTS", tuple(table))
        importlib.reload(check)

    yield set_table
    monkeypatch.undo()
    importlib.reload(check)


@over_partitioners
def test_a_costly_repair_is_a_warning(partitioner, caplog, monkeypatch):
    """Unless it sends a few bytes, which are logged at a lower level."""
    with caplog.at_level("INFO", "absl"):
        trace_program(costly, ROWS, MESH, partitioner=partitioner)
    small = [r for r in caplog.records if "which XLA" in r.getMessage()]
    assert [record.levelname for record in small] == ["INFO"]
    caplog.clear()
    monkeypatch.setattr(check, "_WARNED_BYTES", 4)
    program = compiled(costly, partitioner=partitioner)
    (message,) = repairs_logged(caplog)
    (repair,) = program.repairs
    assert repair.bytes >= 4
    remedy = "Annotate these tensors so, or split their other dims"
    assert message == f"costly: {repair}. {remedy}"
    for part in (
        "op 'GatherV2' (",
        "test_repair_report.py:",
        "is a gather or scatter by indices in shards of unequal size, which XLA gets "
        "wrong; so that the result is right, it is laid out otherwise: operand 1 "
        "s32[2] [Y] -> [_]",
        f"({repair.bytes} bytes to each device in each run)",
    ):
        assert part in message
    np.testing.assert_array_equal(program(TABLE, TWO), TABLE[TWO])


def test_repairs_of_one_fault_are_told_together(caplog, monkeypatch):
    def thrice(table, i):
        return [costly(table + n, i + n) for n in range(3)]

    monkeypatch.setattr(check, "_WARNED_BYTES", 4)
    program = compiled(thrice)
    (message,) = repairs_logged(caplog)
    first, *others = sorted(program.repairs, key=lambda repair: -repair.bytes)
    assert len(others) == 2 and str(first) in message
    size = sum(repair.bytes for repair in others)
    assert f". So are 2 others ({size} bytes). Annotate these tensors so" in message


@over_partitioners
def test_a_repair_that_costs_nothing_is_none(partitioner, caplog):
    program = compiled(free, partitioner=partitioner, strict=True)
    assert [repair.bytes for repair in program.repairs] == [0]
    assert not repairs_logged(caplog)
    np.testing.assert_array_equal(program(TABLE, TWO), TABLE[TWO])


def test_what_is_laid_out_to_be_fast_is_no_warning(caplog):
    program = compiled(slow, strict=True)
    assert {repair.fault.name for repair in program.repairs} == {"few rows"}
    assert not repairs_logged(caplog)
    text = str(explain(program))
    assert "\n\nOps laid out otherwise, as XLA would be slow at them:\n" in text
    assert "      few rows; the rows are gathered" in text


@over_partitioners
def test_strictly_every_costly_op_is_named(partitioner):
    def two(table, i):
        return costly(table, i), tf.reverse(table, [0])[0:10:3], costly(table * 2.0, i)

    with pytest.raises(
        LoweringError,
        match=r"(?s)^two: the program is compiled strictly, and 2 of its ops would be "
        r"laid out otherwise at a cost:\n"
        r"  op 'GatherV2' \(.*test_repair_report\.py:\d+\) is a gather or scatter by "
        r"indices .*; so that the result is right, it is laid out otherwise: "
        r"operand 1 s32\[2\] \[Y\] -> \[_\].* \(\d+ bytes to each device in "
        r"each run\)\n"
        r"  op 'GatherV2_1' \(.*test_repair_report\.py:\d+\) .*\n"
        r"Annotate these tensors so, or split their other dims, or compile with "
        r"strict=False",
    ):
        compiled(two, partitioner=partitioner, strict=True)


@over_partitioners
def test_an_explanation_lists_repairs(partitioner):
    program = compiled(costly, partitioner=partitioner)
    explanation = explain(program)
    (repair,) = explanation.repairs
    assert (repair,) == program.repairs
    assert ("operand 1 s32[2]", "[Y]", "[_]") in [
        tuple(map(str, change)) for change in repair.changes()
    ]
    text = str(explanation)
    assert text.count("Ops laid out otherwise, as XLA would get them wrong:\n") == 1
    assert "      uneven indices; the indices are padded" in text
    assert f"  {repair.bytes} B to each device: GatherV2 (" in text
    assert "      operand 1 s32[2]: [Y] -> [_]" in text
    assert repr(repair) == f"<Repair: {repair}>"


def test_a_program_without_repairs_says_nothing(caplog):
    program = compiled(lambda table, i: tf.gather(table, i), strict=True)
    assert program.repairs == ()
    assert not repairs_logged(caplog)
    assert "laid out otherwise" not in str(explain(program))


def test_a_fault_ends_with_the_jaxlib_that_mends_it(table_of_faults):
    (fault,) = (fault for fault in faults.FAULTS if fault.name == "uneven indices")
    major, minor, patch = JAXLIB
    mended = (major, minor, patch), (major, minor), (major, minor - 1, 9)
    for until in mended:
        table_of_faults([dataclasses.replace(fault, until=until)])
        assert compiled(costly).repairs == ()
    for until in ((major, minor, patch + 1), (major, minor + 1), (major + 1,), None):
        table_of_faults([dataclasses.replace(fault, until=until)])
        assert [r.fault.name for r in compiled(costly).repairs] == [fault.name]


def test_a_workaround_ends_with_the_jaxlib_that_mends_it(monkeypatch):
    rows = {row.rewrite: row for row in workarounds.WORKAROUNDS}

    def rolled(until):
        row = dataclasses.replace(rows[rotate], until=until)
        monkeypatch.setattr(workarounds, "WORKAROUNDS", [row])
        module = Module(lower(lambda x: tf.roll(x, 3, 0), [tf.TensorSpec([8])]), MESH)
        with module.opened():
            stage = workarounds.Stage.SPLITTABLE
            workarounds.work_around(stage, module.write())
            return "stablehlo.dynamic_slice" in str(module.operation)

    major, minor, patch = JAXLIB
    assert rolled((major, minor, patch)) and rolled((major, minor - 1, 9))
    assert not rolled((major, minor, patch + 1)) and not rolled(None)


@over_partitioners
def test_an_op_that_stays_faulty_is_refused(partitioner, table_of_faults, monkeypatch):
    """As if completion did not heed annotations, and XLA got any split wrong."""
    fault = dataclasses.replace(faults.FAULTS[0], choose=even_layout)
    table_of_faults([fault])
    monkeypatch.setattr(check, "lay_out_evenly", lambda *args: None)
    with pytest.raises(
        LoweringError,
        match=r"costly: op 'GatherV2' \(.*test_repair_report\.py:\d+\) is a gather .*, "
        r"which XLA gets wrong, and propagation keeps the layout .*\[Y\].* though it "
        "is annotated differently; annotate its operands, or use the other partitioner",
    ):
        compiled(costly, partitioner=partitioner)
