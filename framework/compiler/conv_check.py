"""Lowers a program for a mesh so that XLA gets its convolutions right.

Where they lie is known after completion only. So a program that has convolutions is
completed beforehand: under Shardy by its propagation alone, in this process, which
takes a fraction of a second; under GSPMD, whose propagation only a compilation runs, by
one more of these. If some lie where XLA would be wrong (`conv_layout`), the program is
lowered anew with these laid out, and looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir

from meshwright.framework.compiler import jax_bridge
from meshwright.framework.compiler.completion import complete
from meshwright.framework.compiler.conv_layout import Layout, layout
from meshwright.framework.compiler.conv_match import Shardings, originals
from meshwright.framework.compiler.conv_rewrite import (
    CONVOLUTION,
    Key,
    convolution_of,
    key_of,
)
from meshwright.framework.compiler.hlo_text import Instruction
from meshwright.framework.compiler.jax_bridge import MeshProgram
from meshwright.framework.compiler.lower import LoweredFunction, LoweringError
from meshwright.framework.compiler.propagation import Propagated, manual_axes
from meshwright.framework.compiler.stable_hlo import Blame, walk
from meshwright.framework.sharding.mesh import DeviceMesh

# What is laid out stays so, but others may lie otherwise after it; so many looks.
_ROUNDS = 4


def lower_for_mesh(
    lowered: LoweredFunction, mesh: DeviceMesh, **border: Any
) -> MeshProgram:
    """`jax_bridge.lower_for_mesh`, convolutions laid out so that XLA is right.

    Raises:
      LoweringError: as there; or XLA would get a convolution wrong that cannot be laid
        out, such as one in a manual region.
    """
    if mesh.size == 1 or b"convolution" not in lowered.hlo:
        return jax_bridge.lower_for_mesh(lowered, mesh, **border)
    blame = Blame(lowered.name, lowered.sources)
    layouts: dict[Key, Layout] = {}
    for _ in range(_ROUNDS):
        program = jax_bridge.lower_for_mesh(lowered, mesh, layouts=layouts, **border)
        wrong = _wrong(blame, program)
        if not wrong:
            return program
        layouts.update(wrong)
    name, *_, shape = next(iter(wrong))
    raise LoweringError(
        f"{lowered.name}: no layout was found in which XLA gets convolution {name!r} "
        f"of shape {list(shape)} right; annotate its operands and its result so that "
        "every mesh axis splits the batch or a window dim of both"
    )


def _wrong(blame: Blame, program: MeshProgram) -> dict[Key, Layout]:
    """Layouts for the convolutions that XLA would get wrong."""
    module = program.lowered.compiler_ir("stablehlo")
    found = {}
    with module.context:
        completed = _by_shardy if program.shardy else _by_gspmd
        for op, shardings in completed(program, module):
            chosen = layout(convolution_of(op), program.mesh, *shardings)
            if chosen is not None:
                _check_no_region(blame, op, shardings, chosen)
                found[key_of(op)] = chosen
    return found


def _convolutions(op) -> list:
    return [inner for inner in walk(op) if inner.name == CONVOLUTION]


def _check_no_region(blame: Blame, op, shardings: Shardings, chosen: Layout) -> None:
    manual = next((one.manual for one in shardings if one and one.manual), ())
    if manual:
        axes = " and ".join(chosen.manual) or "others"
        raise blame.error(
            op,
            f"is a convolution in a region manual along {', '.join(manual)}, whose "
            f"operands lie {' and '.join(map(str, shardings[:2]))}: XLA would count "
            f"what devices along {axes} hold alike several times. Split the batch by "
            f"{axes}, or make the region manual along {axes} too",
        )


def _by_shardy(
    program: MeshProgram, module: ir.Module
) -> Iterator[tuple[ir.Operation, Shardings]]:
    completed = Propagated(program)
    for op in _convolutions(completed.module):
        manual = manual_axes(op)
        values = [*op.operands, op.results[0]]
        yield op, [completed.sharding(value, manual) for value in values]


def _by_gspmd(
    program: MeshProgram, module: ir.Module
) -> Iterator[tuple[ir.Operation, Shardings]]:
    ops = _convolutions(module.operation)
    if not ops:
        return
    found = complete(program)
    for one in found.completed.instructions:
        if one.opcode == "convolution":
            values = [*found.completed.operands(one), one]
            shapes = [value.shape for value in values]
            read = [found.sharding(value) for value in values]
            known = [None if isinstance(s, str) else s for s in read]
            alike = list(originals(ops, one.op_name, shapes, known))
            if not alike:
                _check_adds_nothing(program, ops, one, known)
            yield from alike


def _check_adds_nothing(
    program: MeshProgram, ops: list, one: Instruction, shardings: Shardings
) -> None:
    """Refuses a convolution of XLA's own making unless it is right however it lies.

    It is if an operand is whole: there is nothing to add up.
    """
    known = None not in shardings
    whole = known and any(max(s.splits(), default=1) == 1 for s in shardings[:2])
    if not whole or any(convolution_of(op).groups > 1 for op in ops):
        raise LoweringError(
            f"{program.name}: XLA made a convolution {one.op_name!r} of shape "
            f"{list(one.shape)} before GSPMD completed it, like none in the program, "
            "so whether it comes out right is not known; use Partitioner.SHARDY"
        )
