"""Step times from the text of a GPU program."""

# ruff: noqa: E501 (HLO text)

import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.roofline import (
    moved_bytes,
    product_flops,
    roofline,
)
from meshwright.framework.devices.hardware import GPU_KINDS
from meshwright.framework.devices.topology import topology
from meshwright.framework.sharding.mesh import DeviceMesh

H100 = GPU_KINDS["h100"]
MESH = DeviceMesh(("X", "Y"), (2, 4))
SOL = 'backend_config={{"reification_cost":[{{"end_to_end_cycles":9,"exec_time_us":1,"compute_time_us":0,"memory_access_time_us":0,"name":""}},{{"end_to_end_cycles":0,"exec_time_us":{},"compute_time_us":0,"memory_access_time_us":0,"name":"sol"}}]}}'

PROGRAM = """
HloModule train, is_scheduled=true

%product (a: bf16[4096,8192], b: bf16[8192,1024]) -> bf16[4096,1024] {
  %a = bf16[4096,8192]{1,0} parameter(0)
  %b = bf16[8192,1024]{1,0} parameter(1)
  ROOT %dot = bf16[4096,1024]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wide_product (c: bf16[4096,8192], d: bf16[8192,1024]) -> f32[4096,1024] {
  %c = bf16[4096,8192]{1,0} parameter(0)
  %d = bf16[8192,1024]{1,0} parameter(1)
  ROOT %wide_dot = f32[4096,1024]{1,0} dot(%c, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (p: (s32[], bf16[4096,8192], bf16[8192,1024])) -> pred[] {
  %p = (s32[], bf16[4096,8192]{1,0}, bf16[8192,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(32)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%body (q: (s32[], bf16[4096,8192], bf16[8192,1024])) -> (s32[], bf16[4096,8192], bf16[8192,1024]) {
  %q = (s32[], bf16[4096,8192]{1,0}, bf16[8192,1024]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %x = bf16[4096,8192]{1,0} get-tuple-element(%q), index=1
  %w = bf16[8192,1024]{1,0} get-tuple-element(%q), index=2
  %gather-start = (bf16[8192,1024]{1,0}, bf16[8192,4096]{1,0}) all-gather-start(%w), replica_groups=[2,4]<=[8], dimensions={1}, SOL_300
  %y = bf16[4096,1024]{1,0} fusion(%x, %w), kind=kCustom, calls=%product, metadata={op_name="layer/matmul"}, SOL_100
  %gather-done = bf16[8192,4096]{1,0} all-gather-done(%gather-start)
  %z = f32[4096,1024]{1,0} fusion(%x, %w), kind=kCustom, calls=%wide_product, SOL_9000
  %sum = f32[4096,1024]{1,0} all-reduce(%z), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %out = (s32[], bf16[4096,8192]{1,0}, bf16[8192,1024]{1,0}) tuple(%j, %x, %w)
}

ENTRY %main (argument: bf16[4096,8192], weight: bf16[8192,1024]) -> bf16[4096,8192] {
  %argument = bf16[4096,8192]{1,0} parameter(0)
  %weight = bf16[8192,1024]{1,0} parameter(1)
  %start = s32[] constant(0)
  %copied = bf16[4096,8192]{1,0} copy(%argument)
  %state = (s32[], bf16[4096,8192]{1,0}, bf16[8192,1024]{1,0}) tuple(%start, %copied, %weight)
  %loop = (s32[], bf16[4096,8192]{1,0}, bf16[8192,1024]{1,0}) while(%state), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"32"}}
  ROOT %result = bf16[4096,8192]{1,0} get-tuple-element(%loop), index=1
}
"""
FLOPS = 2 * 4096 * 8192 * 1024
GATHERED = 8192 * 4096 * 2


def estimate(*, with_estimates):
    text = PROGRAM
    for micros in (300, 100, 9000):
        text = text.replace(f"SOL_{micros}", SOL.format(micros))
    return roofline(
        HloModule(text), MESH, topology("h100:8"), with_estimates=with_estimates
    )


def test_by_roofline_an_op_takes_its_flops_or_its_bytes():
    time = estimate(with_estimates=False)
    products, copies = (
        {op.name: op for op in time.ops if op.part.value == part}
        for part in ("matrix", "memory")
    )
    assert list(products) == ["y", "z"] and list(copies) == ["copied"]
    assert products["y"].seconds == pytest.approx(32 * FLOPS / H100.peak_flops)
    assert products["y"].count == 32 and products["y"].op_name == "layer/matmul"
    size = 4096 * 8192 * 2
    assert copies["copied"].seconds == pytest.approx(2 * size / H100.memory_bandwidth)
    assert time.seconds == pytest.approx(sum(time.parts().values()))


def test_collectives_take_their_bytes_and_ops_in_between_hide_them():
    time = estimate(with_estimates=False)
    gather, reduce = time.collectives
    assert (gather.kind, gather.collective.axes, gather.count) == (
        "all-gather",
        ("Y",),
        32,
    )
    assert gather.seconds == pytest.approx(32 * GATHERED * 3 / 4 / H100.link_bandwidth)
    assert gather.exposed == pytest.approx(gather.seconds - time.ops[1].seconds)
    # An all-reduce sends its tensor twice, and has nothing between start and end.
    size = 4096 * 1024 * 4
    assert reduce.seconds == pytest.approx(32 * 2 * size * 3 / 4 / H100.link_bandwidth)
    assert reduce.exposed == reduce.seconds and reduce.waiting == 0


def test_xlas_estimates_count_where_it_has_tables():
    time = estimate(with_estimates=True)
    copied, y, z = time.ops
    least = estimate(with_estimates=False).ops
    assert y.seconds == pytest.approx(32 * 100e-6)
    assert y.seconds > least[1].seconds
    # There is no table of float32 products of bfloat16, nor an estimate of the copy.
    assert (copied.seconds, z.seconds) == (least[0].seconds, least[2].seconds)
    gather, _ = time.collectives
    assert gather.seconds == pytest.approx(32 * 300e-6)
    assert gather.exposed == pytest.approx(gather.seconds - y.seconds)


CONVOLUTIONS = """
HloModule convolutions, is_scheduled=true

ENTRY %main (x: f16[8,57,57,128], w: f16[256,3,3,128], dy: f16[8,28,28,256]) -> f16[] {
  %x = DTYPE[8,57,57,128]{3,2,1,0} parameter(0)
  %w = DTYPE[256,3,3,128]{3,2,1,0} parameter(1)
  %dy = DTYPE[8,28,28,256]{3,2,1,0} parameter(2)
  %forward = (DTYPE[8,28,28,256]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %input = (DTYPE[8,57,57,128]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %w), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %filter = (DTYPE[256,3,3,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %dy), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %plain = DTYPE[8,28,28,256]{3,2,1,0} convolution(%x, %w), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f
  %gemm = (DTYPE[256,256]{1,0}, s8[4096]{0}) custom-call(%dy, %dy), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0","1","2"],"rhs_contracting_dimensions":["0","1","2"]}}}
  %other = (DTYPE[8,28,28,256]{3,2,1,0}, u8[0]{0}) custom-call(%x), custom_call_target="topk"
  ROOT %result = DTYPE[] constant(0)
}
"""


@pytest.mark.parametrize(
    ("dtype", "times"), [("bf16", 1), ("f32", 2), ("f8e4m3fn", 0.5)]
)
@pytest.mark.parametrize("name", ["forward", "input", "filter", "plain"])
def test_a_convolution_and_its_gradients_have_the_same_flops(name, dtype, times):
    module = HloModule(CONVOLUTIONS.replace("DTYPE", dtype))
    flops = 2 * (8 * 28 * 28 * 256) * (3 * 3 * 128)
    assert product_flops(module, module.by_name[name]) == times * flops


def test_calls_of_libraries_are_products_if_they_contract():
    module = HloModule(CONVOLUTIONS.replace("DTYPE", "bf16"))
    gemm, other = module.by_name["gemm"], module.by_name["other"]
    assert product_flops(module, gemm) == 2 * 256 * 256 * 8 * 28 * 28
    assert product_flops(module, other) == 0
    x, y = 8 * 57 * 57 * 128 * 2, 8 * 28 * 28 * 256 * 2
    assert moved_bytes(module, other) == x + y


FUSIONS = """
HloModule fusions, is_scheduled=true

%update (stack: f32[32,1024], new: f32[1,1024], at: s32[]) -> f32[32,1024] {
  %stack = f32[32,1024]{1,0} parameter(0)
  %new = f32[1,1024]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %updated = f32[32,1024]{1,0} dynamic-update-slice(%stack, %new, %at, %zero)
}

%take (from: f32[32,1024], which: s32[]) -> f32[1024] {
  %from = f32[32,1024]{1,0} parameter(0)
  %which = s32[] parameter(1)
  %nought = s32[] constant(0)
  %slice = f32[1,1024]{1,0} dynamic-slice(%from, %which, %nought), dynamic_slice_sizes={1,1024}
  ROOT %flat = f32[1024]{0} bitcast(%slice)
}

%both (whole: f32[32,1024], where: s32[]) -> (f32[1,1024], f32[32,1024]) {
  %whole = f32[32,1024]{1,0} parameter(0)
  %where = s32[] parameter(1)
  %first = s32[] constant(0)
  %part = f32[1,1024]{1,0} dynamic-slice(%whole, %where, %first), dynamic_slice_sizes={1,1024}
  %negated = f32[32,1024]{1,0} negate(%whole)
  ROOT %pair = (f32[1,1024]{1,0}, f32[32,1024]{1,0}) tuple(%part, %negated)
}

%later (aside: f32[32,1024], here: s32[]) -> f32[1024] {
  %aside = f32[32,1024]{1,0} parameter(0)
  %here = s32[] parameter(1)
  ROOT %inner = f32[1024]{0} fusion(%aside, %here), kind=kLoop, calls=%take
}

%late (across: f32[32,1024]) -> (bf16[1,1024], bf16[2,1024]) {
  %across = f32[32,1024]{1,0} parameter(0)
  %narrow = bf16[32,1024]{1,0} convert(%across)
  %squared = bf16[32,1024]{1,0} multiply(%narrow, %narrow)
  %top = bf16[1,1024]{1,0} slice(%squared), slice={[0:1], [0:1024]}
  %end = bf16[2,1024]{1,0} slice(%squared), slice={[30:32], [0:1024]}
  ROOT %ends = (bf16[1,1024]{1,0}, bf16[2,1024]{1,0}) tuple(%top, %end)
}

ENTRY %main (s: f32[32,1024], n: f32[1,1024], i: s32[]) -> f32[1024] {
  %s = f32[32,1024]{1,0} parameter(0)
  %n = f32[1,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %in_place = f32[32,1024]{1,0} fusion(%s, %n, %i), kind=kLoop, calls=%update
  %all = (f32[1,1024]{1,0}, f32[32,1024]{1,0}) fusion(%in_place, %i), kind=kLoop, calls=%both
  %alone = f32[32,1024]{1,0} dynamic-update-slice(%in_place, %n, %i, %i)
  %halo = (bf16[1,1024]{1,0}, bf16[2,1024]{1,0}) fusion(%alone), kind=kLoop, calls=%late
  %twice = f32[32,1024]{1,0} concatenate(%n, %n), dimensions={0}
  %start = ((f32[32,1024]{1,0}, s32[]), f32[1024]{0}) async-start(%alone, %i), calls=%later
  %done = f32[1024]{0} async-done(%start)
  ROOT %taken = f32[1024]{0} fusion(%alone, %i), kind=kLoop, calls=%take
}
"""


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("in_place", 2),
        ("alone", 2),
        ("taken", 2),
        ("start", 2),
        ("all", 32 + 1 + 32),
        ("halo", 3 + 3 / 2),
        ("twice", 32 + 1),
    ],
)
def test_of_a_tensor_read_or_written_in_part_the_part_counts(name, rows):
    module = HloModule(FUSIONS)
    row, index = 1024 * 4, 4
    has_index = name in ("in_place", "taken", "start", "all")
    moved = moved_bytes(module, module.by_name[name])
    assert moved == rows * row + has_index * index


@pytest.mark.parametrize(("result", "is_taken"), [("bf16", True), ("f32", False)])
def test_a_calls_estimate_counts_if_its_types_are_in_the_tables(result, is_taken):
    text = CONVOLUTIONS.replace("(DTYPE[256,256]", f"({result}[256,256]")
    cost = SOL.format(7000).removeprefix("backend_config={").removesuffix("}")
    text = text.replace('{"gemm_backend_config"', f'{{{cost},"gemm_backend_config"')
    time = roofline(
        HloModule(text.replace("DTYPE", "bf16")),
        MESH,
        topology("h100:8"),
        with_estimates=True,
    )
    (gemm,) = (op for op in time.ops if op.name == "gemm")
    assert (gemm.seconds == pytest.approx(7000e-6)) == is_taken
