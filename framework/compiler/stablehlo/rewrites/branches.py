"""Results of branches in Shardy's manual regions, which all branches must split alike.

Elsewhere XLA reshards the result of a branch that is annotated differently. In a manual
region its verifier refuses the program (jaxlib 0.10.2, "Inconsistent conditional
sharding"), unless another value comes between the annotation and the branch's end.
"""

from __future__ import annotations

import dataclasses

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.stablehlo.constraints import sdy_attribute
from meshwright.framework.compiler.stablehlo.shardy.propagation import manual_axes
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    shape_of,
    walk,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


def open_results_in_regions(module: ir.Operation, mesh: DeviceMesh) -> None:
    """Puts an annotation with open dims after each result of a branch.

    Args:
      module: changed in place; its annotations and regions are Shardy's.
      mesh: the program's mesh.
    """
    for op in list(walk(module)):
        if op.name not in BRANCHES or not manual_axes(op):
            continue
        for region in op.regions:
            end = list(region.blocks[0].operations)[-1].operation
            for number, value in enumerate(end.operands):
                rank = len(shape_of(value))
                sharding = dataclasses.replace(
                    Sharding.replicated(mesh, rank), unspecified=tuple(range(rank))
                )
                with ir.InsertionPoint(end), end.location:
                    kept = sdy.ShardingConstraintOp(
                        value, sdy_attribute(sharding, mesh)
                    )
                end.operands[number] = kept.result
