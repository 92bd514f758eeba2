"""Shardings in XLA's languages: OpSharding, HLO's text, Shardy's, and back."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxlib import _hlo
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y"), (2, 4))


def test_figure_1_of_the_paper():
    mesh = DeviceMesh(("x", "y"), (2, 2), [0, 2, 1, 3])
    for dims_mapping, want in [
        ([-1, -1], "{replicated}"),
        ([0, 1], "{devices=[2,2]0,2,1,3}"),
        ([0, -1], "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"),
    ]:
        sharding = Sharding.from_dims_mapping(mesh, dims_mapping)
        assert sharding.to_hlo() == want


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


@pytest.mark.parametrize(
    "text,hlo,sdy",
    [
        (
            "[X,_] manual{Y}",
            "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dims={manual}}",
            '[{"X"}, {}]',
        ),
        (
            "[_,?] manual{X}",
            "{devices=[1,1,2,4]0,1,2,3,4,5,6,7 last_tile_dims={manual, replicated}}",
            "[{}, {?}]",
        ),
        ("[_,_] manual{X,Y}", "{manual}", "[{}, {}]"),
        (
            "[Y:(2)2,X?]",
            "{devices=[2,2,2]0,2,4,6,1,3,5,7 last_tile_dim_replicate}",
            '[{"Y":(2)2}, {"X", ?}]',
        ),
    ],
)
def test_forms_of_manual_unspecified_and_parts(text, hlo, sdy):
    sharding = Sharding.parse(MESH, text)
    assert (sharding.to_hlo(), sharding.to_sdy()) == (hlo, sdy)


@st.composite
def shardings(draw):
    """A sharding of up to 4 dims over a mesh of up to 4 axes, devices in any order.

    Some axes are cut into parts, some are manual.
    """
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    ids = draw(st.none() | st.permutations(range(math.prod(shape))))
    mesh = DeviceMesh(tuple("ABCD"[: len(shape)]), shape, ids)
    rank = draw(st.integers(0, 4))
    axes = []
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        cut = size == 4 and draw(st.booleans())
        axes += [f"{axis}:(1)2", f"{axis}:(2)2"] if cut else [axis]
    dims = [[] for _ in range(rank)]
    manual = []
    for axis in draw(st.permutations(axes)):
        dim = draw(st.integers(-2, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
        elif dim == -2 and draw(st.booleans()):
            manual.append(axis)
    return Sharding(mesh, tuple(map(tuple, dims)), (), tuple(manual))


def in_xla(sharding):
    """XLA's own reading of the OpSharding that is put on annotations."""
    proto = _hlo.OpSharding()
    proto.ParseFromString(sharding.to_op_sharding().SerializeToString())
    return _hlo.HloSharding.from_proto(proto)


def place_of_shards(sharding):
    """{device id: its shard's index along each dim}, from the mesh's own axes."""
    mesh = sharding.mesh
    forms = {}
    for place in itertools.product(*map(range, mesh.shape)):
        along = dict(zip(mesh.axis_names, place, strict=True))
        index = []
        for axes in sharding.dims:
            number = 0
            for axis in axes:
                name, _, part = axis.partition(":")
                size, step = mesh.axis_size(axis), 1
                if part == "(1)2":  # The coarser half of an axis of 4.
                    step = 2
                number = number * size + along[name] // step % size
            index.append(number)
        forms[int(mesh.ids[place])] = tuple(index)
    return forms


@settings(deadline=None, max_examples=200)
@given(shardings())
def test_every_device_holds_the_shard_of_its_place_in_the_mesh(sharding):
    xla = in_xla(sharding)
    places = place_of_shards(sharding)
    if xla.is_replicated() or xla.is_manual():
        assert {n for place in places.values() for n in place} <= {0}
        return
    tiles = xla.tile_assignment_dimensions()
    devices = np.reshape(xla.tile_assignment_devices(), tiles)
    assert tuple(tiles[: sharding.rank]) == sharding.splits()
    for index, device in np.ndenumerate(devices):
        assert places[device] == index[: sharding.rank]


@settings(deadline=None, max_examples=200)
@given(shardings())
def test_is_read_back_from_every_form(sharding):
    mesh, rank = sharding.mesh, sharding.rank
    for text in (sharding.to_hlo(), str(in_xla(sharding))):
        assert_same(Sharding.from_hlo(mesh, text, rank), sharding)
    proto = sharding.to_op_sharding()
    assert_same(Sharding.from_op_sharding(mesh, proto, rank), sharding)
    assert Sharding.parse(mesh, str(sharding)) == sharding
    from_sdy = Sharding.from_sdy(mesh, sharding.to_sdy())
    assert from_sdy == dataclasses.replace(sharding, manual=())


def assert_same(got, want):
    """Same axes, but for how parts are cut and axes of one device, and manual order."""
    mesh = want.mesh
    assert got.mesh == mesh and got.splits() == want.splits()
    shape = want.splits()
    assert np.array_equal(got.shard_offsets(shape), want.shard_offsets(shape))
    groups = [manual_groups(sharding) for sharding in (got, want)]
    assert groups[0] == groups[1]


def manual_groups(sharding):
    """The sets of devices that differ along other axes than the manual ones."""
    place = np.zeros(sharding.mesh.shape, int)
    for axis in sharding.manual:
        size = sharding.mesh.axis_size(axis)
        place = place * size + sharding.mesh.place_along(axis)
    ids = sharding.mesh.ids
    return {frozenset(ids[place == n].tolist()) for n in np.unique(place)}


@settings(deadline=None, max_examples=50)
@given(shardings())
def test_sizes_of_shards_agree_with_the_splits(sharding):
    shape = tuple(range(5, 5 + sharding.rank))
    padded = sharding.padded_shape(shape)
    shard = sharding.shard_shape(shape)
    for size, padded_size, part, n in zip(
        shape, padded, shard, sharding.splits(), strict=True
    ):
        assert padded_size == part * n and 0 <= padded_size - size < n
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
    single = DeviceMesh(("X",), (1,))
    assert str(Sharding.from_hlo(single, "{maximal device=0}", 1)) == "[_]"


def test_reads_what_is_annotated_over_a_mesh_of_one_device():
    """As the op holds it, which another program's mesh must not take."""
    single = DeviceMesh(("X",), (1,))

    @tf.function(autograph=False)
    def annotated(x):
        return annotate(x, Sharding(single, (("X",), ())))

    graph = annotated.get_concrete_function(tf.TensorSpec([4, 2])).graph
    (op,) = (op for op in graph.get_operations() if op.type == "XlaSharding")
    proto = xla_data_pb2.OpSharding.FromString(op.get_attr("sharding"))
    assert str(Sharding.from_op_sharding(single, proto, 2)) == "[_,_]"
    with pytest.raises(ValueError, match="over a mesh of one device, .* the program"):
        Sharding.from_op_sharding(MESH, proto, 2)


@pytest.mark.parametrize(
    "hlo,text",
    [
        ("{devices=[4,2]<=[8]}", "[X.Y:(1)2,Y:(2)2]"),
        ("{devices=[2,2,2]<=[8] last_tile_dim_replicate}", "[X,Y:(1)2]"),
        ("{devices=[2,2,2]<=[2,2,2]T(0,2,1) last_tile_dim_replicate}", "[X,Y:(2)2]"),
        ("{devices=[2,1,4]<=[8] last_tile_dims={manual}}", "[X,_] manual{Y}"),
    ],
)
def test_reads_parts_of_axes_and_manual_groups(hlo, text):
    assert str(Sharding.from_hlo(MESH, hlo, 2)) == text


def test_any_device_order_is_kept():
    for hlo, rank in [
        ("{devices=[8]0,1,2,3,4,5,7,6}", 1),
        ("{devices=[2,4]7,6,5,4,3,2,1,0}", 2),
        ("{devices=[4,1,2]1,3,0,2,4,6,5,7 last_tile_dim_replicate}", 2),
    ]:
        sharding = Sharding.from_hlo(MESH, hlo, rank)
        assert sharding.to_hlo() == hlo
        assert sharding.mesh.axis_names == MESH.axis_names
        assert sharding.mesh.shape == MESH.shape


@pytest.mark.parametrize(
    "mesh,hlo,message",
    [
        (
            MESH,
            "{devices=[2,2]<=[4] last_tile_dim_replicate}",
            "over 4 devices, 0 to 3",
        ),
        (DeviceMesh(("X",), (2,)), "{devices=[8]<=[8]}", r"mesh \(X=2\) has 2: two m"),
        (MESH, "{devices=[2,4]<=[8]}", "tile assignment .* does not fit rank 1"),
        (MESH, "{maximal device=1}", "of a kind that is not supported here"),
        (MESH, "{devices=[2,4]<=[8] metadata={}}", "of a kind that is not supported"),
        (MESH, "{{replicated}, {replicated}}", "of a kind that is not supported here"),
        (
            MESH,
            "{devices=[2,4]<=[8] last_tile_dims={maximal}}",
            "of a kind that is not",
        ),
    ],
)
def test_what_is_no_sharding_of_the_mesh_is_refused(mesh, hlo, message):
    with pytest.raises(ValueError, match=message):
        Sharding.from_hlo(mesh, hlo, 1)


@pytest.mark.parametrize(
    "text,message",
    [
        ("{replicated}", "no Shardy sharding that is supported here"),
        ('<@mesh, [{"X"}], unreduced={"Y"}>', "no Shardy sharding that is supported"),
        ('[{"Z"}]', "unknown mesh axis 'Z'"),
    ],
)
def test_what_is_no_shardy_sharding_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Sharding.from_sdy(MESH, text)
    full = '#sdy.sharding<mesh<["X"=2, "Y"=4]>, [{"Y", ?}, {}], replicated={"X"}>'
    assert str(Sharding.from_sdy(MESH, full)) == "[Y?,_]"
