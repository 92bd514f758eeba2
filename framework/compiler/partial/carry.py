"""Carries partial sums through a program, from where they are made to where they end.

Typed annotations (`mesh_split` with unreduced axes, `reshard`) say where a sum is
unreduced. From there on all ops that are linear in it are computed part by part,
through loops, up to the `reshard` that adds the parts up; other readers are refused.
Where an annotation says that a tensor is unreduced, it is made so: back through linear
ops to those that sum over a dim that the axes split ("Replicate forwards, partial
backwards").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.framework.compiler.lowering.lower import LoweredFunction
from meshwright.framework.compiler.partial.assignment import PartialAssignment
from meshwright.framework.compiler.partial.regions import refuse_in_regions
from meshwright.framework.compiler.partial.write_parts import write_parts
from meshwright.framework.compiler.stablehlo.completed import completed_module
from meshwright.framework.compiler.stablehlo.modules import bytecode
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame
from meshwright.framework.sharding.annotations import TYPED
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import PREFIX
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import RESHARD


def has_types(lowered: LoweredFunction) -> bool:
    """Whether a function has typed annotations."""
    return any(f"{PREFIX}{kind}".encode() in lowered.hlo for kind in (TYPED, RESHARD))


def carry_pending(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
) -> LoweredFunction:
    """The function with its typed annotations written out, for either partitioner.

    Args:
      lowered: the function.
      mesh: the mesh to compile for.
      in_shardings, out_shardings: for the leaves of its arguments and its result.

    Raises:
      LoweringError: a partial sum meets an op that is not linear in it, or leaves the
        program; or no sum is unreduced where an annotation says so, or none can be, as
        in a manual region.
    """
    if not has_types(lowered):
        return lowered
    with completed_module(
        lowered, mesh, in_shardings=in_shardings, out_shardings=out_shardings
    ) as completed:
        blame = Blame(lowered.name, lowered.sources)
        refuse_in_regions(completed.main, mesh, blame)
        write_parts(completed, PartialAssignment(completed, blame))
        return dataclasses.replace(lowered, rewritten=bytecode(completed.module))
