"""Whether data alone orders the collectives of a program."""

from __future__ import annotations

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.report import KINDS


def is_ordered(module: HloModule) -> bool:
    """Whether each collective needs a result of the one before it.

    XLA for CPUs runs ops as soon as their operands are there, but collectives in the
    order of the program. An executable that was serialized has lost that order (jaxlib
    0.10.2: CreateResourceFromProto in thunk_proto_serdes.cc makes a resource for
    each collective, and resources are the same by their address): where data do not
    order them, devices begin different ones, and wait for each other for ever.

    Args:
      module: the program of one device.
    """
    # Computations with collectives; in HLO's text they come before their callers.
    waiting: set[str] = set()
    for computation, body in module.inside.items():
        # By instruction, the last collective that it needs; they are numbered from 1.
        last: dict[str, int] = {}
        count = 0
        for instruction in body:
            needed = max(
                (last.get(name, 0) for name in instruction.operands), default=0
            )
            is_collective = instruction.opcode.removesuffix("-start") in KINDS
            if is_collective or not waiting.isdisjoint(instruction.called):
                if needed != count:
                    return False
                count = needed = count + 1
            last[instruction.name] = needed
        if count:
            waiting.add(computation)
    return True
