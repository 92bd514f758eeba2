"""Convolutions over an image that is cropped on one side and padded on the other.

Their padding is negative on one side of a dim, as in a gradient where padding was as
large as the kernel. XLA's CPU backend then reads beyond the image, on one device too,
and the numbers are whatever is in memory there (jaxlib 0.10.2).
"""

from __future__ import annotations

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import rows_of, shape_of, walk


def crop_images(module: ir.Operation) -> None:
    """Slices the images of such convolutions, which then only pad them."""
    for op in walk(module):
        if op.name == "stablehlo.convolution" and "padding" in op.attributes:
            _crop(op)


def _crop(op) -> None:
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    dims = numbers.input_spatial_dimensions
    attribute = ir.DenseIntElementsAttr(op.attributes["padding"])
    padding = np.array(list(attribute), np.int64).reshape(len(dims), 2)
    holes = [1] * len(dims)
    if "lhs_dilation" in op.attributes:
        holes = list(op.attributes["lhs_dilation"])
    for dim, hole, pads in zip(dims, holes, padding, strict=True):
        size = shape_of(op.operands[0])[dim]
        low, high = (-min(pad, 0) for pad in pads)
        cut = -(-low // hole), -(-high // hole)
        if min(pads) < 0 < max(pads) and sum(cut) < size:
            with ir.InsertionPoint(op), op.location:
                op.operands[0] = rows_of(op.operands[0], dim, cut[0], size - cut[1])
            pads += np.array(cut) * hole
    op.attributes["padding"] = ir.DenseIntElementsAttr.get(padding)
