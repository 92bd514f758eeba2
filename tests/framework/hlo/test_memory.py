"""What is alive when, read from scheduled HLO."""

import pytest
import tensorflow as tf

from meshwright.framework.compiler.hlo.memory import (
    Kind,
    breakdown,
    memory_timeline,
    padded_bytes,
)
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.devices.topology import topology_devices
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sizes import bytes_text, number_text
from tests import needs

KIB, GIB = 2**10, 2**30


@pytest.mark.parametrize(
    "type_,size",
    [
        ("f32[]", 4),
        ("f32[]{:T(256)}", 1 * KIB),
        ("pred[100]{0}", 100),
        ("bf16[1000,100]{1,0}", 1000 * 100 * 2),
        # Tiles of 8 x 128 of the two dims that run fastest.
        ("bf16[1000,100]{1,0:T(8,128)(2,1)}", 1000 * 128 * 2),
        ("bf16[1000,100]{0,1:T(8,128)(2,1)}", 1024 * 104 * 2),
        ("f32[3,5,2,7]{3,1,2,0:T(8,128)}", 3 * 2 * 8 * 128 * 4),
        ("bf16[64,12,1024,4,128]{4,3,2,1,0:T(4,128)(2,1)}", 64 * 12 * 1024 * 512 * 2),
        ("f32[2000]{0:T(1024)}", 2048 * 4),
        ("f32[300]{0:T(8,128)}", 8 * 384 * 4),
        ("s32[16]{0:T(256)S(6)}", 0),
        ("f32[64,64]{1,0:T(8,128)S(1)}", 0),
        ("f32[64]{0:S(0)}", 256),
        ("token[]", 0),
    ],
)
def test_arrays_take_whole_tiles_of_main_memory(type_, size):
    assert padded_bytes(type_) == size


STRAIGHT = """
HloModule one, is_scheduled=true, entry_computation_layout={(f32[256]{0})->f32[256]{0}}

ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %a = f32[512]{0} broadcast(%x), metadata={op_name="wide"}
  %b = f32[512]{0} reverse(%a)
  %view = f32[2,256]{1,0} bitcast(%b)
  %fast = f32[4096]{0:S(1)} broadcast(%x)
  %c = f32[256]{0} reduce(%view, %fast)
  ROOT %d = f32[256]{0} dot(%c, %x)
}
"""


def alive(text):
    return [(point.name, point.bytes / KIB) for point in memory_timeline(text).points]


def at_peak(timeline):
    return {b.name: (b.bytes / KIB, b.kind) for b in timeline.at_peak}


def test_a_value_is_alive_from_where_it_is_made_to_where_it_is_last_read():
    text = STRAIGHT.lstrip()
    assert alive(text) == [("a", 3), ("b", 5), ("fast", 3), ("c", 4), ("d", 3)]
    timeline = memory_timeline(text)
    assert timeline.peak == 5 * KIB
    assert at_peak(timeline) == {
        "a": (2, Kind.TEMPORARY),
        "b": (2, Kind.TEMPORARY),
        "x": (1, Kind.ARGUMENT),
    }
    assert timeline.at_peak[0].op_name == timeline.at_peak[1].op_name == "wide"


def test_an_operand_that_is_taken_over_in_place_counts_once():
    shared = ', backend_config={"aliasing_operands":{"lists":[{"indices":["0","1"]}]}}'
    text = STRAIGHT.lstrip().replace("reverse(%a)", "reverse(%a)" + shared)
    assert alive(text)[:2] == [("a", 3), ("b", 3)]


@pytest.mark.parametrize("fused", [False, True])
def test_scattered_updates_are_written_in_place(fused):
    scatter = "scatter(%a, %x, %x), to_apply=%sum"
    text = f"""HloModule one, is_scheduled=true, entry_computation_layout={{}}

%into (p: f32[1024], q: f32[256]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  %q = f32[256]{{0}} parameter(1)
  ROOT %added = f32[1024]{{0}} scatter(%p, %q, %q), to_apply=%sum
}}

ENTRY %main (x: f32[256]) -> f32[1024] {{
  %x = f32[256]{{0}} parameter(0)
  %a = f32[1024]{{0}} broadcast(%x)
  ROOT %b = f32[1024]{{0}} {"fusion(%a, %x), calls=%into" if fused else scatter}
}}
"""
    assert alive(text) == [("a", 5), ("b", 5)]


def test_elementwise_ops_write_over_what_nobody_reads_again():
    text = """HloModule one, is_scheduled=true, entry_computation_layout={}

%wrapped (q: f32[256]) -> f32[256] {
  %q = f32[256]{0} parameter(0)
  ROOT %t = f32[256]{0} tanh(%q)
}

%turned (r: f32[256]) -> f32[256] {
  %r = f32[256]{0} parameter(0)
  %back = f32[256]{0} reverse(%r)
  ROOT %u = f32[256]{0} tanh(%back)
}

ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %a = f32[256]{0} negate(%x)
  %b = f32[256]{0} fusion(%a), kind=kLoop, calls=%wrapped
  %c = f32[256]{0} negate(%b)
  %d = f32[256]{0} fusion(%b), kind=kLoop, calls=%turned
  ROOT %e = f32[256]{0} subtract(%c, %d)
}
"""
    # %b over %a; not %a over the argument, %c over what %d reads, %d backwards over %b.
    assert alive(text) == [("a", 2), ("b", 2), ("c", 3), ("d", 4), ("e", 3)]


def test_a_donated_argument_is_free_between_its_last_use_and_the_result():
    text = """HloModule one, is_scheduled=true, \
input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %a = f32[256]{0} slice(%x)
  %b = f32[256]{0} reverse(%a)
  ROOT %c = f32[1024]{0} broadcast(%b)
}
"""
    assert alive(text) == [("a", 5), ("b", 2), ("c", 5)]
    # On GPUs it is not free.
    held = memory_timeline(text, reuses_arguments=False)
    assert [point.bytes / KIB for point in held.points] == [5, 6, 5]
    kept = text.replace("input_output_alias={ {}: (0, {}, may-alias) }, ", "")
    assert alive(kept) == [("a", 5), ("b", 6), ("c", 9)]


# A layer's input is saved by one loop and read by the next, which adds up gradients.
LOOPS = """
HloModule two, is_scheduled=true, entry_computation_layout={}

%fused (p0: f32[4,1,256], p1: f32[256], p2: s32[]) -> f32[4,1,256] {
  %p0 = f32[4,1,256]{2,1,0} parameter(0)
  %p1 = f32[256]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %slice = f32[1,1,256]{2,1,0} bitcast(%p1)
  ROOT %update = f32[4,1,256]{2,1,0} dynamic-update-slice(%p0, %slice, %p2)
}

%more (c: (s32[], f32[256], f32[4,1,256], f32[4,256])) -> pred[] {
  %c = (s32[], f32[256]{0}, f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%i, %i)
}

%forward (f: (s32[], f32[256], f32[4,1,256], f32[4,256])) -> (s32[], f32[256]) {
  %f = (s32[], f32[256]{0}, f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) parameter(0)
  %f0 = s32[] get-tuple-element(%f), index=0
  %f1 = f32[256]{0} get-tuple-element(%f), index=1
  %f2 = f32[4,1,256]{2,1,0} get-tuple-element(%f), index=2
  %f3 = f32[4,256]{1,0} get-tuple-element(%f), index=3
  %hidden = f32[1024]{0} dot(%f1, %f3), metadata={op_name="layer/hidden"}
  %saved = f32[256]{0} reduce(%hidden), metadata={op_name="layer/norm"}
  %write = f32[4,1,256]{2,1,0} fusion(%f2, %saved, %f0), kind=kLoop, calls=%fused
  %y = f32[256]{0} reverse(%saved)
  %f9 = s32[] add(%f0, %f0)
  ROOT %ft = (s32[], f32[256]{0}, f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) \
tuple(%f9, %y, %write, %f3)
}

%backward (b: (s32[], f32[4,1,256], f32[4,256])) -> (s32[], f32[4,1,256]) {
  %b = (s32[], f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) parameter(0)
  %b0 = s32[] get-tuple-element(%b), index=0
  %b1 = f32[4,1,256]{2,1,0} get-tuple-element(%b), index=1
  %b2 = f32[4,256]{1,0} get-tuple-element(%b), index=2
  %dw = f32[1,256]{1,0} dynamic-slice(%b1, %b0), metadata={op_name="layer/w_grad"}
  %sum = f32[4,256]{1,0} dynamic-update-slice(%b2, %dw, %b0, %b0)
  %b9 = s32[] add(%b0, %b0)
  ROOT %bt = (s32[], f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) tuple(%b9, %b1, %sum)
}

%most (m: (s32[], f32[4,1,256], f32[4,256])) -> pred[] {
  %m = (s32[], f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%m), index=0
  ROOT %lower = pred[] compare(%j, %j)
}

ENTRY %main (x: f32[256], w: f32[4,256]) -> f32[4,256] {
  %x = f32[256]{0} parameter(0)
  %w = f32[4,256]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %in = f32[256]{0} copy(%x)
  %cast = f32[4,256]{1,0} copy(%w)
  %stack = f32[4,1,256]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %t1 = (s32[], f32[256]{0}, f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) \
tuple(%start, %in, %stack, %cast)
  %loop1 = (s32[], f32[256]{0}, f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) \
while(%t1), condition=%more, body=%forward
  %all = f32[4,1,256]{2,1,0} get-tuple-element(%loop1), index=2
  %again = s32[] copy(%zero)
  %zeros = f32[4,256]{1,0} broadcast(%zero)
  %t2 = (s32[], f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) tuple(%again, %all, %zeros)
  %loop2 = (s32[], f32[4,1,256]{2,1,0}, f32[4,256]{1,0}) while(%t2), \
condition=%most, body=%backward
  %dws = f32[4,256]{1,0} get-tuple-element(%loop2), index=2
  ROOT %new = f32[4,256]{1,0} dot(%cast, %dws)
}
"""


@pytest.fixture(scope="module")
def loops():
    return memory_timeline(LOOPS.lstrip())


def test_what_is_temporary_in_a_loop_counts_where_the_loop_runs(loops):
    points = {point.name: round(point.bytes / KIB) for point in loops.points}
    # Arguments 5, what is carried 9; the body's 4 and 1 on top, one at a time.
    assert points["stack"] == 5 + 4 + 1 + 4
    assert points["hidden"] == 5 + 9 + 4
    # The carried input is overwritten: nothing is in its buffer before %y.
    assert points["saved"] == 5 + 8 + 4 + 1 == points["hidden"]
    assert points["write"] == 5 + 8 + 1
    assert points["y"] == 5 + 8 + 1 + 1
    assert points["zeros"] == points["sum"] - 1 == 5 + 12
    names = [point.name for point in loops.points]
    assert names.index("loop1") < names.index("less") < names.index("hidden")
    assert names[names.index("f9") + 1] == "loop1"


def test_the_peak_is_explained_by_what_is_alive_then(loops):
    buffers = {buffer.name: buffer for buffer in loops.at_peak if buffer.bytes >= KIB}
    assert loops.peak == max(point.bytes for point in loops.points)
    assert set(buffers) >= {"x", "w", "cast", "stack"}
    stack = buffers["stack"]
    assert stack.kind is Kind.SAVED and stack.op_name == "layer/norm"
    assert buffers["cast"].kind is Kind.TEMPORARY and buffers["cast"].reads == (1,)
    assert [buffers[name].argument for name in "xw"] == [0, 1]
    sizes = [buffer.bytes for buffer in loops.at_peak]
    assert sizes == sorted(sizes, reverse=True)


def test_a_breakdown_tells_gradients_from_copies_of_weights():
    # With less to do in the forward loop the peak is in the backward one.
    text = LOOPS.lstrip().replace("hidden = f32[1024]{0}", "hidden = f32[128]{0}")
    timeline = memory_timeline(text)
    (sums,) = (buffer for buffer in timeline.at_peak if buffer.name == "zeros")
    assert sums.op_name == "layer/w_grad" and sums.kind is not Kind.SAVED
    uses = breakdown(timeline, {"weights": [1], "slots": []})
    assert uses.arguments == {"weights": 4 * KIB, "slots": 0, "other arguments": KIB}
    assert (uses.saved, uses.weight_copies) == (4 * KIB, 4 * KIB)
    assert uses.gradients == 4 * KIB
    assert uses.other == timeline.peak - 17 * KIB
    assert sum(uses.parts().values()) == timeline.peak


def test_branches_and_asynchronous_ops_share_what_they_are_given():
    text = """HloModule three, is_scheduled=true, entry_computation_layout={}

%yes (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %wide = f32[1024]{0} broadcast(%a)
  ROOT %a1 = f32[256]{0} reduce(%wide)
}

%no (b: f32[256]) -> f32[256] {
  %b = f32[256]{0} parameter(0)
  ROOT %b1 = f32[256]{0} reverse(%b)
}

ENTRY %main (p: pred[], x: f32[256]) -> f32[512] {
  %p = pred[] parameter(0)
  %x = f32[256]{0} parameter(1)
  %start = (f32[256]{0}, f32[512]{0}) all-gather-start(%x), dimensions={0}
  %either = f32[256]{0} conditional(%p, %x, %x), true_computation=%yes, \
false_computation=%no
  %sum = f32[256]{0} reduce(%either)
  %done = f32[512]{0} all-gather-done(%start)
  %fetch = (f32[512]{0}, f32[512]{0}, u32[]{:S(2)}) copy-start(%done)
  %fetched = f32[512]{0} copy-done(%fetch)
  ROOT %out = f32[512]{0} dot(%fetched, %sum)
}
"""
    assert [(name, round(kib)) for name, kib in alive(text)] == [
        # What an op in flight reads stays alive until it is done.
        ("start", 1 + 2),
        ("wide", 3 + 4),
        ("a1", 3 + 4 + 1),
        ("b1", 3 + 1),
        ("either", 3 + 1),
        ("sum", 3 + 1 + 1),
        ("done", 3 + 1),
        ("fetch", 3 + 1 + 2),
        ("fetched", 1 + 2 + 1 + 2),
        ("out", 1 + 2 + 1 + 2),
    ]


def test_text_that_is_not_scheduled_is_refused():
    text = STRAIGHT.lstrip().replace("is_scheduled=true, ", "")
    with pytest.raises(ValueError, match="without is_scheduled=true.*Program.hlo_text"):
        memory_timeline(text)


def two_layers(w, x):
    with tf.name_scope("first"):
        h = tf.tanh(tf.matmul(x, w))
    with tf.name_scope("second"):
        y = tf.tanh(tf.matmul(h, w))
    return w - tf.matmul(h, y, transpose_a=True), tf.reduce_sum(y)


def compiled(devices=None, donate=(0,), size=512):
    mesh = DeviceMesh(("X",), (8,))
    rows = Sharding.from_dims_mapping(mesh, ["X", -1])
    replicated = Sharding.from_dims_mapping(mesh, [-1, -1])
    return compile_program(
        two_layers,
        [tf.TensorSpec([size, size]), tf.TensorSpec([64 * size, size])],
        mesh,
        in_shardings=[replicated, rows],
        donate=donate,
        devices=devices,
    )


@pytest.mark.parametrize("donate", [(), (0,)])
def test_the_peak_is_what_the_cpu_backend_allocates(donate):
    program = compiled(donate=donate)
    timeline = memory_timeline(program.hlo_text(), program.sources)
    assert timeline.peak == pytest.approx(program.memory().peak, rel=0.02)
    layers = {b.layer for b in timeline.at_peak if b.kind is Kind.TEMPORARY}
    assert layers & {"first", "second"}


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (2**14, "16.0 KiB"),
        (9.994 * 2**20, "9.99 MiB"),
        (9.996 * 2**20, "10.0 MiB"),
        (99.96 * 2**20, "100 MiB"),
        (999.4 * 2**20, "999 MiB"),
        (1000 * 2**20, "0.98 GiB"),
        (15.48 * 2**30, "15.5 GiB"),
        (3 * 2**50, "3072 TiB"),
    ],
)
def test_sizes_are_read_at_a_glance(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000314159, "0.0003142"),
        (2.5, "2.5"),
        (-12.3456, "-12.35"),
        (999.96, "1000"),
        (-12345.6, "-12,346"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_digits(value, text):
    assert number_text(value) == text


@needs.libtpu
def test_the_peak_is_that_of_the_tpu_compiler():
    program = compiled(topology_devices("v3:2x2"))
    timeline = memory_timeline(program.hlo_text(), program.sources)
    stats = program._compiled.memory_analysis()
    assert timeline.peak == pytest.approx(stats.peak_memory_in_bytes, rel=0.001)
