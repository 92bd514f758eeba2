"""Shardings: dims_mapping, shapes and offsets of shards, text, merging."""

import re

import numpy as np
import pytest

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y"), (2, 4))


@pytest.mark.parametrize(
    "dims_mapping,text",
    [
        ([0, -1, 1], "[X,_,Y]"),
        (["Y", None, "X"], "[Y,_,X]"),
        (np.array([1, 0]), "[Y,X]"),
        ([(0, 1), -1], "[X.Y,_]"),
        ([("Y", 0)], "[Y.X]"),
        ([None, (), [-1]], "[_,_,_]"),
        ([], "[]"),
    ],
)
def test_reads_dims_mapping(dims_mapping, text):
    assert str(Sharding.from_dims_mapping(MESH, dims_mapping)) == text


@pytest.mark.parametrize(
    "dims_mapping,rank,message",
    [
        ([0], 2, "dims_mapping [0] is of rank 1, and the tensor of rank 2; give"),
        ("[X,_]", 2, "dims_mapping '[X,_]' is a text: give a sequence with an entry"),
        ([2], 1, "entry 2 is no axis of the mesh (X=2, Y=4): use 0..1, -1"),
        ([-2], 1, "entry -2 is no axis"),
        (["Z"], 1, "unknown mesh axis 'Z': the mesh has ('X', 'Y')"),
        (
            ["X1"],
            1,
            "unknown mesh axis 'X1': the mesh has ('X', 'Y'); did you mean 'X'?",
        ),
        (["Y:(1)3"], 1, "part 'Y:(1)3': 1 * 3 must divide the size 4 of axis 'Y'"),
        (["Y", "Y:(2)2"], 2, "'Y:(2)2' is used twice in one tensor: on dim 0 and on"),
        ([0, -1, 0], 3, "'X' is used twice in one tensor: on dim 0 and on dim 2"),
        ([("Y", 1)], 1, "'Y' is used twice in one tensor: on dim 0 and on dim 0"),
    ],
)
def test_a_bad_dims_mapping_is_refused(dims_mapping, rank, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sharding.from_dims_mapping(MESH, dims_mapping, rank)


def test_shapes_of_shards():
    mesh = DeviceMesh(("X", "Y", "Z"), (2, 4, 4))
    sharding = Sharding.from_dims_mapping(mesh, [("X", "Y"), None, "Z"])
    assert sharding.rank == 3 and sharding.splits() == (8, 1, 4)
    assert sharding.shard_shape((16, 3, 8)) == (2, 3, 2)
    assert sharding.padded_shape((16, 3, 8)) == (16, 3, 8)
    # Dims that do not divide, one of them smaller than its number of shards.
    assert sharding.shard_shape((9, 3, 3)) == (2, 3, 1)
    assert sharding.padded_shape((9, 3, 3)) == (16, 3, 4)
    assert str(sharding.even((9, 3, 4))) == "[_,_,Z]"
    assert sharding.even((16, 3, 4)) == sharding
    with pytest.raises(ValueError):
        sharding.padded_shape((16, 3))


def test_axes_of_one_device_split_nothing():
    mesh = DeviceMesh(("X", "Y"), (1, 4))
    assert Sharding.from_dims_mapping(mesh, ["X", None]).is_replicated()
    assert Sharding.replicated(mesh, 2).is_replicated()
    assert not Sharding.from_dims_mapping(mesh, ["X", "Y"]).is_replicated()


def test_parts_of_an_axis():
    sharding = Sharding.from_dims_mapping(MESH, ["Y:(2)2", ("X", "Y:(1)2")])
    assert str(sharding) == "[Y:(2)2,X.Y:(1)2]" and sharding.splits() == (2, 4)
    assert list(MESH.place_along("Y:(1)2")[0]) == [0, 0, 1, 1]
    assert list(MESH.place_along("Y:(2)2")[0]) == [0, 1, 0, 1]


def test_offsets_of_shards():
    sharding = Sharding.from_dims_mapping(MESH, ["Y", None, "X"])
    offsets = sharding.shard_offsets((10, 7, 6))  # 10 over 4: shards of 3, padded.
    assert offsets.shape == (2, 4, 3)
    assert offsets[0, :, 0].tolist() == [0, 3, 6, 9]
    assert offsets[:, 0, 2].tolist() == [0, 3] and not offsets[..., 1].any()
    assert Sharding.replicated(MESH, 0).shard_offsets(()).shape == (2, 4, 0)


@pytest.mark.parametrize(
    "text", ["[]", "[X,_,Y]", "[X.Y,_]", "[X,?]", "[X?,_]", "[_,Y:(1)2] manual{X}"]
)
def test_reads_its_own_text(text):
    assert str(Sharding.parse(MESH, text)) == text


@pytest.mark.parametrize(
    "text,message",
    [
        ("X,Y", "'X,Y' is no sharding such as '[X,_,Y.Z]'"),
        ("[X,,Y]", "'[X,,Y]' has a dim without a word: `_` is for unsplit"),
        ("[X__]", "unknown mesh axis 'X__'"),
        ("[X,Z]", "unknown mesh axis 'Z'"),
        ("[X] manual{X}", "'X' is used twice in one tensor: on dim 0 and as manual"),
    ],
)
def test_text_that_is_no_sharding_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sharding.parse(MESH, text)


@pytest.mark.parametrize(
    "sharding,but,text",
    [
        ("[X,_,_]", (), "[X,?,?]"),
        ("[X,_,_]", ("Y",), "[X,_,_]"),
        ("[X,Y,_]", (), "[X,Y,_]"),
    ],
)
def test_opens_dims_if_an_axis_is_left_for_them(sharding, but, text):
    opened = Sharding.parse(MESH, sharding).opened((1, 2), but=but)
    assert str(opened) == text
