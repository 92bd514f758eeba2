"""The 3D U-Net: labels each voxel of a volume (Çiçek et al. 2016).

Dims: B batch, X Y Z the volume, C channels, K classes. Levels go from full resolution
down, each half the size of the level before. Nothing here says how tensors are split: a
split input is all that spatial partitioning needs (GSPMD 5.6).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.normalization import BatchNorm
from meshwright.layers.convolutions.convolution import (
    Convolution,
    Padding,
    TransposedConvolution,
    check_window_dims,
)

_HALF = (2, 2, 2)


@gin.constants_from_enum
class Upsampling(enum.Enum):
    """How a level becomes twice as fine: by trained kernels, or by repeating voxels."""

    TRANSPOSED = "transposed"
    NEAREST = "nearest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chain(Layer):
    """Convolutions one after the other, each normalized and rectified."""

    in_channels: int
    channels: tuple[int, ...]
    norm: Callable[..., Layer] | None
    window: int
    padding: Padding

    @property
    def shrinks(self) -> int:
        """The number of positions by which each convolution shortens each dim."""
        return self.window - 1 if self.padding is Padding.VALID else 0

    def weights(self) -> NestedMap:
        return NestedMap({name: part.weights() for name, part in self.parts.items()})

    def fprop(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, *beside: tf.Tensor
    ) -> tf.Tensor:
        for name, part in self.parts.items():
            with ctx.scope(name) as c:
                x, beside = part.fprop(c, theta[name], x, *beside), ()
            if name.startswith("norm") or self.norm is None:
                x = tf.nn.relu(x)
        return x

    def flops(self, size: Sequence[int]) -> float:
        """FLOPs of kernels, forward, for a result of size X, Y, Z."""
        convolutions = [p for p in self.parts.values() if isinstance(p, Convolution)]
        total = 0.0
        for later, convolution in enumerate(reversed(convolutions)):
            total += convolution.flops([n + self.shrinks * later for n in size])
        return total

    @functools.cached_property
    def parts(self) -> dict[str, Layer]:
        """Parts by name, in the order in which they run."""
        parts: dict[str, Layer] = {}
        ins = (self.in_channels, *self.channels)
        for i, channels in enumerate(self.channels):
            parts[f"convolution_{i}"] = Convolution(
                in_channels=ins[i],
                channels=channels,
                window=(self.window,) * 3,
                strides=(1, 1, 1),
                padding=self.padding,
                use_bias=self.norm is None,  # A norm has a bias, and cancels others.
            )
            if self.norm is not None:
                parts[f"norm_{i}"] = self.norm(model_dims=channels)
        return parts


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class UNet3D(Layer):
    """Convolves down a pyramid and back up, with skip connections at each level.

    A level is a chain of convolutions, each normalized and rectified. Going down, the
    maximum of each 2 x 2 x 2 voxels is the next level; going up, a level is made twice
    as fine, and the channels of the same level going down are put beside its own.

    Args:
      in_channels: channels of the volume.
      num_classes: K.
      analysis: the channels of each level's convolutions going down, full resolution
        first, such as ((32, 64), (64, 128), (128, 256), (256, 512)), the paper's.
      synthesis: the same going up, also full resolution first, and without the
        coarsest: ((64, 64), (128, 128), (256, 256)).
      norm: makes the norm after a convolution, from `model_dims`; None for none.
      window: side of the convolutions' windows, odd.
      upsampling: how a level becomes finer.
      padding: `SAME` labels every voxel, of any volume. `VALID`, as in the paper, has
        no zeros at the ends: each convolution takes its window less one off each dim,
        skip connections are cropped, and the middle is labelled (`labelled`).

    Raises:
      ValueError: levels do not match, or are empty; a window is even; a number is out
        of range.
    """

    in_channels: int = bounded(at_least=1)
    num_classes: int = bounded(at_least=2)
    analysis: Sequence[Sequence[int]]
    synthesis: Sequence[Sequence[int]]
    norm: Callable[..., Layer] | None = BatchNorm
    window: int = bounded(3, at_least=1)
    upsampling: Upsampling = Upsampling.TRANSPOSED
    padding: Padding = Padding.SAME

    def __post_init__(self):
        super().__post_init__()
        if self.window % 2 == 0:
            raise ValueError(f"UNet3D.window is {self.window}: make it 1, 3, 5 or so")
        for way in ("analysis", "synthesis"):
            levels = getattr(self, way)
            lists = all(isinstance(level, Sequence) for level in levels)
            if not lists or not all(level and min(level) >= 1 for level in levels):
                raise ValueError(
                    f"UNet3D.{way} is {levels}: give each level the channels of one or "
                    "more convolutions, 1 or more each, such as ((32, 64), (64, 128))"
                )
            object.__setattr__(self, way, tuple(map(tuple, levels)))
        if len(self.analysis) != len(self.synthesis) + 1:
            raise ValueError(
                f"UNet3D.analysis has {len(self.analysis)} levels and synthesis "
                f"{len(self.synthesis)}: give synthesis one less, as it begins above "
                "the coarsest"
            )
        for part in self.parts.values():
            part.weights()  # A wrong norm raises here, not when it runs.

    def weights(self) -> NestedMap:
        return NestedMap({name: part.weights() for name, part in self.parts.items()})

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits [B, X, Y, Z, K] of `x` [B, X, Y, Z, in_channels], activation dtype.

        With `VALID` padding the logits are those of the volume's `labelled` middle.

        Raises:
          ValueError: `x` has other dims; see `labelled`.
        """
        check_window_dims(ctx, x, _HALF, self.in_channels)
        self.labelled(x.shape[1:-1])
        x, parts, fine = ctx.cast(x), self.parts, []

        def run(name: str, *x: tf.Tensor) -> tf.Tensor:
            with ctx.scope(name) as c:
                return parts[name].fprop(c, theta[name], *x)

        for level in range(len(self.analysis)):
            if level:
                fine.append(x)
                x = tf.nn.max_pool3d(x, _HALF, _HALF, "SAME")
            x = run(f"analysis_{level}", x)
        for level in reversed(range(len(self.synthesis))):
            if self.upsampling is Upsampling.TRANSPOSED:
                x = run(f"up_{level}", x)
            else:
                x = _repeated(x)
            beside = fine.pop()
            both = zip(x.shape[1:-1], beside.shape[1:-1], strict=True)
            size = [min(pair) for pair in both]
            x = run(f"synthesis_{level}", middle(x, size), middle(beside, size))
        return run("classes", x)

    def labelled(self, size: Sequence[int]) -> tuple[int, ...]:
        """The size of the part of a volume that is labelled: its middle.

        Raises:
          ValueError: with `VALID` padding, a volume that is too small, or a level that
            cannot be halved; the message names the next sizes that can.
        """
        sizes = tuple(self._along(n).get("classes") for n in size)
        if None in sizes:
            n = size[sizes.index(None)]
            sides = (range(n - 1, 0, -1), itertools.count(n + 1))
            good = [(m for m in ms if "classes" in self._along(m)) for ms in sides]
            near = [m for ms in good for m in itertools.islice(ms, 1)]
            raise ValueError(
                f"UNet3D with Padding.VALID cannot take a volume of {tuple(size)}: "
                f"along a dim of {n} a level is odd or too small; next to it are "
                f"{' and '.join(map(str, near))}, or use Padding.SAME"
            )
        return sizes

    def flops(self, size: Sequence[int]) -> float:
        """FLOPs of kernels, forward, for a volume of X, Y, Z: 2 a product and its sum.

        Raises:
          ValueError: see `labelled`.
        """
        self.labelled(size)
        along = [self._along(n) for n in size]
        return sum(
            part.flops([sizes[name] for sizes in along])
            for name, part in self.parts.items()
        )

    def _along(self, n: int) -> dict[str, int]:
        """The voxels left of a dim of n after each part, as long as there are any."""
        valid, sizes, fine = self.padding is Padding.VALID, {}, []
        parts = self.parts

        def after(name: str, n: int) -> int:
            if isinstance(parts[name], _Chain):
                n -= parts[name].shrinks * len(parts[name].channels)
            sizes[name] = n
            return n

        for level in range(len(self.analysis)):
            if level:
                fine.append(n)
                if valid and n % 2:
                    return sizes
                n = -(-n // 2)
            n = after(f"analysis_{level}", n)
            if n < 1:
                return sizes
        for level in reversed(range(len(self.synthesis))):
            n *= 2
            if self.upsampling is Upsampling.TRANSPOSED:
                n = after(f"up_{level}", n)
            n = after(f"synthesis_{level}", min(n, fine.pop()))
            if n < 1:
                return sizes
        sizes["classes"] = n
        return sizes

    @functools.cached_property
    def parts(self) -> dict[str, Layer]:
        """Parts by name, in the order in which they run."""
        kind = {"norm": self.norm, "window": self.window, "padding": self.padding}
        parts: dict[str, Layer] = {}
        channels, beside = self.in_channels, []
        for level, widths in enumerate(self.analysis):
            parts[f"analysis_{level}"] = _Chain(
                in_channels=channels, channels=widths, **kind
            )
            channels = widths[-1]
            beside.append(channels)
        beside.pop()
        for level, widths in reversed(list(enumerate(self.synthesis))):
            if self.upsampling is Upsampling.TRANSPOSED:
                parts[f"up_{level}"] = TransposedConvolution(
                    in_channels=channels, channels=channels, window=_HALF
                )
            parts[f"synthesis_{level}"] = _Chain(
                in_channels=channels + beside.pop(), channels=widths, **kind
            )
            channels = widths[-1]
        parts["classes"] = Convolution(
            in_channels=channels,
            channels=self.num_classes,
            window=(1, 1, 1),
            strides=(1, 1, 1),
        )
        return parts


def middle(x: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """The middle of `x` [B, X, Y, Z, ...], of that size; `x` itself if it is all."""
    begin = [(n - m) // 2 for n, m in zip(x.shape[1:4], size, strict=True)]
    if not any(n - m for n, m in zip(x.shape[1:4], size, strict=True)):
        return x
    rest = x.shape.rank - 4
    return tf.slice(x, [0, *begin, *[0] * rest], [-1, *size, *[-1] * rest])


def _repeated(x: tf.Tensor) -> tf.Tensor:
    """Repeats each voxel of `x` [B, X, Y, Z, C] eight times."""
    for dim in (1, 2, 3):
        # Not tf.repeat, which gathers: the partitioner would too.
        x = tf.stack([x, x], axis=dim + 1)
        shape = [*shape_of(x)[:dim], x.shape[dim] * 2, *x.shape[dim + 2 :]]
        x = tf.reshape(x, shape)
    return x
