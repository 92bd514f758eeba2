"""Shardings: dims_mapping, shapes, and the way to XLA's forms and back."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxlib import _hlo

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
        ([0], 2, "dims_mapping [0] has 1 entries but the tensor has rank 2"),
        ([2], 1, "entry 2 is no axis of the mesh (X=2, Y=4): use 0..1, -1"),
        ([-2], 1, "entry -2 is no axis"),
        (["Z"], 1, "unknown mesh axis 'Z': the mesh has ('X', 'Y')"),
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


def test_forms_of_xla():
    sharding = Sharding.from_dims_mapping(MESH, [None, "Y"])
    assert sharding.to_sdy() == '[{}, {"Y"}]'
    assert sharding.to_hlo() == (
        "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    )
    assert Sharding.from_dims_mapping(MESH, ["Y", "X"]).to_hlo() == (
        "{devices=[4,2]0,4,1,5,2,6,3,7}"
    )
    assert Sharding.replicated(MESH, 2).to_hlo() == "{replicated}"


@st.composite
def shardings(draw):
    """A sharding of up to 4 dims over a mesh of up to 4 axes, devices in any order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ids = draw(st.none() | st.permutations(range(math.prod(shape))))
    mesh = DeviceMesh("ABCD"[: len(shape)], shape, ids)
    rank = draw(st.integers(0, 4))
    dims = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return Sharding(mesh, tuple(map(tuple, dims)))


def in_xla(sharding):
    """XLA's own reading of the OpSharding that is put on annotations."""
    proto = _hlo.OpSharding()
    proto.ParseFromString(sharding.to_op_sharding().SerializeToString())
    return _hlo.HloSharding.from_proto(proto)


def place_of_shards(sharding):
    """{device id: its shard's index along each dim}, from the mesh's own axes."""
    mesh = sharding.mesh
    found = {}
    for place in itertools.product(*map(range, mesh.shape)):
        along = dict(zip(mesh.axis_names, place, strict=True))
        index = []
        for axes in sharding.dims:
            number = 0
            for axis in axes:
                number = number * mesh.axis_size(axis) + along[axis]
            index.append(number)
        found[int(mesh.ids[place])] = tuple(index)
    return found


@settings(deadline=None, max_examples=200)
@given(shardings())
def test_every_device_holds_the_shard_of_its_place_in_the_mesh(sharding):
    xla = in_xla(sharding)
    places = place_of_shards(sharding)
    if xla.is_replicated():
        assert {n for place in places.values() for n in place} <= {0}
        return
    tiles = xla.tile_assignment_dimensions()
    devices = np.reshape(xla.tile_assignment_devices(), tiles)
    assert xla.replicate_on_last_tile_dim() == (len(tiles) > sharding.rank)
    assert tuple(tiles[: sharding.rank]) == sharding.splits()
    for index, device in np.ndenumerate(devices):
        assert places[device] == index[: sharding.rank]


@settings(deadline=None, max_examples=200)
@given(shardings())
def test_is_read_back_from_hlo_text(sharding):
    mesh = sharding.mesh
    without_single = tuple(
        tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
        for axes in sharding.dims
    )
    want = Sharding(mesh, without_single)
    for text in (sharding.to_hlo(), str(in_xla(sharding))):
        assert Sharding.from_hlo(mesh, text, sharding.rank) == want


@settings(deadline=None, max_examples=50)
@given(shardings())
def test_sizes_of_shards_agree_with_the_splits(sharding):
    shape = tuple(range(5, 5 + sharding.rank))
    padded = sharding.padded_shape(shape)
    shard = sharding.shard_shape(shape)
    for size, whole, part, n in zip(
        shape, padded, shard, sharding.splits(), strict=True
    ):
        assert whole == part * n and 0 <= whole - size < n
    assert sharding.even(padded) == sharding
    even = sharding.even(shape)
    assert even.padded_shape(shape) == shape


def test_reads_the_text_that_xla_shortens():
    def read(text, rank):
        return str(Sharding.from_hlo(MESH, text, rank))

    assert read("{devices=[2,4]<=[8]}", 2) == "[X,Y]"
    assert read("{devices=[4,2]<=[2,4]T(1,0)}", 2) == "[Y,X]"
    assert read("{devices=[8]<=[2,4]T(1,0)}", 1) == "[Y.X]"
    assert read("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", 2) == "[Y,_]"
    # Devices with the same shard may stand in any order.
    assert read("{devices=[2,4]0,3,2,1,4,7,5,6 last_tile_dim_replicate}", 1) == "[X]"
    one = DeviceMesh(("X",), (1,))
    assert str(Sharding.from_hlo(one, "{maximal device=0}", 1)) == "[_]"


@pytest.mark.parametrize(
    "mesh,rank,text",
    [
        (MESH, 2, "{devices=[4,2]<=[8]}"),  # Of a mesh (4,2).
        (MESH, 2, "{devices=[2,2,2]<=[8] last_tile_dim_replicate}"),  # Half of axis Y.
        (MESH, 1, "{devices=[8]0,1,2,3,4,5,7,6}"),  # Of devices in another order.
        (MESH, 1, "{devices=[2,2]0,1,2,3 last_tile_dim_replicate}"),  # Of fewer.
        (DeviceMesh(("X",), (2,)), 1, "{devices=[2,4]<=[8] last_tile_dim_replicate}"),
    ],
)
def test_what_the_mesh_cannot_express_is_refused(mesh, rank, text):
    with pytest.raises(ValueError, match="cannot be written over the axes of the prog"):
        Sharding.from_hlo(mesh, text, rank)


@pytest.mark.parametrize(
    "text",
    [
        "{manual}",
        "{maximal device=1}",
        "{devices=[2,1,4]<=[8] last_tile_dims={manual, replicated}}",
        "{devices=[2,4]<=[8] metadata={}}",
        "{{replicated}, {replicated}}",
    ],
)
def test_kinds_that_annotations_do_not_have_are_refused(text):
    with pytest.raises(ValueError, match="of a kind that is not supported here"):
        Sharding.from_hlo(MESH, text, 2)
