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
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging
from jax.extend.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler import jax_bridge
from meshwright.framework.compiler.jax_bridge import MeshProgram
from meshwright.framework.compiler.lower import LoweredFunction, LoweringError
from meshwright.framework.compiler.repair import conv_layout, looks
from meshwright.framework.compiler.repair.conv_match import Shardings
from meshwright.framework.compiler.repair.conv_rewrite import lay_out
from meshwright.framework.compiler.repair.faults import FAULTS, Chosen, Fault
from meshwright.framework.compiler.repair.op_layout import OpLayout, even_layout
from meshwright.framework.compiler.repair.patterns import (
    PRODUCTS,
    STEPPED,
    may_regroup,
    stepped_dims,
)
from meshwright.framework.compiler.repair.repaired import Repair, repair_of
from meshwright.framework.compiler.repair.write import Pin, lay_out_evenly
from meshwright.framework.compiler.stable_hlo import Blame
from meshwright.framework.sharding.mesh import DeviceMesh

PRESENT = [fault for fault in FAULTS if fault.is_in(jax_bridge.JAXLIB)]
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
        program, guarded = _lowered(lowered, mesh, chosen, None, border)
        if not guarded:
            return program
        wrong, right = {}, {}
        with program.lowered.compiler_ir("stablehlo").context:
            for place, layout in looks.layouts(program):
                if found := _wrong(blame, layout, chosen.get(place)):
                    wrong[place] = found
                elif place not in chosen and program.shardy and _is_near(layout):
                    right[place] = layout.shardings
        for place, (choice, repair) in wrong.items():
            chosen[place], repairs[place] = choice, repair
        if not wrong:
            _report(lowered.name, list(repairs.values()), strict)
            program, _ = _lowered(lowered, mesh, chosen, right, border)
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
    pinned: Mapping[int, Shardings] | None,
    border: Mapping[str, Any],
) -> tuple[MeshProgram, bool]:
    """The program laid out as chosen, and whether it has guarded operations.

    To be looked at they are numbered. To be compiled they are `pinned`: XLA's own
    completion comes after other passes, and may differ from what was looked at.
    """
    count = 0

    def rewrite(module: ir.Module) -> None:
        nonlocal count
        # Of a function that is called twice each call may be sharded otherwise.
        PassManager.parse(_INLINE).run(module.operation)
        guarded = looks.number(module, _is_guarded)
        pin = Pin(mesh)
        for place, shardings in (pinned or {}).items():
            pin(guarded[place], shardings)
        for place, choice in chosen.items():
            if isinstance(choice, conv_layout.Layout):
                lay_out(guarded[place], mesh, choice)
            else:
                lay_out_evenly(guarded[place], choice)
        if pinned is not None:
            looks.drop_numbers(module)
        count = len(guarded)

    program = jax_bridge.lower_for_mesh(lowered, mesh, rewrite=rewrite, **border)
    return program, count > 0


def _is_guarded(op) -> bool:
    """Whether an operation may meet a fault, as far as it can tell itself."""
    return op.name in GUARDED and (op.name not in STEPPED or bool(stepped_dims(op)))


def _is_near(layout: OpLayout) -> bool:
    """Whether an operation might meet a fault if XLA completed it a little otherwise.

    Most products of a model cannot, and are left to XLA as they are.
    """
    return layout.op.name not in PRODUCTS or may_regroup(layout)


def _wrong(
    blame: Blame, layout: OpLayout, before: Chosen | None
) -> tuple[Chosen, Repair] | None:
    """How an operation is to be laid out if XLA would get it wrong.

    Args:
      blame: for messages.
      layout: the operation as completed.
      before: what was chosen for it in an earlier round.
    """
    found = _choice(layout) if layout.is_split else None
    if found is None:
        return None
    fault, choice = found
    if layout.manual and isinstance(choice, conv_layout.Layout):
        raise _in_region(blame, layout, choice)
    if before is not None:  # It did not help: nothing of the operation is to be split.
        choice = even_layout(layout, keep=())
        # A convolution in a region of ours has other shapes than the program's.
        if choice == before or isinstance(before, conv_layout.Layout):
            raise blame.error(
                layout.op,
                f"{fault.what}, which XLA gets wrong, and completion keeps the layout "
                f"{', '.join(str(t.sharding) for t in layout.tensors)} though it is "
                "annotated otherwise; annotate what it reads, or use the other "
                "partitioner",
            )
    return choice, repair_of(layout, fault, choice, blame.sources)


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
