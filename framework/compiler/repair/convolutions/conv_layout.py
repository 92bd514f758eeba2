"""How a convolution may be sharded so that XLA's partitioner gets it right.

Where both operands are split and so is a window dim (or channels are in groups), the
partitioner lets each device convolve its shards, and adds the results up over all
devices that it sees. Devices that hold the same shards are counted twice: the result
is right only if every axis splits both operands, and the same dims of them (jaxlib
0.10.2; it is `PartitionConvolutionWithSpatialDimensionHaloExchangeOnLHS` that adds).
Here such a convolution is given a layout of this kind, starting from its tensors'
shardings: axes that cannot take part go into a manual region around it, in which the
partitioner does not see them.
"""

from __future__ import annotations

import dataclasses
import math

from meshwright.framework.compiler.repair.op_layout import FactorKind, OpLayout
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

Dims = tuple[tuple[str, ...], ...]


def joined(manual: Dims, auto: Dims) -> Dims:
    """The axes that split a tensor's dims outside of a region, manual axes first."""
    return tuple(a + b for a, b in zip(manual, auto, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution's shapes, and the roles of their dims.

    Args:
      lhs, rhs, out: shapes of image, kernel and result.
      lhs_batch, lhs_feature, lhs_window: dims of the image; in a kernel's gradient the
        batch is the features of the forward convolution, and the features are its
        batch.
      rhs_in, rhs_out, rhs_window: dims of the kernel.
      out_batch, out_feature, out_window: dims of the result.
      moves: for each window dim, whether the window moves along it; if not, it is a dim
        of a matrix product.
      feature_groups, batch_groups: the number of groups that channels, or the batch,
        are split into; 1 if they are not.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    lhs_batch: int
    lhs_feature: int
    lhs_window: tuple[int, ...]
    rhs_in: int
    rhs_out: int
    rhs_window: tuple[int, ...]
    out_batch: int
    out_feature: int
    out_window: tuple[int, ...]
    moves: tuple[bool, ...]
    feature_groups: int = 1
    batch_groups: int = 1

    @property
    def groups(self) -> int:
        return self.feature_groups * self.batch_groups

    @property
    def lhs_channels(self) -> int:
        """The dim of the image that is in groups, if there are groups."""
        return self.lhs_batch if self.batch_groups > 1 else self.lhs_feature

    @property
    def is_kernel_gradient(self) -> bool:
        """Whether the kernel is an image too: larger than the result.

        Only a kernel's gradient has groups of the batch.
        """

        def size(shape, dims):
            return math.prod(shape[dim] for dim in dims)

        window = size(self.rhs, self.rhs_window)
        return self.batch_groups > 1 or window > size(self.out, self.out_window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout that a convolution is to have.

    Args:
      manual: axes of the region around it; () for none.
      lhs, rhs: axes that split the operands' dims, the partitioner's part.
      out: the same for the result; None to leave it to propagation.
      manual_lhs, manual_rhs, manual_out: the manual axes that split them.
      groups: the number of groups in a device's part of the channels.
    """

    manual: tuple[str, ...]
    lhs: Dims
    rhs: Dims
    out: Dims | None
    manual_lhs: Dims
    manual_rhs: Dims
    manual_out: Dims
    groups: int


def layout(
    conv: Convolution,
    mesh: DeviceMesh,
    lhs: Sharding | None,
    rhs: Sharding | None,
    out: Sharding | None,
) -> Layout | None:
    """A right layout near the completed one, None if XLA gets that one right and keeps
    the batch split where channels are in groups.

    Args:
      conv: the convolution.
      mesh: the program's mesh.
      lhs, rhs, out: its operands' and its result's shardings; None for a sharding that
        axes of the mesh cannot express.
    """
    known = [
        sharding or Sharding.replicated(mesh, len(conv.lhs))
        for sharding in (lhs, rhs, out)
    ]
    right = None not in (lhs, rhs, out) and _is_right(conv, *known)
    if right and not _gathers_batch(conv, *known):
        return None
    return _Choice(conv, *known).layout()


def _is_right(conv: Convolution, lhs: Sharding, rhs: Sharding, out: Sharding) -> bool:
    """Whether XLA adds up nothing, or as for a matrix product."""
    if not (_is_split(lhs) and _is_split(rhs)):
        channels = lhs.dims[conv.lhs_channels]
        agree = channels == rhs.dims[conv.rhs_out] == out.dims[conv.out_feature]
        # With channels in groups XLA may end the process at a kernel that is split
        # alone, or, in the gradient of a kernel, at features that are.
        alone = _is_split(rhs) or (conv.batch_groups > 1 and out.dims[conv.out_batch])
        return conv.groups == 1 or (agree and not alone)
    return conv.groups == 1 and not _splits_window(conv, lhs, rhs, out)


def _gathers_batch(
    conv: Convolution, lhs: Sharding, rhs: Sharding, out: Sharding
) -> bool:
    """Whether XLA gathers a batch although each device could convolve its part.

    XLA does so for channels in groups of several (openxla/xla issue 47945).
    """
    axes, count = lhs.dims[conv.lhs_batch], lhs.splits()[conv.lhs_batch]
    only_batch = count == math.prod(lhs.splits()) and not _is_split(rhs)
    return (
        1 < conv.feature_groups < conv.lhs[conv.lhs_feature]
        and any(conv.moves)
        and only_batch
        and count > 1
        and conv.lhs[conv.lhs_batch] % count == 0
        and out.dims[conv.out_batch] == axes
        and not lhs.manual
    )


def as_product(conv: Convolution, layout: OpLayout) -> OpLayout | None:
    """The convolution's layout by the factors of a matrix product.

    XLA partitions it as a product where channels are in no groups, and no dim is split
    along which a window moves. A dim that a single window covers is summed over, which
    Shardy's rule for the operation does not say.

    Returns:
      None if XLA does not take the convolution for a product.
    """
    known = None not in layout.shardings
    if conv.groups > 1 or (
        _splits_window(conv, *layout.shardings) if known else any(conv.moves)
    ):
        return None
    summed, parallel = FactorKind.REDUCED, FactorKind.PARALLEL
    factors = {
        (conv.lhs_batch, None, conv.out_batch): parallel,
        (None, conv.rhs_out, conv.out_feature): parallel,
        (conv.lhs_feature, conv.rhs_in, None): summed,
    }
    windows = zip(conv.lhs_window, conv.rhs_window, conv.out_window, strict=True)
    for (image, kernel, result), moves in zip(windows, conv.moves, strict=True):
        if not moves and conv.rhs[kernel] > 1:
            factors[image, kernel, None] = summed
        elif not moves:
            factors[image, None, result] = parallel
    tensors = [
        dataclasses.replace(
            tensor,
            factors=tuple(
                next((i for i, dims in enumerate(factors) if dims[which] == dim), None)
                for dim in range(len(tensor.shape))
            ),
        )
        for which, tensor in enumerate(layout.tensors)
    ]
    kinds = tuple(factors.values())
    return dataclasses.replace(
        layout, operands=tuple(tensors[:2]), results=(tensors[2],), kinds=kinds
    )


def _is_split(sharding: Sharding) -> bool:
    return any(n > 1 for n in sharding.splits())


def _splits_window(
    conv: Convolution, lhs: Sharding, rhs: Sharding, out: Sharding
) -> bool:
    windows = ((lhs, conv.lhs_window), (rhs, conv.rhs_window), (out, conv.out_window))
    return any(
        moves and sharding.splits()[dim] > 1
        for sharding, dims in windows
        for dim, moves in zip(dims, conv.moves, strict=True)
    )


class _Choice:
    """Chooses for each axis the dims that it is to split, if any.

    Automatic axes split summed dims or window dims, of both operands alike; or, in a
    convolution that is no kernel's gradient, window dims of the image alone. Manual
    axes split dims that operands share with the result, where they divide them.
    """

    def __init__(self, conv: Convolution, lhs: Sharding, rhs: Sharding, out: Sharding):
        self.conv = conv
        self.mesh: DeviceMesh = lhs.mesh
        self.tensors = (lhs, rhs, out)
        rank = len(conv.lhs)
        self.auto = [[[] for _ in range(rank)] for _ in range(3)]
        self.kept = [[[] for _ in range(rank)] for _ in range(3)]

    def layout(self) -> Layout | None:
        """The layout, None if the tensors have it already."""
        automatic = []
        for axis in self._axes():
            if self._share(axis):
                automatic.append(axis)
            else:
                self._keep(axis)
        manual = tuple(
            axis
            for axis in self.mesh.axis_names
            if self.mesh.axis_size(axis) > 1
            and axis not in automatic
            and axis not in self.tensors[0].manual
        )
        operands = tuple(sharding.dims for sharding in self.tensors[:2])
        same = operands == tuple(_frozen(dims) for dims in self.auto[:2])
        if same and not manual and self._result_fits(automatic):
            return None
        channels = self.kept[0][self.conv.lhs_channels]
        lhs, rhs, out, *kept = (_frozen(dims) for dims in (*self.auto, *self.kept))
        return Layout(
            manual=manual,
            lhs=lhs,
            rhs=rhs,
            out=None if self._leaves_result() else out,
            manual_lhs=kept[0],
            manual_rhs=kept[1],
            manual_out=kept[2],
            groups=max(1, self.conv.groups // self.mesh.axes_size(channels)),
        )

    def _result_fits(self, automatic: list[str]) -> bool:
        """Whether axes of window dims split the same dim of the result, or none."""
        windows = self.conv.out_window
        for axis in automatic:
            at = self._dims(axis)[2]
            placed = next((dim for dim in windows if axis in self.auto[2][dim]), None)
            moved = at != placed and (placed is not None or at in windows)
            if self.conv.is_kernel_gradient:
                moved = not self._leaves_result()
            if at is not None and moved:
                return False
        return True

    def _leaves_result(self) -> bool:
        """Whether propagation may choose the result, as for a kernel's gradient.

        With channels in groups XLA cannot scatter a sum over window dims, and ends the
        process. It scatters along several axes only if they split a single dim and
        split an operand's dim likewise, in the same order.
        """
        adds_up = any(self.auto[0]) and self.conv.groups > 1
        return self.conv.is_kernel_gradient and not adds_up and self._scatters()

    def _scatters(self) -> bool:
        summed = [axes for axes in _frozen(self.auto[0]) if axes]
        out = self.tensors[2]
        to = [
            (axes, size)
            for axes, size in zip(out.dims, self.conv.out, strict=True)
            if any(axis in group for axis in axes for group in summed)
        ]
        if not to:
            return True
        axes, size = to[0]
        alike = len(axes) == 1 or axes in summed
        return len(to) == 1 and alike and size % self.mesh.axes_size(axes) == 0

    def _axes(self) -> list[str]:
        """The axes, sub-axes excepted, that split something, in the tensors' order."""
        axes_used = dict.fromkeys(
            axis for sharding in self.tensors for axes in sharding.dims for axis in axes
        )
        return [axis for axis in axes_used if axis in self.mesh.axis_names]

    def _dims(self, axis: str) -> list[int | None]:
        """The dim of each tensor that an axis splits."""
        return [
            next((dim for dim, axes in enumerate(sharding.dims) if axis in axes), None)
            for sharding in self.tensors
        ]

    def _share(self, axis: str) -> bool:
        """Makes an axis automatic, if it can split dims as such."""
        conv = self.conv
        lhs, rhs, _ = self._dims(axis)
        if conv.feature_groups == 1 and (
            lhs == conv.lhs_feature or (lhs is None and rhs == conv.rhs_in)
        ):
            return self._divide(self.auto, axis, conv.lhs_feature, conv.rhs_in, None)
        window = self._window(axis)
        if window is None:
            return False
        number, both = window
        image, kernel = conv.lhs_window[number], conv.rhs_window[number]
        windows = [
            window
            for other_axis in self._axes()
            if (window := self._window(other_axis))
        ]
        if not both and any(shared for _, shared in windows):
            return False  # XLA would add up over the devices along this axis too.
        # XLA gets some kernel gradients wrong whose image is split unevenly along a
        # window dim if another window dim is split too, if the kernel is larger than
        # the image there, or if some shards are empty.
        shards = self.mesh.axes_size([*self.auto[0][image], axis])
        delicate = both and (
            len(windows) > 1
            or conv.rhs[kernel] > conv.lhs[image]
            or _has_empty_shards(conv.rhs[kernel], shards)
            or _has_empty_shards(conv.lhs[image], shards)
        )
        return self._divide(
            self.auto,
            axis,
            image,
            kernel if both else None,
            None if both else conv.out_window[number],
            may_pad=not delicate,
        )

    def _window(self, axis: str) -> tuple[int, bool] | None:
        """The number of the window dim that an axis splits, and whether it is to split
        the kernel's too.
        """
        conv = self.conv
        lhs, rhs, out = self._dims(axis)
        windows = zip(conv.lhs_window, conv.rhs_window, conv.out_window, strict=True)
        for number, (image, kernel, result) in enumerate(windows):
            if (lhs, rhs) == (image, kernel):
                return number, True
            if conv.is_kernel_gradient:
                if lhs == image or (lhs is None and rhs == kernel):
                    return number, True
            elif lhs == image or (lhs is None and rhs is None and out == result):
                return number, False
        return None

    def _keep(self, axis: str) -> bool:
        """Lets an axis split dims as a manual axis, if it can."""
        conv = self.conv
        lhs, rhs, out = self._dims(axis)
        channels = (conv.lhs_channels, conv.rhs_out, conv.out_feature)
        if conv.groups > 1 and (
            lhs == channels[0]
            or (lhs is None and rhs == channels[1])
            or (lhs is None and rhs is None and out == channels[2])
        ):
            axes = [*self.kept[0][channels[0]], axis]
            return conv.groups % self.mesh.axes_size(axes) == 0 and self._divide(
                self.kept, axis, *channels
            )
        if conv.batch_groups == 1 and (
            lhs == conv.lhs_batch or (lhs is None and out == conv.out_batch)
        ):
            return self._divide(self.kept, axis, conv.lhs_batch, None, conv.out_batch)
        if conv.groups == 1 and (rhs == conv.rhs_out or out == conv.out_feature):
            return self._divide(self.kept, axis, None, conv.rhs_out, conv.out_feature)
        return False

    def _divide(
        self, dims: list, axis: str, *chosen: int | None, may_pad: bool = False
    ) -> bool:
        """Lets `axis` split the chosen dim of each tensor, if it divides all of them.

        With `may_pad` it is enough that there are no more shards than elements.
        """
        shapes = (self.conv.lhs, self.conv.rhs, self.conv.out)
        for divided, shape, dim in zip(dims, shapes, chosen, strict=True):
            if dim is not None:
                count = self.mesh.axes_size([*divided[dim], axis])
                if shape[dim] < count or (shape[dim] % count and not may_pad):
                    return False
        for divided, dim in zip(dims, chosen, strict=True):
            if dim is not None:
                divided[dim].append(axis)
        return True


def _has_empty_shards(size: int, shards: int) -> bool:
    """Whether the last shards of a dim are padding alone, as with 5 elements in 4."""
    return -(-size // shards) * (shards - 1) >= size


def _frozen(dims: list[list[str]]) -> Dims:
    return tuple(tuple(axes) for axes in dims)
