"""What a program computes again, by the names and loops of its instructions."""

# ruff: noqa: E501 (HLO text)

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.recomputed import recomputed

# A step, in a loop over steps: layers forward, and backward two of them at a time.
PROGRAM = """
HloModule train, is_scheduled=true

%product (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %convolution.1 = f32[8,8]{1,0} convolution(%a, %b), dim_labels=bf_io->bf, metadata={op_name="jit(train)/tf_program/call.2/while/PartitionedCall/layer/again"}
  ROOT %add.1 = f32[8,8]{1,0} add(%convolution.1, %b), metadata={op_name="jit(train)/tf_program/call.2/while/PartitionedCall/gradients/layer/sum"}
}

%softmax (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %exp.1 = f32[8,8]{1,0} exponential(%c), metadata={op_name="jit(train)/tf_program/call.2/while/PartitionedCall/layer/softmax"}
}

%forward (f: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %f = (s32[], f32[8,8]) parameter(0)
  %f.i = s32[] get-tuple-element(%f), index=0
  %f.x = f32[8,8]{1,0} get-tuple-element(%f), index=1
  %f.y = f32[8,8]{1,0} multiply(%f.x, %f.x), metadata={op_name="jit(train)/tf_program/stack/while/PartitionedCall/layer/mul"}
  ROOT %f.out = (s32[], f32[8,8]) tuple(%f.i, %f.y)
}

%scan (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]) parameter(0)
  %s.i = s32[] get-tuple-element(%s), index=0
  %s.x = f32[8,8]{1,0} get-tuple-element(%s), index=1
  %scan.again = f32[8,8]{1,0} multiply(%s.x, %s.x), metadata={op_name="jit(train)/tf_program/layer/while/mul"}
  ROOT %s.out = (s32[], f32[8,8]) tuple(%s.i, %scan.again)
}

%layers (l: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %l = (s32[], f32[8,8]) parameter(0)
  %l.i = s32[] get-tuple-element(%l), index=0
  %l.x = f32[8,8]{1,0} get-tuple-element(%l), index=1
  %read = f32[8,8]{1,0} dynamic-slice(%l.x, %l.i, %l.i), dynamic_slice_sizes={8,8}, metadata={op_name="jit(train)/tf_program/call.2/while/XlaDynamicSlice"}
  %again = f32[8,8]{1,0} fusion(%read, %read), kind=kOutput, calls=%product, metadata={op_name="jit(train)/tf_program/call.2/while/PartitionedCall/gradients/layer/sum"}
  %again.unnamed = f32[8,8]{1,0} fusion(%again), kind=kLoop, calls=%softmax
  %again.copy = f32[8,8]{0,1} copy(%again.unnamed)
  %scanned = (s32[], f32[8,8]) while(%l), condition=%condition, body=%scan
  %merged = f32[8,8]{1,0} multiply(%again.copy, %again.copy), metadata={op_name="jit(train)/tf_program/layer/mul;while/PartitionedCall/gradients/layer/mul"}
  ROOT %l.out = (s32[], f32[8,8]) tuple(%l.i, %merged)
}

%backward (k: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %k = (s32[], f32[8,8]) parameter(0)
  %k.i = s32[] get-tuple-element(%k), index=0
  %shift = f32[8,8]{1,0} get-tuple-element(%k), index=1
  %shifted = f32[8,8]{1,0} multiply(%shift, %shift), metadata={op_name="jit(train)/tf_program/PartitionedCall/while/mul"}
  %k.state = (s32[], f32[8,8]) tuple(%k.i, %shifted)
  ROOT %two = (s32[], f32[8,8]) while(%k.state), condition=%condition, body=%layers, metadata={op_name="jit(train)/tf_program/PartitionedCall/while/while"}
}

%step (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]) parameter(0)
  %p.i = s32[] get-tuple-element(%p), index=0
  %p.x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %embedded = f32[8,8]{1,0} multiply(%p.x, %p.x), metadata={op_name="jit(train)/tf_program/while/PartitionedCall/embedding/mul"}
  %called = f32[8,8]{1,0} multiply(%p.x, %p.x), metadata={op_name="jit(train)/tf_program/while/PartitionedCall/gradient_tape/PartitionedCall/gradients/mul"}
  %p.state = (s32[], f32[8,8]) tuple(%p.i, %embedded)
  %went = (s32[], f32[8,8]) while(%p.state), condition=%condition, body=%forward
  ROOT %came = (s32[], f32[8,8]) while(%went), condition=%condition, body=%backward
}

ENTRY %main (argument: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %argument = (s32[], f32[8,8]) parameter(0)
  ROOT %steps = (s32[], f32[8,8]) while(%argument), condition=%condition, body=%step
}
"""


def test_what_is_recomputed():
    assert recomputed(HloModule(PROGRAM)) == {
        "again",
        "again.unnamed",
        "again.copy",
        "scan.again",
    }


def test_nothing_is_without_a_backward_loop():
    without = PROGRAM.replace("/gradients/", "/other/")
    assert recomputed(HloModule(without)) == set()
