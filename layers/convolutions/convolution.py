"""Convolutions whose alignment does not depend on the length, and that ignore padding.

Dims: B batch, S sequence, T time before subsampling, F frequency, K window, M model,
C channels.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import (
    BSM,
    add_bias,
    apply_weight,
    check_trailing_dims,
    contract,
    per_feature,
)
from meshwright.layers.basic.masks import zero_padding

BTFC = ("batch", "time", "frequency", "channels")

# Explicit, as TF's gradient of a 3-D convolution run eagerly has no default.
_FORMATS = {1: "NWC", 2: "NHWC", 3: "NDHWC"}


@gin.constants_from_enum
class Padding(enum.Enum):
    """Whether windows reach beyond the ends, where they read zeros."""

    SAME = "same"
    VALID = "valid"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution(Layer):
    """A convolution over any number of window dims.

    From n positions it makes ceil(n / stride): the i-th reads a window that begins
    (window - stride) // 2 before position i * stride, and zeros beyond the ends. Where
    the stride divides n that is TF's SAME; elsewhere SAME shifts with n, so that a
    frame's result would depend on the padding after it.

    Args:
      in_channels: channels of the input.
      channels: C of the output.
      window: positions that the window covers along each window dim.
      strides: steps along each window dim, from 1 to the window.
      padding: `SAME` as above; `VALID` makes positions only where windows fit entirely.
      use_bias: adds a bias to each channel.

    Raises:
      ValueError: the strides are not as many as the windows, or out of range.
    """

    in_channels: int = bounded(at_least=1)
    channels: int = bounded(at_least=1)
    window: Sequence[int]
    strides: Sequence[int]
    padding: Padding = Padding.SAME
    use_bias: bool = True

    def __post_init__(self):
        super().__post_init__()
        window, strides = tuple(self.window), tuple(self.strides)
        fits = [1 <= s <= k for s, k in zip(strides, window, strict=False)]
        if len(window) != len(strides) or not all(fits):
            raise ValueError(
                f"Convolution.strides is {strides} for a window of {window}: give each "
                "dim of the window a stride from 1 to its size"
            )

    def weights(self) -> NestedMap:
        rank = len(self.window)
        kernel = WeightSpec(
            shape=(*self.window, self.in_channels, self.channels),
            dims=(*["window"] * rank, "in_channels", "channels"),
            initializer=FanIn(in_dims=rank + 1),
        )
        specs = NestedMap(kernel=kernel)
        if self.use_bias:
            specs.bias = per_feature(self.channels)
        return specs

    def fprop(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, *beside: tf.Tensor
    ) -> tf.Tensor:
        """Convolves `x` [B, ..., in_channels] to [B, ..., C], activation dtype.

        The tensors `beside` count as further channels, after those of `x`. Each is
        convolved by its part of the kernel, and the sums are added: the tensor of all
        channels, which the backward pass would keep, is never made.

        Raises:
          ValueError: `x` has other dims, or not the remaining number of channels.
        """
        sizes = [tensor.shape[-1] for tensor in beside]
        channels = self.in_channels - sum(sizes)
        check_window_dims(ctx, x, self.window, channels)
        kernel = theta.kernel if ctx.widens_gradients else ctx.cast(theta.kernel)
        kernels = tf.split(kernel, [channels, *sizes], axis=-2)
        pairs = zip((x, *beside), kernels, strict=True)
        y = tf.add_n([apply_weight(ctx, self._convolved, *pair) for pair in pairs])
        return add_bias(ctx, y, theta.bias) if self.use_bias else y

    def _convolved(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        padding = self.padding.name
        steps = zip(x.shape[1:-1], self.strides, strict=True)
        if self.padding is Padding.SAME and any(n % stride for n, stride in steps):
            # Elsewhere the convolution pads: separate padding is a tensor that XLA's
            # partitioner splits anew, with two more exchanges.
            ends = zip(self.window, self.strides, strict=True)
            before = [(size - stride) // 2 for size, stride in ends]
            after = [k - 1 - b for k, b in zip(self.window, before, strict=True)]
            x = tf.pad(x, [(0, 0), *zip(before, after, strict=True), (0, 0)])
            padding = "VALID"
        return tf.nn.convolution(
            x,
            kernel,
            strides=list(self.strides),
            padding=padding,
            data_format=_FORMATS[x.shape.rank - 2],
        )

    def flops(self, size: Sequence[int]) -> float:
        """FLOPs of the kernel, forward, for a result of that size."""
        per_place = math.prod(self.window) * self.in_channels * self.channels
        return 2.0 * math.prod(size) * per_place


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedConvolution(Layer):
    """Makes each position a window: n positions become n * window.

    Args:
      in_channels: channels of the input.
      channels: C of the output.
      window: positions along each window dim.

    Raises:
      ValueError: a window is below 1.
    """

    in_channels: int = bounded(at_least=1)
    channels: int = bounded(at_least=1)
    window: Sequence[int]

    def __post_init__(self):
        super().__post_init__()
        if not self.window or min(self.window) < 1:
            raise ValueError(
                f"TransposedConvolution.window is {self.window}: give each dim of it "
                "a size of 1 or more"
            )

    def weights(self) -> NestedMap:
        rank = len(self.window)
        # Each output sees one position: the fan is the input's channels.
        kernel = WeightSpec(
            shape=(self.in_channels, *self.window, self.channels),
            dims=("in_channels", *["window"] * rank, "channels"),
            initializer=FanIn(),
        )
        return NestedMap(kernel=kernel, bias=per_feature(self.channels))

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """`x` [B, ..., in_channels] to [B, ..., C], activation dtype.

        Raises:
          ValueError: `x` has other dims.
        """
        check_window_dims(ctx, x, self.window, self.in_channels)
        rank = len(self.window)
        order = [*range(1, rank + 1), rank + 1, 0]
        sizes = [n * k for n, k in zip(x.shape[1:-1], self.window, strict=True)]

        def convolved(x, kernel):
            return tf.nn.conv_transpose(
                x,
                tf.transpose(kernel, order),
                [shape_of(x)[0], *sizes, self.channels],
                strides=list(self.window),
                padding="VALID",
                data_format=_FORMATS[rank],
            )

        y = apply_weight(ctx, convolved, x, theta.kernel)
        return add_bias(ctx, y, theta.bias)

    def flops(self, size: Sequence[int]) -> float:
        """FLOPs of the kernel, forward, for a result of that size."""
        return 2.0 * math.prod(size) * self.in_channels * self.channels


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvSubsampling(Layer):
    """Two convolutions that quarter time and frequency, and a projection to M.

    A front for the Conformer (Gulati et al. 2020, section 2): each is 3 x 3 of stride 2
    with ReLU. Padded frames do not affect real frames. A frame sees six spectra ahead,
    even if the layers after it are causal.

    Args:
      num_bins: F, of the log-mel spectrum.
      channels: C.
      model_dims: M.

    Raises:
      ValueError: a size is below 1.
    """

    num_bins: int = bounded(at_least=1)
    channels: int = bounded(at_least=1)
    model_dims: int = bounded(at_least=1)

    def weights(self) -> NestedMap:
        bins = _halved(_halved(self.num_bins))
        w_out = WeightSpec(
            shape=(bins, self.channels, self.model_dims),
            dims=("frequency", "channels", "model"),
            initializer=FanIn(in_dims=2),
        )
        parts = {name: part.weights() for name, part in self._parts()}
        return NestedMap(parts, w_out=w_out, b_out=per_feature(self.model_dims))

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> NestedMap:
        """Subsamples a spectrum.

        Args:
          ctx: context.
          theta: weights.
          x: [B, T, F].
          mask: bool [B, T], True at real frames; None: all are.

        Returns:
          `x`: [B, S, M] in the activation dtype, S being T / 4 rounded up twice; and
          `mask`: bool [B, S], if a mask was given.

        Raises:
          ValueError: `x` has not F bins; the mask is not bool or does not fit.
        """
        check_trailing_dims(ctx, x, [self.num_bins])
        y = ctx.cast(x)[..., None]
        for name, part in self._parts():
            # Between the convolutions too: a bias makes padding non-zero.
            y = zero_padding(ctx, y, mask)
            with ctx.scope(name) as c:
                y = tf.nn.relu(part.fprop(c, theta[name], y))
            y = ctx.split(y, BTFC)
            mask = None if mask is None else mask[:, ::2]
        y = contract(ctx, y, theta.w_out, dims=2)
        y = ctx.split(add_bias(ctx, y, theta.b_out), BSM)
        return NestedMap(x=y) if mask is None else NestedMap(x=y, mask=mask)

    def extra_flops(self, sequence_length: int) -> float:
        """FLOPs of kernels, which each of the S frames uses at many places."""
        half = _halved(self.num_bins)
        places = {"first": 2 * half, "second": _halved(half)}
        sizes = {
            name: math.prod(part.weights().kernel.shape) for name, part in self._parts()
        }
        return sum(2.0 * (places[name] - 1) * size for name, size in sizes.items())

    def _parts(self) -> list[tuple[str, Convolution]]:
        """The convolutions by name, in order."""
        window = {"window": (3, 3), "strides": (2, 2), "channels": self.channels}
        return [
            ("first", Convolution(in_channels=1, **window)),
            ("second", Convolution(in_channels=self.channels, **window)),
        ]


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthwiseConv1D(Layer):
    """Convolves each feature over time with its own kernel, without a bias.

    It is a sum of shifted products: XLA fuses it on all devices, partitions it like
    elementwise ops, and pads a split sequence by its neighbours' ends.

    Args:
      model_dims: M.
      window: K frames; odd, unless `is_causal`.
      is_causal: a frame sees itself and the K - 1 frames before it; else as many before
        it as after it.

    Raises:
      ValueError: the window is below 1, or even and not causal.
    """

    model_dims: int = bounded(at_least=1)
    window: int = bounded(at_least=1)
    is_causal: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not self.is_causal and self.window % 2 == 0:
            raise ValueError(
                f"DepthwiseConv1D.window is {self.window}, which has no middle: make "
                "it odd, or the convolution causal"
            )

    def weights(self) -> NestedMap:
        # Not split like the dim that it multiplies: see `per_feature`.
        kernel = WeightSpec(
            shape=(self.window, self.model_dims),
            dims=("window", "features"),
            initializer=FanIn(),
        )
        return NestedMap(kernel=kernel)

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Convolves `x` [B, S, M]; same shape, activation dtype, float32 sums.

        `mask` is bool [B, S], True at real frames: others count as zeros.

        Raises:
          ValueError: the last dim of `x` is not M; the mask is not bool or does not
            fit.
        """
        check_trailing_dims(ctx, x, [self.model_dims])
        x = zero_padding(ctx, ctx.cast(x), mask)
        before = self.window - 1 if self.is_causal else self.window // 2
        convolve = _depthwise(before, self.window - 1 - before)
        return convolve(x, tf.cast(theta.kernel, tf.float32))


def check_window_dims(
    ctx: Context, x: tf.Tensor, window: Sequence[int], channels: int
) -> None:
    """Raises ValueError, naming the layer, unless `x` is [B, window dims..., C]."""
    check_trailing_dims(ctx, x, [channels])
    if x.shape.rank != len(window) + 2:
        raise ValueError(
            f"layer {ctx.path!r} has windows of {len(window)} dims but was given "
            f"{x.shape}: give it [batch, those dims, channels]"
        )


def _halved(size: int) -> int:
    return -(-size // 2)


def _depthwise(before: int, after: int):
    """(x [B, S, M], float32 kernel [K, M]) -> like x; windows begin `before` before."""

    @tf.custom_gradient
    def convolve(x: tf.Tensor, kernel: tf.Tensor):
        # TF's own gradient would keep each shifted copy of x for the kernel's.
        def gradient(dy: tf.Tensor):
            dx = _sum_of_shifts(dy, kernel[::-1], after, before)
            dy = tf.cast(dy, tf.float32)
            products = [dy * term for term in _shifts(x, before, after)]
            return dx, tf.stack([tf.reduce_sum(term, axis=[0, 1]) for term in products])

        return _sum_of_shifts(x, kernel, before, after), gradient

    return convolve


def _sum_of_shifts(x, kernel, before: int, after: int) -> tf.Tensor:
    taps = zip(_shifts(x, before, after), tf.unstack(kernel), strict=True)
    return tf.cast(tf.add_n([shifted * tap for shifted, tap in taps]), x.dtype)


def _shifts(x: tf.Tensor, before: int, after: int) -> list[tf.Tensor]:
    """float32 `x` [B, S, M] moved by `before` frames later, ..., `after` earlier."""
    wide = tf.pad(tf.cast(x, tf.float32), [(0, 0), (before, after), (0, 0)])
    return [wide[:, k : k + x.shape[1]] for k in range(before + after + 1)]
