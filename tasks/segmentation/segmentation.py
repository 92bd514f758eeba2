"""Segmentation: the class of each voxel of a volume.

Dims: B batch, X Y Z the image, U V W its labelled part, C channels, K classes.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import gin
import numpy as np
import tensorflow as tf
from absl import logging

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.convolutions.unet3d import UNet3D
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.segmentation.patches import Patches
from meshwright.tasks.segmentation.segmentation_input import (
    SegmentationInput,
    Size,
    fingerprint,
)
from meshwright.tasks.segmentation.segmentation_loss import chances, voxel_sums
from meshwright.tasks.segmentation.segmentation_tiles import (
    counts_by_class,
    dice,
    segmented_volumes,
)
from meshwright.tasks.segmentation.segmentation_views import views
from meshwright.tasks.segmentation.volume_files import save
from meshwright.tasks.task import DecodeResult, Decoding, Serving, Task, TaskLoss

# Added to the sums that soft Dice divides, which are 0 for a class that occurs nowhere.
_SMOOTH = 1.0

# The input's fields that determine training batches, beside the volumes.
_DRAWN_BY = (
    "patch",
    "crop",
    "spacing",
    "intensities",
    "flips",
    "foreground",
    "seed",
)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Segmentation(Task):
    """Labels voxels, trained by cross-entropy and soft Dice.

    The image is the only activation that is annotated, by the dims "batch", "x", "y",
    "z" and "channels": a plan that splits "x" partitions the model spatially (GSPMD
    5.6).

    Args:
      volumes: the input.
      network: labels an image, or its middle.
      cross_entropy_weight: weight in the loss of the mean over voxels.
      dice_weight: weight in the loss of 1 - soft Dice (Milletari et al. 2016), the mean
        over classes but the background, each over all voxels of the batch.
      pictures: number of held-out volumes that an evaluation shows.

    Raises:
      ValueError: the network and the input disagree on channels or classes; the patch
        has a size that the network cannot take.
    """

    loss_unit: ClassVar[str] = ""  # A sum of cross-entropy and Dice.
    token_name: ClassVar[str] = "voxels"

    volumes: SegmentationInput
    network: UNet3D
    cross_entropy_weight: float = bounded(1.0, at_least=0)
    dice_weight: float = bounded(1.0, at_least=0)
    pictures: int = bounded(4, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        pairs = (("in_channels", "channels"), ("num_classes", "num_classes"))
        for ours, theirs in pairs:
            wanted, given = getattr(self.volumes, theirs), getattr(self.network, ours)
            if wanted != given:
                raise ValueError(
                    f"{type(self.network).__name__}.{ours} is {given}, but "
                    f"SegmentationInput.{theirs} is {wanted}: set both to the same"
                )
        self.network.labelled(self.volumes.patch)

    @property
    def labelled(self) -> Size:
        """U, V and W."""
        return self.network.labelled(self.volumes.patch)

    def logits(self, ctx: Context, theta: NestedMap, image: tf.Tensor) -> tf.Tensor:
        """Logits [B, U, V, W, K] of an image [B, X, Y, Z, C], activation dtype."""
        image = ctx.split(image, self.batch_dims().image, name="image")
        with ctx.scope("network") as c:
            return self.network.fprop(c, theta.network, image)

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Weighted cross-entropy, in nats per voxel, and soft Dice."""
        logits = self.logits(ctx, theta, batch.image)
        with ctx.scope("loss"):
            sums = voxel_sums(logits, batch.label)
            soft = 2 * sums.pop("right") + _SMOOTH
            soft /= sums.pop("chance") + sums.truth + _SMOOTH
            mean_nats = sums.nats / tf.maximum(sums.voxels, 1.0)
            loss = self.cross_entropy_weight * mean_nats
            loss += self.dice_weight * (1 - tf.reduce_mean(soft[1:]))
            sums.loss = loss * sums.voxels
        return TaskLoss(loss=loss, sums=sums)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Means over voxels, and Dice of each class over all voxels together."""
        voxels = max(float(sums["voxels"]), 1.0)
        scores = dice(sums["overlap"], sums["found"], sums["truth"])
        means = {
            "loss": float(sums["loss"]) / voxels,
            "cross_entropy": float(sums["nats"]) / voxels,
        }
        return means | self.means("dice", [scores])

    def means(self, what: str, scores: Sequence[np.ndarray]) -> dict[str, float]:
        """Mean scores of each class but the background, if any; and the mean of
        classes.
        """
        means = {}
        for k, name in enumerate(self.volumes.classes()):
            known = [score[k] for score in scores if score[k] == score[k]]
            if k and known:
                means[f"{what}/{name}"] = float(np.mean(known))
        return {what: float(np.mean(list(means.values())))} | means if means else {}

    @property
    def decoding(self) -> SegmentationDecoding:
        return SegmentationDecoding(self)

    @property
    def serving(self) -> SegmentationServing:
        return SegmentationServing(self)

    @property
    def input(self) -> Patches:
        return Patches(volumes=self.volumes, labelled=self.labelled)

    @property
    def overlapping(self) -> Patches:
        """Patches from which volumes are assembled."""
        return dataclasses.replace(self.input, overlap=self.volumes.overlap)

    def batch_dims(self) -> NestedMap:
        dims = ("batch", "x", "y", "z")
        return NestedMap(image=(*dims, "channels"), label=dims)

    def describe_data(self) -> dict[str, float]:
        given = self.volumes
        for split in Split:
            for case in given.cases(split):
                self.input.size(case)  # Checks headers before training.
        return {
            "training volumes": len(given.cases(Split.TRAIN)),
            "held-out volumes": len(given.cases(Split.HELD_OUT)),
            "tiles of held-out volumes": len(self.input.tiles()),
        }

    def data_fingerprint(self) -> dict[str, str | int]:
        given = self.volumes
        return {
            "volumes": fingerprint(given.cases(Split.TRAIN)),
            "UNet3D.labelled": str(self.labelled),
            **{f"SegmentationInput.{n}": str(getattr(given, n)) for n in _DRAWN_BY},
        }

    def train_flops(self, global_batch: int) -> float:
        """Three times the forward FLOPs of the kernels."""
        return 3.0 * global_batch * self.network.flops(self.volumes.patch)

    def tokens(self, global_batch: int) -> int:
        """Voxels that are labelled."""
        return global_batch * int(np.prod(self.labelled))


@dataclasses.dataclass(frozen=True)
class SegmentationDecoding(Decoding):
    """Segments held-out volumes, tile by tile."""

    task: Segmentation

    def spec(self, global_batch: int) -> NestedMap:
        """An image, and `tile`, its number in `Patches.tiles` or -1."""
        spec = self.task.input.element_spec(global_batch)
        return NestedMap(image=spec.image, tile=tf.TensorSpec([global_batch], tf.int32))

    def decode(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`chances` float32 [B, K, U, V, W] of each class."""
        return NestedMap(chances=chances(self.task.logits(ctx, theta, batch.image)))

    def batches(
        self, *, global_batch: int, max_batches: int | None = None
    ) -> Iterator[NestedMap]:
        batches = self.task.overlapping.held_out_batches(
            global_batch=global_batch, rows=range(global_batch)
        )
        # The first batches, not spread evenly: they have all tiles of some volumes.
        for batch in batches.take(-1 if max_batches is None else max_batches):
            yield NestedMap(image=batch.image.numpy(), tile=batch.tile.numpy())

    def score(
        self, batches: Iterable[tuple[NestedMap, NestedMap]], folder: pathlib.Path
    ) -> DecodeResult:
        """Scores volumes, assembled from their tiles and written as NIfTI files.

        The metrics are means over volumes of which all tiles were read; a class that is
        neither labelled nor predicted in a volume has no score there.
        """
        given, patches = self.task.volumes, self.task.overlapping
        cases = given.cases(Split.HELD_OUT)
        scores, shown = [], {}

        def size_of(number: int) -> Size:
            return patches.size(cases[number])

        answers = self._answers(batches)
        for segmented in segmented_volumes(patches.tiles(), answers, size_of):
            case = cases[segmented.case]
            volume = given.volume(case)
            path = str(folder / f"{case.name}.nii.gz")
            save(path, segmented.found, like=case, volume=volume)
            counts = counts_by_class(segmented.found, volume.label, given.num_classes)
            scores.append(dice(*counts))
            if len(shown) < self.task.pictures:
                shown[case.name] = views(volume, segmented.found)
        if not scores:
            logging.warning(
                "no held-out volume was decoded completely, so that none is scored: "
                "raise Experiment.decode_batches, or set it to None"
            )
        return DecodeResult(
            metrics=self.task.means("volume_dice", scores), pictures=shown
        )

    def _answers(self, batches) -> Iterator[tuple[int, np.ndarray]]:
        for batch, out in batches:
            for tile, by_class in zip(batch.tile, np.asarray(out.chances), strict=True):
                if tile >= 0:
                    yield int(tile), np.moveaxis(by_class, 0, -1)


@dataclasses.dataclass(frozen=True)
class SegmentationServing(Serving):
    """Segments patches."""

    task: Segmentation

    def spec(self, batch: int | None) -> NestedMap:
        """`image` float32 [B, X, Y, Z, C], as the input's patches."""
        return NestedMap(image=self.task.input.element_spec(batch).image)

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`chances` of each class, and the likeliest `classes`, int32 [B, U, V, W]."""
        out = self.task.decoding.decode(ctx, theta, batch)
        out.classes = tf.argmax(out.chances, axis=1, output_type=tf.int32)
        return out
