"""Refuses unreduced sums in manual regions, where each device has its own tensors."""

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


def needs_partial_sum(placeholder: Placeholder, mesh: DeviceMesh) -> bool:
    """Whether a typed annotation requires a partial sum."""
    if placeholder.config.get("on_conflict") == OnConflict.REDUCE.value:
        return False
    written = [placeholder.config.get("before"), placeholder.config["sharding"]]
    return any(Sharding.parse(mesh, text).unreduced for text in written if text)


def refuse_in_regions(main: ir.Operation, mesh: DeviceMesh, blame: Blame) -> None:
    """Refuses annotations that `needs_partial_sum` is true for in a manual region.

    Raises:
      LoweringError: there is such an annotation.
    """
    manual: set[ir.Value] = set()
    for op in walk(main):
        placeholder = placeholder_of(op)
        if placeholder is not None and placeholder.kind == OUT_OF_MANUAL:
            continue
        is_typed = placeholder is not None and placeholder.kind in (TYPED, RESHARD)
        inside = bool(manual) and not manual.isdisjoint(operands_of(op))
        if inside and is_typed and needs_partial_sum(placeholder, mesh):
            raise blame.error(op, f"needs a partial sum, and {RULE}: {REMEDY}")
        if inside or (placeholder is not None and not is_typed):
            manual.update(op.results)
            for region in op.regions:
                manual.update(region.blocks[0].arguments)
