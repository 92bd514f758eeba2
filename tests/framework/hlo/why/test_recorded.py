"""Propagation with records gives the shardings that it gives without."""

import pytest
from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.shardy.completed import write_for_shardy
from meshwright.framework.compiler.stablehlo.shardy.propagation import (
    Propagated,
    manual_axes,
)
from meshwright.framework.compiler.stablehlo.shardy.recorded import Recorded
from meshwright.framework.compiler.stablehlo.stable_hlo import NUMBER, Blame, walk
from meshwright.framework.compiler.xla.jax_bridge import ir_context
from tests.framework.hlo.why.why_programs import PROGRAMS, RandomProgram, kept
from tests.framework.partial.partial_programs import check_random


def both(traced):
    """By number of an op its results' dims, completed without and with records."""
    written = traced.results.written
    blame = Blame(written.signature.name, written.signature.sources)
    with ir_context(), ir.Location.unknown():
        module = ir.Module.parse(traced.results.plain).operation
        integer = ir.IntegerType.get_signless(32)
        for number, op in enumerate(walk(module)):
            op.attributes[NUMBER] = ir.IntegerAttr.get(integer, number)
        forms = written.in_forms, written.out_forms
        borders = [[form and form.border for form in side] for side in forms]
        write_for_shardy(blame, module, written.mesh, *borders)
        bundled = Propagated(blame, module.clone(), written.mesh)
        recorded = Recorded(blame, module.clone(), written.mesh)
        dims = [{}, {}]
        for op in walk(bundled.module):
            if NUMBER in op.attributes:
                manual = manual_axes(op)
                found = [bundled.sharding(v, manual) for v in op.results]
                dims[0][int(op.attributes[NUMBER])] = [s.dims for s in found]
        for op in walk(recorded.module):
            if NUMBER in op.attributes:
                found = [recorded.sharding(recorded.place(v)) for v in op.results]
                ranks = [len(ir.RankedTensorType(v.type).shape) for v in op.results]
                dims[1][int(op.attributes[NUMBER])] = [
                    s.dims if s else ((),) * rank
                    for s, rank in zip(found, ranks, strict=True)
                ]
    # The bundle leaves out annotations that nothing reads.
    return dims[0], {number: dims[1][number] for number in dims[0]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_shardings_are_those_of_the_bundled_pipeline(name):
    bundled, recorded = both(kept(name))
    assert len(bundled) > 5 and any(any(map(any, dims)) for dims in bundled.values())
    assert recorded == bundled


def test_shardings_of_random_programs_are_those_of_the_bundled_pipeline():
    def check(random, _):
        program = RandomProgram(random)
        bundled, recorded = both(program.traced())
        assert recorded == bundled, program

    check_random(check, 20, "")
