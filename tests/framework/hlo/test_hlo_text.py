"""Reading HLO text: what each instruction says, and who calls whom."""

import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule, elements, itemsize

TEXT = """
HloModule jit_f

%body (p: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %p = (s32[], f32[4,2]{1,0}) parameter(0), sharding={{replicated}, \
/*index=1*/{devices=[2,1]<=[2]}}
  %get = f32[4,2]{1,0} get-tuple-element(%p), index=1, sharding={devices=[1,2,1]0,1 \
last_tile_dims={manual}}
  %sum = f32[4,2]{1,0} all-reduce(%get), channel_id=1, replica_groups={{0,2},{1,3}}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="f/sum"}
  %fused = f32[4,2]{1,0:T(8,128)} fusion(%sum), kind=kLoop, calls=%inside, \
backend_config={"window_config":{"estimated_cycles":"281310"},"to_apply=%none":"{"}
  ROOT %t = (s32[], f32[4,2]{1,0}) tuple(%n, %fused)
}

ENTRY %main (a: f32[4,2]) -> bf16[4] {
  %a = f32[4,2]{1,0:T(8,128)} parameter(0), metadata={op_name="args[0]"}
  %w = (s32[], f32[4,2]{1,0}) while(%a), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %c = (f32[4], f32[]) conditional(%w, %a), branch_computations={%one, %two}
  %five = s32[]{:T(256)} constant(5)
  %half = f32[2]{0} constant({0.5, 1})
  %s = f32[4] select-and-scatter(%a, %a), select=%ge, scatter=%plus
  %z = f32[] custom-call(%a), custom_call_target="x", called_computations={%k}
  ROOT %r = bf16[4]{0} custom-call(%c), custom_call_target="x(y)", \
metadata={op_name="f/(a:b)"}
}
"""
MODULE = HloModule(TEXT)


def test_reads_arrays_and_tuples():
    assert MODULE.entry == "main" and MODULE.root().name == "r"
    a, w = (MODULE.by_name[name] for name in ("a", "w"))
    assert (a.number, a.shape, a.dtype, a.op_name) == (0, (4, 2), "f32", "args[0]")
    assert a.bytes == 32 and w.bytes == 0 and MODULE.root().bytes == 8
    assert (a.type, w.type) == ("f32[4,2]{1,0:T(8,128)}", "(s32[], f32[4,2]{1,0})")
    assert (w.dtype, w.shape) == ("", ())
    assert MODULE.root().op_name == "f/(a:b)"
    assert MODULE.by_name["five"].number == 5
    assert MODULE.by_name["half"].number is None and w.number is None
    assert [user.name for user in MODULE.users["a"]] == ["w", "c", "s", "s", "z"]


def test_reads_shardings_and_elements():
    get = MODULE.by_name["get"]
    assert get.sharding == "{devices=[1,2,1]0,1 last_tile_dims={manual}}"
    assert (get.operands, get.computation, get.number) == (("p",), "body", 1)
    shardings = MODULE.by_name["p"].sharding
    assert elements(shardings) == ["{replicated}", "{devices=[2,1]<=[2]}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "(f32[2,3]{1,0:T(8,128)}, /*index=5*/s32[])",
            ["f32[2,3]{1,0:T(8,128)}", "s32[]"],
        ),
        ("((f32[2], s8[1]), (pred[]))", ["(f32[2], s8[1])", "(pred[])"]),
        (
            "{{devices=[2,1]0,1 last_tile_dims={manual}}}",
            ["{devices=[2,1]0,1 last_tile_dims={manual}}"],
        ),
        ("()", []),
        ("f32[2,3]{1,0}", []),
        ("{devices=[2,1]0,1}", []),
        ("", []),
    ],
)
def test_elements_of_tuples(text, expected):
    assert elements(text) == expected


def test_says_what_is_called_and_how_often():
    called = {op.name: op.called for op in MODULE.instructions if op.called}
    assert called == {
        "sum": ("add",),
        "fused": ("inside",),
        "w": ("cond", "body"),
        "c": ("one", "two"),
        "s": ("ge", "plus"),
        "z": ("k",),
    }
    w = MODULE.by_name["w"]
    assert {op.trips for op in MODULE.instructions if op is not w} == {None}
    assert w.trips == 7
    assert MODULE.loops_around("inside") == MODULE.loops_around("body") == [w]
    assert MODULE.loops_around("main") == []


def test_keeps_what_the_backend_says():
    fused, get = MODULE.by_name["fused"], MODULE.by_name["get"]
    assert fused.backend_config.startswith('{"window_config":{"estimated_cycles":"28')
    assert fused.backend_config.endswith("}") and get.backend_config == ""


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups={{0,2},{1,3}}",
        "replica_groups={}",
        "replica_groups=[2,2]<=[2,2]T(1,0)",
        "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a','b'}",
        "replica_groups=@m['a'=4], device_ids=(0,2,1,3) {'a':(1)2}",
        "source_target_pairs={{0,1},{1,0}}",
        "source_target_pairs={}",
    ],
)
@pytest.mark.parametrize("rest", ["", ', to_apply=%add, metadata={op_name="f/{a}"}'])
def test_sets_the_groups_of_a_collective_aside(groups, rest):
    line = f"  %x.1 = f32[8]{{0}} all-reduce(%y), channel_id=1, {groups}{rest}"
    lines = [line, line.replace("x.1", "x.2")]
    text = "\n".join(["ENTRY %main (y: f32[8]) -> f32[8] {", *lines, "}"])
    first, same = HloModule(text).instructions
    assert first.groups == groups.partition("=")[2]
    assert first.op_name == ("f/{a}" if rest else "")
    assert first.called == (("add",) if rest else ())
    # The thousands of a program are kept once.
    assert first.groups is same.groups


def test_text_that_breaks_off_is_refused():
    text = "ENTRY %main (y: f32[8]) -> f32[8] {\n  %x = f32[8]{0} exp(%y\n}"
    with pytest.raises(ValueError, match=r"without its closing bracket:   %x = f32"):
        HloModule(text)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("pred", 1),
        ("f8e4m3fn", 1),
        ("f4e2m1fn", 1),
        ("s4", 1),
        ("bf16", 2),
        ("u32", 4),
        ("c64", 8),
    ],
)
def test_item_sizes(dtype, size):
    assert itemsize(dtype) == size
    assert itemsize("token") == itemsize("opaque") == itemsize("") == 0
