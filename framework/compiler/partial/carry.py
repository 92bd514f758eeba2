"""Carries partial sums through a program, from where they are made to where they end.

Typed annotations (`mesh_split` with unreduced axes, `reshard`) say where a sum is
unreduced. From there on all ops that are linear in it are computed part by part,
through loops, up to the `reshard` that adds the parts up; other readers are refused.
Where an annotation says that a tensor is unreduced, it is made so: back through linear
ops to those that sum over a dim that the axes split ("Replicate forwards, partial
backwards").
"""

from __future__ import annotations

from meshwright.framework.compiler.partial.assignment import PartialAssignment
from meshwright.framework.compiler.partial.write_parts import write_parts
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.stable_hlo import placeholder_of, walk
from meshwright.framework.sharding.annotations import TYPED
from meshwright.framework.sharding.types import RESHARD


def carry_partial_sums(module: Module) -> None:
    """Writes a module's typed annotations out, for either partitioner.

    Raises:
      LoweringError: a partial sum meets an op that is not linear in it, or leaves the
        program; or no sum is unreduced where an annotation says so, or none can be, as
        in a manual region.
    """
    placeholders = map(placeholder_of, walk(module.operation))
    if not any(p is not None and p.kind in (TYPED, RESHARD) for p in placeholders):
        return
    completed = module.completed()
    assignment = PartialAssignment(completed, module.blame)
    module.write()
    write_parts(completed, assignment)
