"""Windows that move along dims, and how far they reach beyond a device's shard."""

from __future__ import annotations

import dataclasses

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.convolutions.conv_rewrite import CONVOLUTION
from meshwright.framework.compiler.repair.op_layout import OpLayout
from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of

REDUCE_WINDOW = "stablehlo.reduce_window"
SELECT_AND_SCATTER = "stablehlo.select_and_scatter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A window along one dim of an image.

    Args:
      dim: the dim of the image.
      out_dim: the dim of the windows' result, which a gradient has as an operand.
      image, out: the sizes of both dims.
      size: the size of the window, dilated.
      stride: the stride of the window.
      dilation: the dilation of the window.
      base_dilation: the dilation of the image.
      low: the padding before the image.
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
        """Whether an element of the result reads a row other than its own."""
        plain = self.size == self.stride == self.base_dilation == 1
        return not (plain and self.low == 0 and self.image == self.out)

    @property
    def last(self) -> int:
        """The row where the last window starts."""
        return (self.out - 1) * self.stride - self.low

    @property
    def reads_padding_alone(self) -> bool:
        """Whether the first or the last window has no row of the image."""
        return self.size <= self.low or self.last >= self.image

    def rows_read(self, shards: int) -> int:
        """How many rows the windows of a device's results reach over."""
        return (-(-self.out // shards) - 1) * self.stride + self.size

    def is_far(self, shards: int) -> bool:
        """Whether a device needs rows from beyond its neighbours."""
        image_shard = -(-self.image // shards) * self.base_dilation
        out_shard = -(-self.out // shards)
        for shard in range(shards):
            first = shard * out_shard * self.stride - self.low
            last = ((shard + 1) * out_shard - 1) * self.stride + self.size - self.low
            if (
                shard * image_shard - first > image_shard
                or last - (shard + 1) * image_shard > image_shard
            ):
                return True
            # A shard may also be beyond all rows that its device's results read.
            if first >= (shard + 1) * image_shard or last <= shard * image_shard:
                return True
        return False


def windows_of(op) -> list[Window]:
    """The windows of a convolution, of a pooling or of its gradient."""
    of_gradient = op.name == SELECT_AND_SCATTER
    image = shape_of(op.operands[0])
    out = shape_of(op.operands[1] if of_gradient else op.results[0])
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
        sizes = _listed(op, "window_dimensions", dims)
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
    """The windows that move along a split dim, and the number of its shards.

    The dim is that of the image or of the result, whichever has more shards. Where mesh
    axes cannot express a sharding, there may be as many shards as devices.
    """
    unknown = any(tensor.sharding is None for tensor in layout.tensors)
    split = []
    for window in windows_of(layout.op):
        shards = layout.mesh.axes_size(window_axes(layout, window))
        shards = layout.mesh.size if unknown else shards
        if shards > 1 and window.moves:
            split.append((window, shards))
    return split


def window_axes(layout: OpLayout, window: Window) -> tuple[str, ...]:
    """The axes that split a window's dim, in the tensor with the most shards."""
    image, out = layout.operands[0], layout.results[0]
    both = image.axes(window.dim), out.axes(window.out_dim)
    return max(both, key=layout.mesh.axes_size)
