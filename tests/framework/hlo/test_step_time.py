"""Step times from the text of a TPU program."""

# ruff: noqa: E501 (HLO text)

import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.network import LINK_EFFICIENCY
from meshwright.framework.devices.topology import topology
from meshwright.framework.sharding.mesh import DeviceMesh

MESH = DeviceMesh(("X", "Y"), (8, 16))
TORUS = topology("v3:8x8")
CYCLES = 'backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'
# What a link moves in a second, both ways together.
LINK = 2 * TORUS.kind.link_bandwidth * LINK_EFFICIENCY

PROGRAM = """
HloModule train, is_scheduled=true

%product (a: bf16[64,64], b: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[64,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%all-reduce-scatter.1 (c: bf16[1024,64]) -> bf16[64,64] {
  %c = bf16[1024,64]{1,0} parameter(0)
  %all-reduce.2 = bf16[1024,64]{1,0} all-reduce(%c), replica_groups=[8,16]<=[128], to_apply=%sum
  %zero = s32[] constant(0)
  ROOT %slice.1 = bf16[64,64]{1,0} dynamic-slice(%all-reduce.2, %zero, %zero), dynamic_slice_sizes={64,64}
}

%condition (p: (s32[], bf16[64,64])) -> pred[] {
  %p = (s32[], bf16[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(32)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%body (q: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %q = (s32[], bf16[64,64]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %x = bf16[64,64]{1,0} get-tuple-element(%q), index=1
  %gathered = bf16[1024,64]{1,0} all-gather(%x), replica_groups=[8,16]<=[128], dimensions={0}
  %y = bf16[64,64]{1,0} fusion(%x, %x), kind=kOutput, calls=%product, metadata={op_name="layer/matmul"}, CYCLES_940
  %scattered = bf16[64,64]{1,0} fusion(%gathered), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="layer/sum"}
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  ROOT %out = (s32[], bf16[64,64]) tuple(%next, %scattered)
}

ENTRY %main (argument: bf16[64,64], big: f32[4096,4096]) -> bf16[64,64] {
  %argument = bf16[64,64]{1,0} parameter(0)
  %big = f32[4096,4096]{1,0} parameter(1)
  %start = s32[] constant(0)
  %copied = f32[4096,4096]{1,0} copy(%big), CYCLES_300000
  %scaled = bf16[64,64]{1,0} multiply(%argument, %argument), CYCLES_94
  %state = (s32[], bf16[64,64]) tuple(%start, %scaled)
  %loop = (s32[], bf16[64,64]) while(%state), condition=%condition, body=%body
  ROOT %result = bf16[64,64]{1,0} get-tuple-element(%loop), index=1
}
"""


# As many columns as keep links busy for longer than a message is on its way.
WIDE = 16384


def wide(text):
    return text.replace(",64]", f",{WIDE}]")


def estimate(text, mesh=MESH, torus=TORUS):
    for cycles in (300000, 940, 94):
        text = text.replace(f"CYCLES_{cycles}", CYCLES.format(cycles))
    return step_time(HloModule(text), mesh, order_of(mesh, torus))


def test_ops_take_their_cycles_times_trips():
    parts = estimate(PROGRAM).parts()
    assert parts["matrix"] == pytest.approx(32 * 1e-6)
    assert parts["vector"] == pytest.approx(0.1e-6)
    assert parts["memory"] == pytest.approx(300000 / 0.94e9)


KERNEL = (
    "  %kernel = (bf16[64,64]{1,0}, s32[]) custom-call(%scaled), custom_call_target="
    '"tpu_custom_call", frontend_attributes={meshwright_cycles="1880"}, '
    'backend_config={"custom_call_config":{"body":""}}\n'
    "  %of_kernel = bf16[64,64]{1,0} get-tuple-element(%kernel), index=0, "
    'frontend_attributes={meshwright_cycles="1880"}\n'
)
WITH_KERNEL = PROGRAM.replace("  %state =", f"{KERNEL}  %state =")


def test_a_kernel_takes_the_cycles_that_its_call_was_given():
    more = estimate(WITH_KERNEL).parts()
    assert more["matrix"] == pytest.approx(32 * 1e-6 + 2e-6)
    assert more["vector"] == pytest.approx(0.1e-6)


def test_a_kernel_without_cycles_is_not_taken_for_free():
    text = WITH_KERNEL.replace('frontend_attributes={meshwright_cycles="1880"}, ', "")
    message = "kernel kernel .* no cycles for a TPU v3, .* kernel of .* to Kernel.NONE"
    with pytest.raises(ValueError, match=message):
        estimate(text)


ROWS = """
%picked (table: f32[6000,16], ids: s32[512]) -> f32[512,16] {
  %table = f32[6000,16]{1,0:T(8,128)} parameter(0)
  %ids = s32[512]{0:T(512)} parameter(1)
  ROOT %gather.1 = f32[512,16]{1,0:T(8,128)} gather(%table, %ids), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,16}
}

%other (table.1: f32[6000,16]) -> f32[6000,16] {
  ROOT %table.1 = f32[6000,16]{1,0:T(8,128)} parameter(0)
}

ENTRY %main (table.2: f32[6000,16], ids.2: s32[512]) -> f32[512,16] {
  %table.2 = f32[6000,16]{1,0:T(8,128)} parameter(0)
  %ids.2 = s32[512]{0:T(512)} parameter(1)
  %same = f32[6000,16]{1,0:T(8,128)} fusion(%table.2), kind=kLoop, calls=%other, HELD
  ROOT %rows = f32[512,16]{1,0:T(8,128)} fusion(%same, %ids.2), kind=kCustom, calls=%picked, HELD
}
"""
HELD = 6000 * 128 * 4 + 512 * 128 * 4  # The table and the rows, padded to 128 columns.


def test_rows_that_are_picked_take_what_is_brought_to_vmem():
    held = f'{{"memory_space":"1","offset":"0","size":"{HELD}"}}'
    config = f'backend_config={{"used_scoped_memory_configs":[{held}]}}'
    time = estimate("HloModule train\n" + ROWS.replace("HELD", config))
    assert [op.name for op in time.ops] == ["rows"]
    assert time.parts()["memory"] == pytest.approx(HELD / 450e9)


def test_collectives_take_what_rings_pass_on():
    time = estimate(wide(PROGRAM))
    gather, scatter = time.collectives
    size = 1024 * WIDE * 2
    # A row of 8 chips, there and back: twice what a closed ring would take.
    seconds = 32 * size * 15 / 16 * 2 / LINK
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 32, size)
    assert gather.seconds == pytest.approx(seconds)
    assert (scatter.kind, scatter.bytes) == ("reduce-scatter", size)
    assert scatter.seconds == pytest.approx(seconds)
    assert scatter.collective.op_name == "layer/sum"
    assert scatter.collective.axes == ("Y",)
    assert gather.waiting == scatter.waiting == 0
    assert time.seconds == pytest.approx(sum(time.parts().values()))


def test_an_axis_over_columns_shares_its_links():
    groups = "replica_groups=[8,16]<=[128]"
    along_y = wide(PROGRAM)
    along_x = along_y.replace(groups, "replica_groups=[16,8]<=[8,16]T(1,0)")
    y, x = estimate(along_y).collectives[0], estimate(along_x).collectives[0]
    assert x.collective.axes == ("X",)
    # Twice as much on a link, of 7/8 instead of 15/16.
    assert x.seconds / y.seconds == pytest.approx(2 * (7 / 8) / (15 / 16))


BOTH = PROGRAM.replace("replica_groups=[8,16]<=[128]", "replica_groups=[1,128]<=[128]")


def test_over_both_axes_the_second_ring_has_a_share():
    gather = estimate(wide(BOTH)).collectives[0]
    size = 1024 * WIDE * 2
    rings = 15 / 16 * 2 + 7 / 8 / 16 * 4
    assert gather.seconds == pytest.approx(32 * size * rings / LINK)


def test_a_small_collective_takes_as_long_as_its_way():
    """It is bound by latency: of half the way round, or of all where links are shared.

    A row of 8 chips there and back has 14 links; a column in zigzag has 14, of which
    its rings over both cores share each.
    """
    hop = TORUS.kind.latency
    in_row = estimate(PROGRAM)
    for timed in in_row.collectives:
        assert timed.seconds == timed.waiting == pytest.approx(32 * 7 * hop)
    for timed in estimate(BOTH).collectives:
        assert timed.seconds == timed.waiting == pytest.approx(32 * (7 + 13) * hop)
    # Nothing else is part of the step's time on account of it.
    assert in_row.seconds == pytest.approx(
        sum(op.seconds for op in in_row.ops) + 2 * 32 * 7 * hop
    )


def test_an_all_reduce_goes_round_twice():
    reduced = ASYNC.replace(
        "collective-permute-start(%argument), source_target_pairs={{0,16},{16,32}}",
        "all-reduce-start(%argument), replica_groups=[8,16]<=[128]",
    )
    (sent,) = estimate(reduced).collectives
    assert sent.seconds == sent.waiting == pytest.approx(2 * 7 * TORUS.kind.latency)
    assert sent.exposed == pytest.approx(sent.seconds - 1e-6)


def test_a_message_waits_for_each_link():
    """From a column's first chip to its third: two links."""
    (sent,) = estimate(ASYNC.replace("1024,64", "8,64")).collectives
    assert sent.seconds == sent.waiting == pytest.approx(2 * TORUS.kind.latency)


ASYNC = """
HloModule train, is_scheduled=true

ENTRY %main (argument: bf16[1024,64]) -> bf16[1024,64] {
  %argument = bf16[1024,64]{1,0} parameter(0)
  %sent = (bf16[1024,64]{1,0}, bf16[1024,64]{1,0}, u32[], u32[]) collective-permute-start(%argument), source_target_pairs={{0,16},{16,32}}
  %meanwhile = bf16[1024,64]{1,0} multiply(%argument, %argument), CYCLES_940
  %arrived = bf16[1024,64]{1,0} collective-permute-done(%sent)
  ROOT %sum = bf16[1024,64]{1,0} add(%arrived, %meanwhile), CYCLES_94
}
"""


def test_what_runs_between_start_and_end_hides_a_collective():
    time = estimate(wide(ASYNC))
    (sent,) = time.collectives
    # The first cores of a column, in zigzag: two links up, through one at a time.
    seconds = 1024 * WIDE * 2 / (LINK / 2)
    assert sent.seconds == pytest.approx(seconds)
    assert sent.exposed == pytest.approx(seconds - 1e-6)
    assert time.seconds == pytest.approx(seconds + 0.1e-6)


def test_a_loop_between_start_and_end_hides_a_collective():
    sent = next(line for line in ASYNC.splitlines() if "-start" in line)
    text = PROGRAM.replace("  %state =", f"{sent}\n  %state =").replace(
        "  ROOT %result",
        "  %arrived = bf16[64,64]{1,0} collective-permute-done(%sent)\n  ROOT %result",
    )
    sent = next(c for c in estimate(wide(text)).collectives if c.name == "sent")
    assert sent.exposed == pytest.approx(sent.seconds - 32 * 1e-6)


# As libtpu writes an all-gather that a product carries on.
CARRIED = """
HloModule train, is_scheduled=true

%begin (a: bf16[64,64]) -> (bf16[64,64], bf16[1024,64]) {
  %a = bf16[64,64]{1,0} parameter(0)
  %gather.1 = bf16[1024,64]{1,0} all-gather(%a), replica_groups=[8,16]<=[128], dimensions={0}
  ROOT %begun = (bf16[64,64]{1,0}, bf16[1024,64]{1,0}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (b: bf16[64,64], c: bf16[1024,64], d: bf16[64,64]) -> (bf16[64,64], bf16[64,64], bf16[1024,64]) {
  %b = bf16[64,64]{1,0} parameter(0)
  %c = bf16[1024,64]{1,0} parameter(1)
  %d = bf16[64,64]{1,0} parameter(2)
  %gather.2 = bf16[1024,64]{1,0} all-gather(%b), replica_groups=[8,16]<=[128], dimensions={0}
  %dot.1 = bf16[64,64]{1,0} convolution(%d, %d), dim_labels=bf_io->bf
  ROOT %carried = (bf16[64,64]{1,0}, bf16[64,64]{1,0}, bf16[1024,64]{1,0}) tuple(%dot.1, %b, %gather.2)
}

%end (e: bf16[64,64]) -> bf16[1024,64] {
  %e = bf16[64,64]{1,0} parameter(0)
  %gather.3 = bf16[1024,64]{1,0} all-gather(%e), replica_groups=[8,16]<=[128], dimensions={0}
  ROOT %ended = bf16[1024,64]{1,0} custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[64,64]) -> bf16[1024,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %start = (bf16[64,64]{1,0}, bf16[1024,64]{1,0}) fusion(%x), kind=kCustom, calls=%begin
  %part.1 = bf16[64,64]{1,0} get-tuple-element(%start), index=0
  %part.2 = bf16[1024,64]{1,0} get-tuple-element(%start), index=1
  %product = (bf16[64,64]{1,0}, bf16[64,64]{1,0}, bf16[1024,64]{1,0}) fusion(%part.1, %part.2, %x), kind=kOutput, calls=%async_collective_fusion.1, CYCLES_940
  %part.3 = bf16[64,64]{1,0} get-tuple-element(%product), index=1
  ROOT %done = bf16[1024,64]{1,0} fusion(%part.3), kind=kCustom, calls=%end
}
"""


def test_a_product_hides_the_collective_that_it_carries_on():
    time = estimate(wide(CARRIED))
    (gather,) = time.collectives
    assert (gather.name, gather.kind, gather.count) == ("start", "all-gather", 1)
    (alone,) = estimate(wide(PROGRAM)).collectives[:1]
    assert gather.seconds == pytest.approx(alone.seconds / alone.count)
    assert gather.exposed == pytest.approx(gather.seconds - 1e-6)
    assert time.parts()["matrix"] == pytest.approx(1e-6)


def test_a_collective_whose_end_is_not_known_is_not_hidden():
    text = CARRIED.replace("tuple(%dot.1, %b,", "tuple(%dot.1, %dot.1,")
    (gather,) = estimate(wide(text)).collectives
    assert gather.exposed == gather.seconds > 1e-6


@pytest.mark.parametrize(("name", "colors"), [("v5e:16x16", 2), ("v5p:4x4x4", 3)])
def test_an_axis_over_all_dims_uses_the_links_of_each(name, colors):
    """As libtpu says of its all-reduces: a part of the data along each dim first."""
    torus = topology(name)
    mesh = DeviceMesh(("data",), (torus.size,))
    text = ASYNC[: ASYNC.index("  %sent")] + (
        "  ROOT %reduced = bf16[1024,64]{1,0} all-reduce(%argument), "
        "replica_groups={}, to_apply=%sum\n}\n"
    )
    (reduced,) = estimate(wide(text), mesh, torus).collectives
    ring = 1024 * WIDE * 2 / (torus.kind.link_bandwidth * LINK_EFFICIENCY)
    share = (torus.size - 1) / torus.size
    assert reduced.seconds == pytest.approx(ring * share / colors)


def test_a_loop_without_a_bound_is_an_error():
    text = PROGRAM.replace("constant(32)", "constant({...})")
    with pytest.raises(ValueError, match="loop loop .* no bound that can be read"):
        estimate(text)


@pytest.mark.parametrize(
    ("bound", "op_name", "count"),
    [
        ("{...}", "jit(f)/expected_5_trips", 5),
        ("{...}", "jit(f)/expected_3_trips/expected_5_trips_1", 5),
        ("32", "jit(f)/expected_3_trips/while", 32),
    ],
)
def test_a_loop_has_the_trips_that_its_own_name_expects(bound, op_name, count):
    text = PROGRAM.replace("constant(32)", f"constant({bound})")
    text = text.replace("body=%body", f'body=%body, metadata={{op_name="{op_name}"}}')
    assert estimate(text).collectives[0].count == count


def test_trips_that_the_compiler_says_count():
    text = PROGRAM.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert estimate(text).collectives[0].count == 7


SCAN = """\
  %k = s32[] get-tuple-element(%p), index=0
  %also = s32[] constant(40)
  %fewer = pred[] compare(%k, %also), direction=LT
  %below = pred[] compare(%i, %bound), direction=LT
  ROOT %both = pred[] and(%below, %fewer)"""


@pytest.mark.parametrize(("start", "trips"), [(0, 16), (1, 16), (2, 15)])
def test_a_counter_that_skips_numbers_ends_sooner(start, trips):
    """As of loops that the compiler unrolls, such as those of windowed einsums."""
    text = PROGRAM.replace("%one = s32[] constant(1)", "%one = s32[] constant(2)")
    text = text.replace(
        "%start = s32[] constant(0)", f"%start = s32[] constant({start})"
    )
    assert {c.count for c in estimate(text).collectives} == {trips}


def test_what_is_added_may_be_the_loops_own():
    text = PROGRAM.replace("(s32[], bf16[64,64])", "(s32[], bf16[64,64], s32[])")
    text = text.replace("%scattered)\n", "%scattered, %one)\n")
    text = text.replace("tuple(%start, %scaled)", "tuple(%start, %scaled, %four)")
    text = text.replace(
        "  %one = s32[] constant(1)", "  %one = s32[] get-tuple-element(%q), index=2"
    )
    text = text.replace("  %start =", "  %four = s32[] constant(4)\n  %start =")
    assert {c.count for c in estimate(text).collectives} == {8}


def test_a_loop_with_two_counters_ends_with_the_first():
    less = "  ROOT %less = pred[] compare(%i, %bound), direction=LT"
    assert less in PROGRAM
    time, want = estimate(PROGRAM.replace(less, SCAN)), estimate(PROGRAM)
    assert time.seconds == want.seconds
