"""What notebooks show, and arrays drawn with the devices of their shards."""

import re
import sys
import types
import xml.dom.minidom

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from tests.framework.compiler.programs import MESH, PERMUTED, split


def parsed(page):
    """HTML that is well-formed, as its elements."""
    return xml.dom.minidom.parseString(page)


def on_devices(shape, *dims, mesh=MESH):
    program = mw.compile_program(
        lambda x: x + 1,
        [tf.TensorSpec(shape)],
        mesh,
        in_shardings=[split(*dims, mesh=mesh)],
        out_shardings=split(*dims, mesh=mesh),
    )
    return program(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("dims", "counts"),
    [
        ((), (1, 1)),
        (("X", None), (2, 1)),
        ((None, "Y"), (1, 4)),
        (("X", "Y"), (2, 4)),
        ((("X", "Y"), None), (8, 1)),
        ((None, "Y:(1)2"), (1, 2)),
    ],
)
def test_a_sharding_is_drawn(dims, counts):
    sharding = split(*(dims or (None, None)))
    document = parsed(sharding._repr_html_())
    lines = [path.getAttribute("d") for path in document.getElementsByTagName("path")]
    assert sum("h" in line for line in lines) == counts[0] - 1
    assert sum("v" in line for line in lines) == counts[1] - 1
    (code,) = document.getElementsByTagName("code")
    assert code.firstChild.data == str(sharding)
    assert bool(document.getElementsByTagName("rect")) == (counts != (1, 1))


def test_a_plan_is_a_table():
    plan = mw.ShardingPlan(
        mesh_shape=(2, 4),
        weights={"model": "X", "hidden": ("X", "Y")},
        activations={"batch": "X", "model": None},
    )
    document = parsed(plan._repr_html_())
    cells = [
        ["".join(n.data for n in _texts(cell)) for cell in row.childNodes]
        for row in document.getElementsByTagName("tr")
    ]
    assert cells == [
        ["dim", "weights", "activations"],
        ["model", "X", "–"],
        ["hidden", "X, Y", ""],
        ["batch", "", "X"],
    ]


def _texts(node):
    if node.nodeType == node.TEXT_NODE:
        return [node]
    return [text for child in node.childNodes for text in _texts(child)]


def test_a_program_is_a_table_of_its_arguments_and_results():
    program = mw.compile_program(
        lambda batch: {"y": batch["<x>"] + 1},
        [{"<x>": tf.TensorSpec([8, 4])}],
        MESH,
        in_shardings=[{"<x>": split("X", None)}],
        name="adding",
    )
    page = program._repr_html_()
    text = "".join(node.data for node in _texts(parsed(page)))
    assert (
        "<Program 'adding'" in text and "0.<x>float32[8,4] [X,_] over X=2, Y=4" in text
    )
    assert "resultyfloat32[8,4]left to completion" in text
    assert re.search(r"\d+ B on each device", text)


def test_of_many_arguments_the_first_are_shown():
    program = mw.compile_program(
        lambda xs: tf.add_n(xs), [[tf.TensorSpec([8])] * 40], MESH
    )
    page = program._repr_html_()
    assert page.count("<tr>") == 25 and "and 17 more" in page


DRAWN = """\
float32[8,4] on 8 devices
down: dim 0 in 2 (X); across: dim 1 in 4 (Y)
+------------------+------------------+------------------+------------------+
|        0         |        1         |        2         |        3         |
+------------------+------------------+------------------+------------------+
|        4         |        5         |        6         |        7         |
+------------------+------------------+------------------+------------------+"""


def test_an_array_is_drawn_with_the_devices_of_its_shards():
    assert str(mw.visualize(on_devices([8, 4], "X", "Y"))) == DRAWN


@pytest.mark.parametrize(
    ("shape", "dims", "mesh", "holders"),
    [
        ([8, 4], (None, "X"), MESH, [["0-3", "4-7"]]),
        ([8, 4], ("X", None), MESH, [["0-3"], ["4-7"]]),
        ([8], (("X", "Y"),), MESH, [[str(n) for n in range(8)]]),
        ([8, 4], (None, None), MESH, [["0-7"]]),
        ([4, 4], (None, "Y"), PERMUTED, [["3,5", "1,7", "2,4", "0,6"]]),
        ([], (), MESH, [["0-7"]]),
    ],
)
def test_which_devices_hold_a_shard(shape, dims, mesh, holders):
    picture = mw.visualize(on_devices(shape, *dims, mesh=mesh))
    document = parsed(picture._repr_html_())
    rows = document.getElementsByTagName("tr")
    shown = [[cell.firstChild.data for cell in row.childNodes] for row in rows]
    assert shown == holders
    assert max(map(len, str(picture).splitlines())) <= 80


def test_three_split_dims_are_all_told_apart():
    mesh = mw.DeviceMesh(("A", "B", "C"), (2, 2, 2))
    picture = mw.visualize(on_devices([4, 4, 4], "A", "B", "C", mesh=mesh))
    assert picture.down == "dim 0 in 2 (A), then dim 1 in 2 (B)"
    held = [[cell.devices for cell in row] for row in picture.cells]
    assert held == [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)], [(6,), (7,)]]


def test_colours_are_for_terminals_alone(monkeypatch):
    picture = mw.visualize(on_devices([8, 4], "X", "Y"))
    assert "\x1b" not in str(picture) + repr(picture)
    terminal = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        colored = repr(picture)
    assert len(set(re.findall(r"\x1b\[48;2;[\d;]+m", colored))) == 7  # Then anew.
    assert re.sub(r"\x1b\[[\d;]+m", "", colored) == str(picture)


@pytest.mark.parametrize("array", [np.zeros(3), tf.zeros(3)])
def test_what_is_not_on_devices_is_refused(array):
    with pytest.raises(TypeError, match=r"program.shard\(...\) puts host arrays onto"):
        mw.visualize(array)
