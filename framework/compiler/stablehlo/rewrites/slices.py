"""Slices that XLA's partitioner gets wrong, written differently."""

from __future__ import annotations

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import walk


def drop_noop_strides(module: ir.Operation) -> None:
    """Gives slices a step of 1 along dims of which they take a single element.

    The step has no effect there, but where the dim is split the partitioner counts by
    the step and takes another element (jaxlib 0.10.2).
    """
    for op in walk(module):
        if op.name == "stablehlo.slice":
            starts = list(op.attributes["start_indices"])
            limits = list(op.attributes["limit_indices"])
            steps = list(op.attributes["strides"])
            shape = ir.RankedTensorType(op.results[0].type).shape
            for dim, size in enumerate(shape):
                if size == 1 and steps[dim] > 1:
                    limits[dim], steps[dim] = starts[dim] + 1, 1
            op.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits)
            op.attributes["strides"] = ir.DenseI64ArrayAttr.get(steps)
