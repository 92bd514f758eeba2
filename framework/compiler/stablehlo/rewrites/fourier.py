"""Fourier transforms, kept in the only order of elements that XLA's CPU backend takes.

Otherwise a transform's result takes the order that its reader prefers, such as a
reshard that exchanges dims, and the backend refuses the program (jaxlib 0.10.2,
"RET_CHECK ... fft_thunk.cc"). XLA replicates the LayoutConstraint and, outside of
manual regions, the transform before it. In a region it reshards between them, so the
transform is annotated there as replicated.
"""

from __future__ import annotations

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.stablehlo.constraints import sdy_attribute
from meshwright.framework.compiler.stablehlo.shardy.propagation import manual_axes
from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of, walk
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


def keep_row_major(module: ir.Operation) -> None:
    """Requests the results of Fourier transforms in row-major order."""
    for op in list(walk(module)):
        if op.name == "stablehlo.fft":
            with ir.InsertionPoint.after(op), op.location:
                kept = _in_row_major(op.results[0])
            op.results[0].replace_all_uses_except(kept.results[0], kept.operation)


def replicate_in_regions(module: ir.Operation, mesh: DeviceMesh) -> None:
    """Annotates the results of transforms in Shardy's manual regions as replicated.

    Args:
      module: changed in place; its annotations and regions are Shardy's.
      mesh: the program's mesh.
    """
    for op in list(walk(module)):
        if op.name != "stablehlo.fft" or not manual_axes(op):
            continue
        result = op.results[0]
        sharding = Sharding.replicated(mesh, len(shape_of(result)))
        with ir.InsertionPoint.after(op), op.location:
            kept = sdy.ShardingConstraintOp(result, sdy_attribute(sharding, mesh))
        result.replace_all_uses_except(kept.result, kept.operation)


def _in_row_major(value):
    rank = len(shape_of(value))
    order = f"dense<[{', '.join(map(str, reversed(range(rank))))}]>"
    layouts = ir.ArrayAttr.get([ir.Attribute.parse(f"{order} : tensor<{rank}xindex>")])
    return stablehlo.CustomCallOp(
        [value.type],
        [value],
        call_target_name="LayoutConstraint",
        backend_config=ir.StringAttr.get(""),
        operand_layouts=layouts,
        result_layouts=layouts,
    )
