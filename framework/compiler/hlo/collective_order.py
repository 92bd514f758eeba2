"""Whether data alone orders the collectives of a program."""

from __future__ import annotations

from meshwright.framework.compiler.hlo.hlo_text import HloModule, Instruction
from meshwright.framework.compiler.hlo.report import KINDS


def is_ordered(module: HloModule) -> bool:
    """Whether each collective needs a result of the one before it.

    XLA for CPUs runs ops as soon as their operands are there, but collectives in the
    order of the program. An executable that was serialized has lost that order (jaxlib
    0.10.2: `CreateResourceFromProto` in `thunk_proto_serdes.cc` makes a resource for
    each collective, and resources are the same by their address): where data do not
    order them, devices begin different ones, and wait for each other for ever.

    Args:
      module: the program of one device.
    """
    waiting: dict[str, bool] = {}
    return all(
        _are_ordered(module, body, waiting) for body in list(module.inside.values())
    )


def _are_ordered(
    module: HloModule, body: list[Instruction], waiting: dict[str, bool]
) -> bool:
    # By instruction, the last collective that it needs; they are numbered from 1.
    last: dict[str, int] = {}
    count = 0
    for instruction in body:
        needed = max((last.get(name, 0) for name in instruction.operands), default=0)
        if _waits(module, instruction, waiting):
            if needed != count:
                return False
            count = needed = count + 1
        last[instruction.name] = needed
    return True


def _waits(
    module: HloModule, instruction: Instruction, waiting: dict[str, bool]
) -> bool:
    """Whether it is a collective, or runs a computation that has one."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return True
    for name in instruction.called:
        if name not in waiting:
            waiting[name] = any(
                _waits(module, inner, waiting) for inner in module.inside.get(name, ())
            )
        if waiting[name]:
            return True
    return False
