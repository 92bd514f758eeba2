"""Lowers a program for a mesh so that XLA partitions it right.

How the tensors of an operation are sharded is known after completion only. So a program
is completed beforehand (`looks`). Where an operation is sharded as a row of the table
of faults says (`faults`), or a convolution so that XLA would add up too much
(`conv_layout`), the program is lowered anew with that operation laid out otherwise, and
looked at again. What is laid out stays so, but completion may then choose otherwise for
others: hence the rounds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jaxlib
from absl import logging
from jax.extend.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler import jax_bridge
from meshwright.framework.compiler.jax_bridge import MeshProgram
from meshwright.framework.compiler.lower import LoweredFunction, LoweringError
from meshwright.framework.compiler.repair import conv_layout, looks
from meshwright.framework.compiler.repair.conv_rewrite import (
    lay_out,
)
from meshwright.framework.compiler.repair.faults import FAULTS, Chosen, Fault
from meshwright.framework.compiler.repair.op_layout import OpLayout, even_layout
from meshwright.framework.compiler.repair.repaired import Repair, repair_of
from meshwright.framework.compiler.repair.write import lay_out_evenly
from meshwright.framework.compiler.stable_hlo import Blame
from meshwright.framework.sharding.mesh import DeviceMesh

_JAXLIB = tuple(int(n) for n in re.findall(r"\d+", jaxlib.__version__)[:3])
PRESENT = [fault for fault in FAULTS if fault.is_in(_JAXLIB)]
GUARDED = frozenset(name for fault in PRESENT for name in fault.ops)
_ROUNDS = 8
_INLINE = "builtin.module(inline,symbol-dce)"


def lower_for_mesh(
    lowered: LoweredFunction, mesh: DeviceMesh, *, strict: bool = False, **border: Any
) -> MeshProgram:
    """`jax_bridge.lower_for_mesh`, laid out so that XLA gets each operation right.

    Args:
      lowered: the function.
      mesh: the device mesh.
      strict: refuse a program rather than repair it at a cost.
      **border: see `jax_bridge.lower_for_mesh`.

    Returns:
      The program; its `repairs` say what was laid out otherwise.

    Raises:
      LoweringError: as there; an operation cannot be laid out, such as a convolution in
        a manual region; or a repair costs communication and `strict` forbids it.
    """
    if mesh.size == 1:
        return jax_bridge.lower_for_mesh(lowered, mesh, **border)
    blame = Blame(lowered.name, lowered.sources)
    chosen: dict[int, Chosen] = {}
    repairs: dict[int, Repair] = {}
    for _ in range(_ROUNDS):
        program, guarded = _lowered(lowered, mesh, chosen, border)
        if not guarded:
            return program
        module = program.lowered.compiler_ir("stablehlo")
        with module.context:
            wrong = dict(_wrong(blame, program, chosen))
            for place, (choice, repair) in wrong.items():
                chosen[place], repairs[place] = choice, repair
            if not wrong:
                looks.drop_numbers(module)
                _report(lowered.name, list(repairs.values()), strict)
                return dataclasses.replace(program, repairs=tuple(repairs.values()))
    raise LoweringError(
        f"{lowered.name}: no layout was found in which XLA gets the program right. "
        f"The last tried: {repairs[next(iter(wrong))]}. Annotate its operands and its "
        "result"
    )


def _report(name: str, repairs: Sequence[Repair], strict: bool) -> None:
    """Warns of repairs that cost communication, or refuses them."""
    costly = [one for one in repairs if one.bytes and not one.fault.is_slow]
    costly.sort(key=lambda one: -one.bytes)
    if costly and strict:
        listed = "\n  ".join(map(str, costly))
        raise LoweringError(
            f"{name}: the program is compiled strictly, and {len(costly)} of its ops "
            f"would be laid out otherwise at a cost:\n  {listed}\nAnnotate them, or "
            "compile with strict=False"
        )
    for repair in costly:
        logging.warning("%s: %s", name, repair)


def _lowered(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    chosen: Mapping[int, Chosen],
    border: Mapping[str, Any],
) -> tuple[MeshProgram, bool]:
    """The program laid out as chosen, and whether it has guarded operations."""
    count = 0

    def rewrite(module: ir.Module) -> None:
        nonlocal count
        # Of a function that is called twice each call may be sharded otherwise.
        PassManager.parse(_INLINE).run(module.operation)
        guarded = looks.number(module, GUARDED)
        for place, choice in chosen.items():
            if isinstance(choice, conv_layout.Layout):
                lay_out(guarded[place], mesh, choice)
            else:
                lay_out_evenly(guarded[place], choice)
        count = len(guarded)

    program = jax_bridge.lower_for_mesh(lowered, mesh, rewrite=rewrite, **border)
    return program, count > 0


def _wrong(
    blame: Blame, program: MeshProgram, chosen: Mapping[int, Chosen]
) -> Iterator[tuple[int, tuple[Chosen, Repair]]]:
    """How what XLA would get wrong is to be laid out instead."""
    for place, layout in looks.layouts(program):
        found = _choice(layout) if layout.is_split else None
        if found is None:
            continue
        fault, choice = found
        if layout.manual and isinstance(choice, conv_layout.Layout):
            raise _in_region(blame, layout, choice)
        if place in chosen:
            # What was chosen did not help: nothing of it is to be split.
            choice = even_layout(layout, keep=())
            if choice == chosen[place]:
                raise blame.error(
                    layout.op,
                    f"{fault.what}, which XLA gets wrong, and completion keeps the "
                    f"layout {', '.join(str(t.sharding) for t in layout.tensors)} "
                    "though it is annotated otherwise; annotate what it reads, or use "
                    "the other partitioner",
                )
        yield place, (choice, repair_of(layout, fault, choice, blame.sources))


def _choice(layout: OpLayout) -> tuple[Fault, Chosen] | None:
    for fault in PRESENT:
        if layout.op.name in fault.ops and (choice := fault.choose(layout)) is not None:
            return fault, choice
    return None


def _in_region(
    blame: Blame, layout: OpLayout, choice: conv_layout.Layout
) -> LoweringError:
    axes = " and ".join(choice.manual) or "others"
    operands = " and ".join(str(tensor.sharding) for tensor in layout.operands)
    return blame.error(
        layout.op,
        f"is a convolution in a region manual along {', '.join(layout.manual)}, whose "
        f"operands lie {operands}: XLA would count what devices along {axes} hold "
        f"alike several times. Split the batch by {axes}, or make the region manual "
        f"along {axes} too",
    )
