"""Errors of XLA, in terms of the program that it refuses."""

from __future__ import annotations

import re

from meshwright.framework.compiler.lowering.errors import LoweringError, first_line
from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.framework.compiler.xla.partitioner import Partitioner

_HLO_NAME = re.compile(r'op_name="(?P<op>[^"]+)"')
_LAY_OUT = (
    "Try Partitioner.{other}, or annotate the op's operands and result by mesh_split, "
    "unsharded along the dims that it works on"
)
# Remedies for errors that shardings do not cause.
_REMEDIES = {
    "No such compile option": "Give compiler_options that this XLA has, by flag name",
    "No registered implementation": (
        "Leave the custom call out, or register it for the platform by jax.ffi"
    ),
}


def of_xla(
    name: str, error: Exception, *, partitioner: Partitioner, sources: Sources
) -> LoweringError:
    """XLA's refusal to partition or compile a program.

    Args:
      name: the program's.
      error: JAX's.
      partitioner: the one that was to complete it.
      sources: where the program's ops come from.
    """
    text = str(error)
    where = ""
    if (named := _HLO_NAME.search(text)) and sources.find(named["op"]):
        where = f" at {sources.text(named['op'])}"
    remedy = _LAY_OUT.format(other=partitioner.other.name)
    for pattern, other_remedy in _REMEDIES.items():
        if re.search(pattern, text):
            remedy = other_remedy
    return LoweringError(
        f"{name}: XLA cannot compile it with {partitioner.title}{where}: "
        f"{first_line(error)}. {remedy}"
    )


def of_child(name: str, how: str, *, partitioner: Partitioner) -> LoweringError:
    """The end of the child process in which XLA compiled a program.

    Args:
      name: the program's.
      how: by which signal or with which status, and what the child wrote last.
      partitioner: the one that was to complete the program.
    """
    remedy = _LAY_OUT.format(other=partitioner.other.name)
    return LoweringError(
        f"{name}: the child process in which XLA compiled it with {partitioner.title} "
        f"ended {how.rstrip('. ')}. {remedy}. For a report of the "
        "fault, JAX_DUMP_IR_TO=folder in the environment keeps the module"
    )
