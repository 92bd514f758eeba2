"""Residual networks for image classification (He et al. 2016), version 1.5.

Dims: B batch, H height, W width, C channels, K classes. Nothing here says how tensors
are split, except that the head's input is split by rows: a split image is all that is
needed, as for `UNet3D`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.initializers import Constant, Normal
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import add_bias, contract, per_feature
from meshwright.layers.basic.normalization import BatchNorm
from meshwright.layers.convolutions.convolution import Convolution, check_window_dims

_STEM = (7, 7)
_POOL = (3, 3)
_POOL_STRIDE = 2
# A block's result is this many times wider than its 3 x 3 convolution.
_EXPANSION = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Normalized(Layer):
    """A square convolution and its norm, whose scale starts at 1 or 0."""

    in_channels: int
    channels: int
    window: int
    stride: int = 1
    norm: Callable[..., Layer]
    scale: float = 1.0

    def weights(self) -> NestedMap:
        specs = NestedMap({name: part.weights() for name, part in self.parts.items()})
        if not self.scale:
            start = Constant(0.0)
            specs.norm.scale = dataclasses.replace(specs.norm.scale, initializer=start)
        return specs

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        for name, part in self.parts.items():
            with ctx.scope(name) as c:
                x = part.fprop(c, theta[name], x)
        return x

    def flops(self, size: Sequence[int]) -> float:
        """FLOPs of the kernel, forward, for a result of size H, W."""
        return self.parts["convolution"].flops(size)

    @functools.cached_property
    def parts(self) -> dict[str, Layer]:
        convolution = Convolution(
            in_channels=self.in_channels,
            channels=self.channels,
            window=(self.window,) * 2,
            strides=(self.stride,) * 2,
            use_bias=False,  # A norm has a bias, and cancels others.
        )
        return {
            "convolution": convolution,
            "norm": self.norm(model_dims=self.channels),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bottleneck(Layer):
    """Fewer channels, a 3 x 3 convolution with the stride, more channels again."""

    in_channels: int
    width: int
    stride: int
    norm: Callable[..., Layer]
    last_scale: float

    @property
    def channels(self) -> int:
        """Channels of the result."""
        return _EXPANSION * self.width

    def weights(self) -> NestedMap:
        return NestedMap({name: part.weights() for name, part in self.parts.items()})

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        def run(name: str, x: tf.Tensor) -> tf.Tensor:
            with ctx.scope(name) as c:
                return self.parts[name].fprop(c, theta[name], x)

        y = tf.nn.relu(run("reduce", x))
        y = tf.nn.relu(run("window", y))
        y = run("expand", y)
        if "shortcut" in self.parts:
            # A window of 1 would skip positions, which `Convolution` refuses.
            x = run("shortcut", x[:, :: self.stride, :: self.stride])
        return tf.nn.relu(y + x)

    def flops(self, size: Sequence[int]) -> float:
        """FLOPs of kernels, forward, for an input of size H, W."""
        after = _strided(size, self.stride)
        sizes = {"reduce": size}
        return sum(p.flops(sizes.get(name, after)) for name, p in self.parts.items())

    @functools.cached_property
    def parts(self) -> dict[str, _Normalized]:
        """Parts by name; with a shortcut where the input has another shape."""
        make = functools.partial(_Normalized, norm=self.norm)
        ins, width, outs = self.in_channels, self.width, self.channels
        parts = {
            "reduce": make(in_channels=ins, channels=width, window=1),
            "window": make(
                in_channels=width, channels=width, window=3, stride=self.stride
            ),
            "expand": make(
                in_channels=width, channels=outs, window=1, scale=self.last_scale
            ),
        }
        if self.stride > 1 or ins != outs:
            parts["shortcut"] = make(in_channels=ins, channels=outs, window=1)
        return parts


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet(Layer):
    """Stages of bottleneck blocks, the mean over all positions, and a linear layer.

    The defaults are ResNet-50. First come a 7 x 7 convolution of stride 2 and a 3 x 3
    max pool of stride 2; then stages, each of which, except the first, halves the image
    in the 3 x 3 convolution of its first block (version 1.5; He et al. have that stride
    in the block's first convolution). Windows of stride 2 are placed as in
    `Convolution`, as TF's SAME where sizes are even.

    Args:
      num_classes: K.
      in_channels: channels of the image.
      blocks: the number of blocks of each stage.
      widths: the channels of each stage's 3 x 3 convolutions; a stage's result has
        four times as many. The 7 x 7 convolution has those of the first stage.
      norm: makes the norm after a convolution, from `model_dims`.
      zero_last_scale: the scale of each block's last norm starts at zero (Goyal et al.
        2017, section 5.1), so that at first a block passes on its input.

    Raises:
      ValueError: stages do not match or are empty; a number is out of range.
    """

    num_classes: int = bounded(at_least=2)
    in_channels: int = bounded(3, at_least=1)
    blocks: Sequence[int] = (3, 4, 6, 3)
    widths: Sequence[int] = (64, 128, 256, 512)
    norm: Callable[..., Layer] = BatchNorm
    zero_last_scale: bool = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("blocks", "widths"):
            given = getattr(self, name)
            if not isinstance(given, Sequence) or not given or min(given) < 1:
                raise ValueError(
                    f"ResNet.{name} is {given}: give each stage a number of 1 or more, "
                    "such as (3, 4, 6, 3)"
                )
            object.__setattr__(self, name, tuple(given))
        if len(self.blocks) != len(self.widths):
            raise ValueError(
                f"ResNet.blocks has {len(self.blocks)} stages and widths "
                f"{len(self.widths)}: give both one number for each stage"
            )
        for part in self.parts.values():
            part.weights()  # A wrong norm raises here, not when it runs.

    def weights(self) -> NestedMap:
        kernel = WeightSpec(
            shape=(self.channels, self.num_classes),
            dims=("channels", "classes"),
            initializer=Normal(0.01),
        )
        parts = {name: part.weights() for name, part in self.parts.items()}
        head = NestedMap(kernel=kernel, bias=per_feature(self.num_classes))
        return NestedMap(parts, head=head)

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits [B, K] of `x` [B, H, W, in_channels], activation dtype.

        Raises:
          ValueError: `x` has other dims.
        """
        check_window_dims(ctx, x, _STEM, self.in_channels)
        x = ctx.cast(x)
        for name, part in self.parts.items():
            with ctx.scope(name) as c:
                x = part.fprop(c, theta[name], x)
            if name == "stem":
                x = tf.nn.max_pool2d(tf.nn.relu(x), _POOL, _POOL_STRIDE, "SAME")
        with ctx.scope("head") as c:
            x = tf.reduce_mean(tf.cast(x, tf.float32), [1, 2])
            x = c.split(c.cast(x), ("batch", "channels"), name="mean")
            return add_bias(c, contract(c, x, theta.head.kernel), theta.head.bias)

    @property
    def channels(self) -> int:
        """Channels of the last stage's result."""
        return _EXPANSION * self.widths[-1]

    def flops(self, size: Sequence[int]) -> float:
        """FLOPs of kernels, forward, for an image of H, W: 2 a product and its sum."""
        stem, *blocks = self.parts.values()
        size = _strided(size, stem.stride)
        total = stem.flops(size)
        size = _strided(size, _POOL_STRIDE)
        for block in blocks:
            total += block.flops(size)
            size = _strided(size, block.stride)
        return total + 2.0 * self.channels * self.num_classes

    @functools.cached_property
    def parts(self) -> dict[str, Layer]:
        """Parts by name, in the order in which they run; all but the head."""
        channels = self.widths[0]
        parts: dict[str, Layer] = {
            "stem": _Normalized(
                in_channels=self.in_channels,
                channels=channels,
                window=_STEM[0],
                stride=2,
                norm=self.norm,
            )
        }
        for stage, (count, width) in enumerate(
            zip(self.blocks, self.widths, strict=True)
        ):
            for number in range(count):
                block = _Bottleneck(
                    in_channels=channels,
                    width=width,
                    stride=2 if stage and not number else 1,
                    norm=self.norm,
                    last_scale=0.0 if self.zero_last_scale else 1.0,
                )
                parts[f"stage_{stage}_block_{number}"] = block
                channels = block.channels
        return parts


def _strided(size: Sequence[int], stride: int) -> list[int]:
    return [-(-n // stride) for n in size]
