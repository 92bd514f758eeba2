"""Fourier transforms, kept in the only order of elements that XLA's CPU backend takes.

A transform's result otherwise takes the order that its reader would like, as a reshard
does that exchanges dims, and the backend refuses the program (jaxlib 0.10.2, "RET_CHECK
... fft_thunk.cc").
"""

from __future__ import annotations

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of, walk


def keep_row_major(module: ir.Module) -> None:
    """Asks for the results of Fourier transforms in row-major order."""
    for op in list(walk(module.operation)):
        if op.name == "stablehlo.fft":
            result = op.results[0]
            dims = reversed(range(len(shape_of(result))))
            order = f"dense<[{', '.join(map(str, dims))}]>"
            index = f"tensor<{len(shape_of(result))}xindex>"
            layouts = ir.ArrayAttr.get([ir.Attribute.parse(f"{order} : {index}")])
            with ir.InsertionPoint.after(op), op.location:
                kept = stablehlo.CustomCallOp(
                    [result.type],
                    [result],
                    call_target_name="LayoutConstraint",
                    backend_config=ir.StringAttr.get(""),
                    operand_layouts=layouts,
                    result_layouts=layouts,
                )
            result.replace_all_uses_except(kept.results[0], kept.operation)
