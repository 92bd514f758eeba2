"""Windows that move along dims, and how far a device's reach beyond its shard."""

from __future__ import annotations

import dataclasses

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.conv_rewrite import CONVOLUTION
from meshwright.framework.compiler.repair.op_layout import OpLayout
from meshwright.framework.compiler.stable_hlo import shape_of

REDUCE_WINDOW = "stablehlo.reduce_window"
SELECT_AND_SCATTER = "stablehlo.select_and_scatter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A window along one dim of an image.

    Args:
      dim: of the operand.
      out_dim: of the result.
      image, out: sizes of both.
      size: of the window, dilated.
      stride: of the window.
      dilation: of the window.
      base_dilation: of the image.
      low: padding before the image.
    """

    dim: int
    out_dim: int
    image: int
    out: int
    size: int
    stride: int
    dilation: int
    base_dilation: int
    low: int

    @property
    def moves(self) -> bool:
        """Whether a result's element reads another row than its own."""
        plain = self.size == self.stride == self.base_dilation == 1
        return not (plain and self.low == 0 and self.image == self.out)

    def is_far(self, shards: int) -> bool:
        """Whether a device needs rows from beyond its neighbours."""
        ours = -(-self.image // shards) * self.base_dilation
        theirs = -(-self.out // shards)
        for place in range(shards):
            first = place * theirs * self.stride - self.low
            last = ((place + 1) * theirs - 1) * self.stride + self.size - self.low
            if place * ours - first > ours or last - (place + 1) * ours > ours:
                return True
            # A shard may also lie beyond all that its device's results read.
            if first >= (place + 1) * ours or last <= place * ours:
                return True
        return False


def windows_of(op) -> list[Window]:
    """The windows of a convolution, of a pooling or of its gradient."""
    image, out = shape_of(op.operands[0]), shape_of(op.results[0])
    if op.name == CONVOLUTION:
        numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        dims = list(numbers.input_spatial_dimensions)
        out_dims = list(numbers.output_spatial_dimensions)
        kernel = shape_of(op.operands[1])
        sizes = [kernel[dim] for dim in numbers.kernel_spatial_dimensions]
        base, dilation = (
            _listed(op, "lhs_dilation", dims),
            _listed(op, "rhs_dilation", dims),
        )
    else:
        dims = out_dims = list(range(len(image)))
        sizes = (
            list(op.attributes["window_dimensions"])
            if ("window_dimensions" in op.attributes)
            else [1] * len(dims)
        )
        base = _listed(op, "base_dilations", dims)
        dilation = _listed(op, "window_dilations", dims)
    strides, low = _listed(op, "window_strides", dims), _low(op, len(dims))
    return [
        Window(
            dim=dims[i],
            out_dim=out_dims[i],
            image=image[dims[i]],
            out=out[out_dims[i]],
            size=(sizes[i] - 1) * dilation[i] + 1,
            stride=strides[i],
            dilation=dilation[i],
            base_dilation=base[i],
            low=low[i],
        )
        for i in range(len(dims))
    ]


def _listed(op, name: str, dims: list[int]) -> list[int]:
    return list(op.attributes[name]) if name in op.attributes else [1] * len(dims)


def _low(op, rank: int) -> list[int]:
    if "padding" not in op.attributes:
        return [0] * rank
    return [int(n) for n in ir.DenseIntElementsAttr(op.attributes["padding"])][::2]


def split_windows(layout: OpLayout) -> list[tuple[Window, int]]:
    """The windows that move along a split dim, and into how many shards it is split.

    Of the image or of the result, whichever has more.
    """
    image, out = layout.operands[0], layout.results[0]
    found = []
    for window in windows_of(layout.op):
        shards = max(
            tensor.sharding.splits()[dim] if tensor.sharding else 1
            for tensor, dim in ((image, window.dim), (out, window.out_dim))
        )
        if shards > 1 and window.moves:
            found.append((window, shards))
    return found
