"""Unreduced and reduced axes of shardings: their text, duals, and what is refused."""

import re

import pytest

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y", "Z"), (2, 4, 1))


def read(text, mesh=MESH):
    return Sharding.parse(mesh, text)


@pytest.mark.parametrize(
    "unreduced,reduced,text",
    [
        (["X"], [], "[_,_]{U:X}"),
        ([], ["Y"], "[_,_]{R:Y}"),
        (["X", "Y"], [], "[_,_]{U:X,Y}"),
        (["Y", "X"], [], "[_,_]{U:X,Y}"),  # In the mesh's order, however written.
        (["Z", "Y"], ["X"], "[_,_]{U:Y,Z}{R:X}"),
        ([1], [0], "[_,_]{U:Y}{R:X}"),
        ("Y", 0, "[_,_]{U:Y}{R:X}"),
        ((), None, "[_,_]"),
    ],
)
def test_dims_mappings_with_types_and_their_text(unreduced, reduced, text):
    sharding = Sharding.from_dims_mapping(
        MESH, [-1, None], unreduced=unreduced, reduced=reduced
    )
    assert str(sharding) == text and read(text) == sharding
    assert sharding.is_typed == ("{" in text)
    assert sharding.types_text() == text.removeprefix("[_,_]")


@pytest.mark.parametrize(
    "text", ["[]{U:X}", "[X,_]{U:Y}", "[_,Y.Z]{R:X}", "[Y]{U:X}{R:Z}"]
)
def test_reads_its_own_text(text):
    assert str(read(text)) == text


def test_the_order_in_which_axes_are_read_makes_no_difference():
    assert read("[_]{U:Y,X}") == read("[_]{U:X,Y}")
    assert hash(read("[_]{R:Y,X}")) == hash(read("[_]{R:X,Y}"))
    assert read("[_]{U:X}") != read("[_]{R:X}") != read("[_]")


@pytest.mark.parametrize(
    "text,message",
    [
        ("[_]{U:W}", "unknown mesh axis 'W'"),
        ("[_]{R:x}", "unknown mesh axis 'x': the mesh has ('X', 'Y', 'Z')"),
        ("[_]{U:X}{U:Y}", "'[_]{U:X}{U:Y}' is no sharding such as"),
        ("[_]{R:X}{U:Y}", "is no sharding such as"),
        ("[_]{P:X}", "is no sharding such as"),
        ("{U:X}", "is no sharding such as"),
        ("[_]{U:X", "is no sharding such as"),
        ("[_]{U:X} manual{Y}", "is no sharding such as"),
        (
            "[_,X]{U:X}",
            "'X' is used twice in one tensor: on dim 1 and as unreduced",
        ),
        ("[X.Y]{R:Y}", "'Y' is used twice in one tensor: on dim 0 and as reduced"),
        (
            "[_]{U:X}{R:X}",
            "'X' is used twice in one tensor: as unreduced and as reduced",
        ),
        (
            "[_]{U:X,X}",
            "'X' is used twice in one tensor: as unreduced and as unreduced",
        ),
        ("[Y:(1)2]{U:Y}", "'Y' is used twice in one tensor: on dim 0 and as unreduced"),
        (
            "[_]{U:Y:(1)2}",
            "unreduced or reduced along 'Y:(1)2', a part of a mesh axis: that works "
            "along full mesh axes",
        ),
        ("[_]{R:Y:(2)2}", "unreduced or reduced along 'Y:(2)2', a part of a mesh axis"),
        (
            "[?]{U:X}",
            "unreduced or reduced along X, and also manual or left to propagation in "
            "some dims: give all its dims",
        ),
        ("[Y?,_]{R:X}", "reduced along X, and also manual or left to propagation"),
        (
            "[_] manual{Y}{U:X}",
            "reduced along X, and also manual or left to propagation",
        ),
        ("[_] manual{X}{U:X}", "'X' is used twice in one tensor: as manual and as unr"),
    ],
)
def test_types_that_no_tensor_has_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(text)


@pytest.mark.parametrize("text", ["[_]{U:}", "[_]{R:}", "[_]{U:X,}"])
def test_an_axis_without_a_name_is_refused(text):
    with pytest.raises(ValueError, match="sharding|axis"):
        read(text)


@pytest.mark.parametrize(
    "text,dual",
    [
        ("[X,_]", "[X,_]"),
        ("[X,_]{U:Y}", "[X,_]{R:Y}"),
        ("[_]{R:X,Y}", "[_]{U:X,Y}"),
        ("[_]{U:X}{R:Y}", "[_]{U:Y}{R:X}"),
        ("[X,?]", "[X,?]"),
        ("[_] manual{X}", "[_] manual{X}"),
    ],
)
def test_the_dual_is_that_of_the_gradient(text, dual):
    assert str(read(text).dual()) == dual
    assert read(text).dual().dual() == read(text)


def test_nothing_is_pending_along_axes_of_one_device():
    typed = read("[_]{U:X,Z}{R:Y}")
    assert str(typed.without_trivial_types()) == "[_]{U:X}{R:Y}"
    assert str(read("[Z]{R:X}").without_trivial_types()) == "[Z]{R:X}"
    alone = read("[_]{U:Z}")
    assert not alone.without_trivial_types().is_typed and alone.is_typed
    assert str(typed.untyped()) == "[_]" and not typed.untyped().is_typed


def test_only_what_is_unreduced_differs_from_device_to_device():
    assert read("[_,_]{R:X}").is_replicated()
    assert not read("[_,_]{U:X}").is_replicated()
    assert read("[_,_]{U:Z}").is_replicated()


def test_shapes_of_shards_are_those_of_what_the_parts_add_up_to():
    for types in ("", "{U:X}", "{R:X}"):
        sharding = read(f"[Y,_]{types}")
        assert sharding.splits() == (4, 1) and sharding.shard_shape((9, 3)) == (3, 3)
        assert sharding.padded_shape((9, 3)) == (12, 3)
        assert str(sharding.even((9, 3))) == f"[_,_]{types}"
