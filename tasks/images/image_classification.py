"""Image classification: which of several classes a picture shows.

Dims: B batch, H height, W width, K classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.convolutions.resnet import ResNet
from meshwright.tasks.images.image_input import CHANNELS, UNLABELLED, ImageInput
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.task import Serving, Task, TaskLoss

# The input's fields that determine training batches, beside the pictures.
_DRAWN_BY = ("size", "area", "aspect", "mirrored", "seed")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassification(Task):
    """Classifies pictures, trained by cross-entropy.

    The picture is annotated by the dims "batch", "height", "width" and "channels", and
    the input of the network's head by "batch" and "channels". Classes are never split:
    on a TPU 1000 classes take as much memory as 1024.

    Args:
      pictures: the input.
      network: from a picture to logits.
      label_smoothing: the share of a label that is spread evenly over all classes
        (Szegedy et al. 2016, section 7).
      mean: means of red, green and blue, from 0 to 255, subtracted from each picture.
      deviation: standard deviations of the same; pictures are divided by them. Defaults
        are ImageNet's.

    Raises:
      ValueError: the network and the input disagree on classes or channels; a number is
        out of range.
    """

    token_name: ClassVar[str] = "pictures"

    pictures: ImageInput
    network: ResNet
    label_smoothing: float = bounded(0.0, at_least=0, below=1)
    mean: Sequence[float] = (123.68, 116.78, 103.94)
    deviation: Sequence[float] = (58.4, 57.12, 57.38)

    def __post_init__(self):
        super().__post_init__()
        wanted = {"num_classes": self.pictures.num_classes, "in_channels": CHANNELS}
        for name, value in wanted.items():
            given = getattr(self.network, name)
            if given != value:
                raise ValueError(
                    f"{type(self.network).__name__}.{name} is {given}, but the "
                    f"pictures' is {value}: set it to that"
                )
        for name, least in (("mean", -np.inf), ("deviation", 0)):
            given = getattr(self, name)
            three = isinstance(given, Sequence) and len(given) == CHANNELS
            if not three or not all(least < n < np.inf for n in given):
                raise ValueError(
                    f"ImageClassification.{name} is {given!r}: give a number for red, "
                    f"green and blue each{'' if least else ', above 0'}"
                )
            object.__setattr__(self, name, tuple(given))

    def logits(self, ctx: Context, theta: NestedMap, image: tf.Tensor) -> tf.Tensor:
        """Logits [B, K] of pictures uint8 [B, H, W, 3], activation dtype."""
        image = (tf.cast(image, tf.float32) - self.mean) / self.deviation
        image = ctx.split(ctx.cast(image), self.batch_dims().image, name="image")
        with ctx.scope("network") as c:
            return self.network.fprop(c, theta.network, image)

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Cross-entropy with smoothed labels, in nats a picture."""
        logits = self.logits(ctx, theta, batch.image)
        with ctx.scope("loss"):
            sums = picture_sums(logits, batch.label, self.label_smoothing)
            loss = sums.loss / tf.maximum(sums.pictures, 1.0)
        return TaskLoss(loss=loss, sums=sums)

    @property
    def serving(self) -> PictureClasses:
        return PictureClasses(self)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Means over pictures; top_5: the share whose label is among the five best."""
        pictures = max(float(sums["pictures"]), 1.0)
        names = {"loss": "loss", "cross_entropy": "nats", "top_1": "first"}
        names["top_5"] = "among_five"
        return {name: float(sums[key]) / pictures for name, key in names.items()}

    @property
    def input(self) -> ImageInput:
        return self.pictures

    def batch_dims(self) -> NestedMap:
        image = ("batch", "height", "width", "channels")
        return NestedMap(image=image, label=("batch",))

    def describe_data(self) -> dict[str, float]:
        return {
            "training pictures": len(self.pictures.records(Split.TRAIN)),
            "held-out pictures": len(self.pictures.records(Split.HELD_OUT)),
        }

    def data_fingerprint(self) -> dict[str, str | int]:
        given = self.pictures
        return {
            "pictures": given.records(Split.TRAIN).fingerprint(),
            **{f"ImageInput.{name}": str(getattr(given, name)) for name in _DRAWN_BY},
        }

    def train_flops(self, global_batch: int) -> float:
        """Three times the forward FLOPs of the kernels."""
        size = (self.pictures.size, self.pictures.size)
        return 3.0 * global_batch * self.network.flops(size)

    def tokens(self, global_batch: int) -> int:
        """Pictures."""
        return global_batch


@dataclasses.dataclass(frozen=True)
class PictureClasses(Serving):
    """Answers which classes pictures show."""

    task: ImageClassification

    def spec(self, batch: int | None) -> NestedMap:
        """`image` uint8 [B, H, W, 3]: red, green and blue."""
        return NestedMap(image=self.task.pictures.element_spec(batch).image)

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`logits` float32 [B, K], and the likeliest `classes`, int32 [B]."""
        logits = tf.cast(self.task.logits(ctx, theta, batch.image), tf.float32)
        classes = tf.argmax(logits, axis=-1, output_type=tf.int32)
        return NestedMap(logits=logits, classes=classes)


def picture_sums(
    logits: tf.Tensor, label: tf.Tensor, label_smoothing: float
) -> NestedMap:
    """The sums that the loss and the metrics are made of.

    Args:
      logits: [B, K], any float dtype.
      label: int32 [B], in [0, K) or `UNLABELLED`, which does not count.
      label_smoothing: the share of a label that is spread evenly over all classes.

    Returns:
      float32 scalars: `pictures`, the number that count; `nats`, their cross-entropy;
      `loss`, the same with smoothed labels; `first` and `among_five`, the numbers with
      no class, or fewer than five, before the label. Of equal logits the first comes
      before.
    """
    logits = tf.cast(logits, tf.float32)
    counts = tf.cast(label != UNLABELLED, tf.float32)
    classes = tf.range(logits.shape[-1])
    truth = tf.cast(classes == label[:, None], tf.float32)
    picked = tf.reduce_sum(logits * truth, axis=-1)
    nats = tf.reduce_logsumexp(logits, axis=-1) - picked
    smoothed = nats + label_smoothing * (picked - tf.reduce_mean(logits, axis=-1))
    level = (logits == picked[:, None]) & (classes < label[:, None])
    before = tf.cast((logits > picked[:, None]) | level, tf.float32)
    rank = tf.reduce_sum(before, axis=-1)
    sums = NestedMap(
        loss=smoothed,
        nats=nats,
        first=tf.cast(rank < 1, tf.float32),
        among_five=tf.cast(rank < 5, tf.float32),
        pictures=tf.ones_like(nats),
    )
    return sums.map(lambda x: tf.reduce_sum(x * counts))
