"""No sum is unreduced in a manual region, where each device has tensors of its own."""

from __future__ import annotations

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    OUT_OF_MANUAL,
    Blame,
    Placeholder,
    operands_of,
    placeholder_of,
    walk,
)
from meshwright.framework.sharding.annotations import TYPED, OnConflict
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import RESHARD

RULE = "no sum is unreduced in a manual region, which types do not reach into"
REMEDY = (
    "along the region's own axes add it up by all_reduce or reduce_scatter, along "
    "others leave that to the partitioner"
)


def needs_pending(found: Placeholder, mesh: DeviceMesh) -> bool:
    """Whether a typed annotation is of a partial sum, and nothing else will do."""
    if found.config.get("on_conflict") == OnConflict.REDUCE.value:
        return False
    written = [found.config.get("before"), found.config["sharding"]]
    return any(Sharding.parse(mesh, one).unreduced for one in written if one)


def refuse_in_regions(main: ir.Operation, mesh: DeviceMesh, blame: Blame) -> None:
    """Refuses what `needs_pending` in a manual region.

    Raises:
      LoweringError: there is such an annotation.
    """
    manual: set[ir.Value] = set()
    for op in walk(main):
        found = placeholder_of(op)
        if found is not None and found.kind == OUT_OF_MANUAL:
            continue
        is_typed = found is not None and found.kind in (TYPED, RESHARD)
        inside = bool(manual) and not manual.isdisjoint(operands_of(op))
        if inside and is_typed and needs_pending(found, mesh):
            raise blame.error(op, f"needs a partial sum, and {RULE}: {REMEDY}")
        if inside or (found is not None and not is_typed):
            manual.update(op.results)
            for region in op.regions:
                manual.update(region.blocks[0].arguments)
