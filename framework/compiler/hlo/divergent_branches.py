"""Collectives of a compiled program at which some devices would wait forever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.report import (
    PERMUTE,
    Collective,
    collectives_of,
)
from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.lowering.sources import Sources, program_name
from meshwright.framework.sharding.mesh import DeviceMesh


def check_branches(
    name: str,
    module: HloModule,
    mesh: DeviceMesh,
    divergent: Mapping[str, Iterable[str]],
    sources: Sources,
) -> None:
    """Refuses collectives over devices that take different branches.

    The partitioner puts collectives along automatic axes into the branches of manual
    regions. XLA's CPU and GPU backends run a collective permute on all devices of the
    program, also on those that neither send nor receive.

    Args:
      name: the program's.
      module: the optimized program.
      mesh: the program's mesh.
      divergent: by name of a loop or a branch the axes along which its predicate
        differs by device.
      sources: where the program's ops come from.

    Raises:
      LoweringError: a loop or a branch has such a collective.
    """
    collectives = {c.name: c for c in collectives_of(module, mesh)}
    for op in module.instructions:
        axes = set(divergent.get(program_name(op.op_name), ()))
        if op.opcode not in ("conditional", "while") or not axes:
            continue
        for inner in _within(module, op.called):
            collective = collectives.get(inner)
            if collective is not None and _waits(collective, axes, mesh):
                raise _error(name, program_name(op.op_name), axes, collective, sources)


def _within(module: HloModule, computations: Iterable[str]) -> Iterator[str]:
    """The names of the instructions of computations, and of those that these call."""
    for computation in computations:
        for instruction in module.inside[computation]:
            yield instruction.name
            yield from _within(module, instruction.called)


def _waits(collective: Collective, axes: set[str], mesh: DeviceMesh) -> bool:
    """Whether a collective waits for devices that differ along any of the axes."""
    if collective.kind == PERMUTE:
        return True
    along = [mesh.place_along(axis).flatten() for axis in axes]
    return any(
        len(set(places[list(group)])) > 1
        for group in collective.groups
        for places in along
    )


def _error(
    program: str, name: str, axes: set[str], collective: Collective, sources: Sources
) -> LoweringError:
    by = ", ".join(sorted(axes))
    where = sources.text(program_name(collective.op_name))
    return LoweringError(
        f"{program}: {sources.text(name)} is in a manual region, and its predicate "
        f"differs by device along {by}. In it {where} has a {collective.kind} over "
        "devices that differ in that, some of which would wait for the others forever. "
        f"Make the predicate the same (all_reduce along {by}), make all axes manual, "
        "or move the op out of the branch or the loop"
    )
