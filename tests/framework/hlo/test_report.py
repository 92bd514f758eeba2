"""Reading collectives from HLO text, in every form that XLA prints."""

import itertools

import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.report import Collective, collectives_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.xla_form import axis_groups

MESH = DeviceMesh(("X", "Y"), (2, 4))
CUBE = DeviceMesh(("A", "B", "C"), (2, 2, 2))
LINE = DeviceMesh(("L",), (12,))
ALONG_X = ((0, 4), (1, 5), (2, 6), (3, 7))
ALONG_Y = ((0, 1, 2, 3), (4, 5, 6, 7))


def collectives(lines: str, mesh: DeviceMesh = MESH) -> list[Collective]:
    text = f"HloModule f\n\nENTRY %main (x: f32[]) -> f32[] {{\n{lines}\n}}\n"
    return collectives_of(HloModule(text), mesh)


def only(text: str, mesh: DeviceMesh = MESH) -> Collective:
    (collective,) = collectives(f"  {text}", mesh)
    return collective


def sets(groups):
    return {frozenset(group) for group in groups}


def all_reduce(groups: str, mesh: DeviceMesh = MESH) -> Collective:
    return only(
        f"%all-reduce.1 = f32[8,16]{{1,0}} all-reduce(%x), channel_id=1, {groups}, "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="a/b"}',
        mesh,
    )


@pytest.mark.parametrize(
    "text,groups",
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ALONG_X),
        ("[4,2]<=[2,4]T(1,0)", ALONG_X),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ALONG_X),
        ("@mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ALONG_X),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ALONG_X),
        ("mesh['a'=1,'b'=2,'c'=4], device_ids=(0,1,2,3,4,5,6,7) {'b'}", ALONG_X),
        ("mesh['a'=8] {'a':(1)2}", ALONG_X),
        ("[2,4]<=[8]", ALONG_Y),
        ("mesh['a'=8] {'a':(2)4}", ALONG_Y),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'b'}", ALONG_Y),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ALONG_Y),
        ("{}", (tuple(range(8)),)),
        ("{{0,1,2,3,4,5,6,7}}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("[8,1]<=[8]", tuple((i,) for i in range(8))),
        # Half of axis Y: two forms of a part of an axis, in the middle and last.
        ("{{0,2},{1,3},{4,6},{5,7}}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_reads_replica_groups(text, groups):
    collective = all_reduce(f"replica_groups={text}")
    assert sets(collective.groups) == sets(groups)
    assert sum(map(len, collective.groups)) == 8
    assert collective.kind == "all-reduce" and collective.name == "all-reduce.1"
    assert collective.op_name == "a/b"


@pytest.mark.parametrize("text", ["nonsense", "mesh['a'=8], device_ids=(x) {'a'}"])
def test_replica_groups_of_an_unknown_form_are_an_error(text):
    with pytest.raises(ValueError, match="replica groups of an unknown form"):
        all_reduce(f"replica_groups={text}")


@pytest.mark.parametrize(
    "mesh,groups,axes",
    [
        (MESH, "{{0,4},{1,5},{2,6},{3,7}}", ("X",)),
        (MESH, "{{0,1,2,3},{4,5,6,7}}", ("Y",)),
        (MESH, "{}", ("X", "Y")),
        (MESH, "[8,1]<=[8]", ()),
        # Half of Y: the coarser one, the finer one, and pairs that no part makes.
        (MESH, "{{0,2},{1,3},{4,6},{5,7}}", ("Y:(1)2",)),
        (MESH, "{{0,1},{2,3},{4,5},{6,7}}", ("Y:(2)2",)),
        (MESH, "{{0,3},{1,2},{4,7},{5,6}}", None),
        (MESH, "{{0,2,4,6},{1,3,5,7}}", ("X", "Y:(1)2")),
        # Whole in a group, but with others in another one.
        (MESH, "{{0,2},{1,3},{4,5},{6,7}}", None),
        (MESH, "{{0,1,2},{3,4,5}}", None),
        (LINE, "{{0,3,6,9},{1,4,7,10},{2,5,8,11}}", ("L:(1)4",)),
        (LINE, "{{0,2,4},{1,3,5},{6,8,10},{7,9,11}}", ("L:(2)3",)),
        # The finest and the coarsest part of an axis; one that is not the first group.
        (LINE, "{{0,1,6,7},{2,3,8,9},{4,5,10,11}}", ("L:(1)2", "L:(6)2")),
        (LINE, "{{7,9,11},{1,3,5}}", ("L:(2)3",)),
        (LINE, "{{0,8},{1,9}}", None),
        (CUBE, "{{0,4},{1,5},{2,6},{3,7}}", ("A",)),
        (CUBE, "{{0,2},{1,3},{4,6},{5,7}}", ("B",)),
        (CUBE, "{{0,1},{2,3},{4,5},{6,7}}", ("C",)),
        (CUBE, "{{5,4,1,0},{2,3,6,7}}", ("A", "C")),
        (CUBE, "{{0,1,2,3},{4,5,6,7}}", ("B", "C")),
        (CUBE, "{{0,1,2,3},{4,6,5,7}}", ("B", "C")),
        (CUBE, "{{0,3},{1,2},{4,7},{5,6}}", None),
        # Some of the groups along an axis only.
        (CUBE, "{{0,1},{2,3}}", ("C",)),
        (DeviceMesh(("X", "Y", "Z"), (1, 8, 1)), "{}", ("Y",)),
        # Devices count by their place in the mesh, whatever their ids are.
        (DeviceMesh(("X", "Y"), (2, 4), range(7, -1, -1)), "[2,4]<=[8]", ("Y",)),
    ],
)
def test_names_the_axes_that_groups_span(mesh, groups, axes):
    collective = all_reduce(f"replica_groups={groups}", mesh)
    assert collective.axes == axes
    if axes:
        assert sets(axis_groups(mesh, axes)) >= sets(collective.groups)


def parts(axis: str, size: int) -> list[str]:
    """The names of all parts of an axis, and of the whole."""
    pairs = itertools.product(range(1, size), range(2, size + 1))
    names = [f"{axis}:({b}){n}" for b, n in pairs if size % (b * n) == 0 and n < size]
    return ["", axis, *names]


@pytest.mark.parametrize("x", parts("X", 12))
@pytest.mark.parametrize("y", parts("Y", 4))
def test_names_any_part_of_an_axis(x, y):
    mesh = DeviceMesh(("X", "Y"), (12, 4))
    axes = tuple(filter(None, (x, y)))
    groups = ",".join(
        "{" + ",".join(map(str, group)) + "}" for group in axis_groups(mesh, axes)
    )
    assert all_reduce(f"replica_groups={{{groups}}}", mesh).axes == axes


@pytest.mark.parametrize(
    "mesh,pairs,axes",
    [
        (MESH, "{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}", ("Y",)),  # A shift.
        (MESH, "{0,4},{1,5},{2,6},{3,7}", ("X",)),
        (MESH, "{0,0},{1,4},{4,1}", ("X", "Y")),
        (CUBE, "{0,0},{2,4},{4,2}", ("A", "B")),  # A transposed mesh.
        (CUBE, "{3,3}", ()),
        (CUBE, "", ()),
    ],
)
def test_names_the_axes_along_which_permutes_move(mesh, pairs, axes):
    collective = only(
        "%p = f32[2]{0} collective-permute(%x), channel_id=3, "
        f"source_target_pairs={{{pairs}}}",
        mesh,
    )
    assert collective.kind == "collective-permute" and collective.axes == axes
    assert collective.op_name == ""
    assert len(collective.groups) == pairs.count("{")


@pytest.mark.parametrize(
    "type_,dtypes,shapes,size",
    [
        ("f32[8,16]{1,0}", ("f32",), ((8, 16),), 512),
        ("f32[]", ("f32",), ((),), 4),
        ("bf16[3,4]{1,0:T(8,128)(2,1)}", ("bf16",), ((3, 4),), 24),
        ("pred[5]{0}", ("pred",), ((5,),), 5),
        ("f8e4m3fn[6]{0}", ("f8e4m3fn",), ((6,),), 6),
        ("c64[2]{0}", ("c64",), ((2,),), 16),
        ("u32[0,4]{1,0}", ("u32",), ((0, 4),), 0),
        # Combined ones, the long ones with comments.
        (
            "(f32[8]{0}, bf16[2,2]{1,0}, /*index=5*/s8[3]{0})",
            ("f32", "bf16", "s8"),
            ((8,), (2, 2), (3,)),
            43,
        ),
    ],
)
@pytest.mark.parametrize("root", ["", "ROOT "])
def test_reads_result_types(root, type_, dtypes, shapes, size):
    op = only(f"{root}%all-reduce = {type_} all-reduce(%x), replica_groups={{}}")
    assert (op.dtypes, op.shapes, op.bytes) == (dtypes, shapes, size)


@pytest.mark.parametrize(
    "text,kind,shapes",
    [
        ("f32[8]{0} all-reduce-start(%x)", "all-reduce", ((8,),)),
        (
            "(f32[8]{0}, f32[4]{0}) all-reduce-start(%x, %y)",
            "all-reduce",
            ((8,), (4,)),
        ),
        (
            "(f32[2,3]{1,0}, f32[8,3]{1,0}) all-gather-start(%x)",
            "all-gather",
            ((8, 3),),
        ),
        (
            "((f32[2]{0}, f32[3]{0}), (f32[8]{0:T(8,128)}, f32[12]{0})) "
            "all-gather-start(%x, %y)",
            "all-gather",
            ((8,), (12,)),
        ),
        (
            "(f32[4,2]{1,0}, f32[4,2]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%x)",
            "collective-permute",
            ((4, 2),),
        ),
        (
            "((f32[8]{0}), f32[1]{0}, s32[]) reduce-scatter-start(%x)",
            "reduce-scatter",
            ((1,),),
        ),
    ],
)
def test_the_start_of_a_collective_counts_its_result_once(text, kind, shapes):
    groups = "replica_groups={}"
    if kind == "collective-permute":
        groups = "source_target_pairs={{0,1}}"
    op = only(f"%start.2 = {text}, channel_id=1, {groups}")
    assert op.kind == kind and op.shapes == shapes and op.name == "start.2"


def test_other_ops_are_no_collectives():
    text = """
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %get-tuple-element = f32[8]{0} get-tuple-element(%all-reduce.3), index=0
  %crs = f32[8]{0} custom-call(%x), custom_call_target="all-reduce(%y)"
  %fusion = f32[8]{0} fusion(%all-gather.1), kind=kLoop, calls=%all-reduce.clone
  %all-to-all.5 = (f32[1]{0}, f32[1]{0}) all-to-all(%a, %b), replica_groups=[4,2]<=[8]
  %all-gather.9 = f32[8]{0} all-gather(%b.1), replica_groups=[1,8]<=[8], dimensions={0}
"""
    read = collectives(text)
    assert [c.name for c in read] == ["all-to-all.5", "all-gather.9"]


def test_axis_groups():
    assert sets(axis_groups(MESH, ("X",))) == sets(ALONG_X)
    assert sets(axis_groups(MESH, ("Y",))) == sets(ALONG_Y)
    assert axis_groups(MESH, ("X", "Y")) == (tuple(range(8)),)
    assert axis_groups(MESH, ("Y", "X")) == ((0, 4, 1, 5, 2, 6, 3, 7),)
    assert axis_groups(MESH, ()) == tuple((i,) for i in range(8))
    assert axis_groups(MESH, ("Y:(2)2", "X")) == (
        (0, 4, 1, 5),
        (2, 6, 3, 7),
    )
    assert axis_groups(MESH, ("Y:(1)2",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
