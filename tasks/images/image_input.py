"""Labelled pictures as batches; the state of the input is the step number.

A training example is a random part of a picture, at any size and perhaps mirrored; a
held-out example is the middle. Pixels stay bytes: devices get a quarter of float32's.

Dims: B batch rows, H height, W width.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.images.image_files import Picture, PictureFiles, Records, reason
from meshwright.tasks.input.batched_input import BatchedInput, read_ahead
from meshwright.tasks.input.example_order import (
    SEEDS,
    BatchRows,
    Split,
    shuffled_examples,
)

CHANNELS = 3
"""Red, green and blue."""

UNLABELLED = -1
"""The label of rows that fill up a batch and do not count."""

_READY_BATCHES = 2
# Draws of a part of a picture, before all of the picture is taken.
_DRAWS = 10

Part = tuple[int, int, int, int]
"""First row, first column, height and width."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInput(BatchedInput):
    """Batches of pictures. Construction does not touch the file system.

    A batch is a nested map of tensors:
      image: uint8 [rows, size, size, 3].
      label: int32 [rows], in [0, num_classes), or `UNLABELLED`.

    Args:
      files: the source of pictures: `ImageFiles` or `SyntheticImages`.
      size: H and W.
      num_classes: labels in files are from 1 to this.
      area: least and largest share of a picture that is trained on (Szegedy et al.
        2015, section 6).
      aspect: least and largest width by height of that part.
      mirrored: the share of training pictures that are mirrored.
      middle: the share of a held-out picture's shorter side that is read.
      seed: seed of the training order, parts and mirroring.

    Raises:
      ValueError: a number is out of range, or a range is no two ascending numbers.
    """

    files: PictureFiles = instance(example="@ImageFiles()")
    size: int = bounded(at_least=1)
    num_classes: int = bounded(at_least=2)
    area: Sequence[float] = (0.08, 1.0)
    aspect: Sequence[float] = (3 / 4, 4 / 3)
    mirrored: float = bounded(0.5, at_least=0, at_most=1)
    middle: float = bounded(0.875, above=0, at_most=1)
    seed: int = bounded(0, **SEEDS)

    def __post_init__(self):
        super().__post_init__()
        for name, most in (("area", 1.0), ("aspect", math.inf)):
            given = getattr(self, name)
            two = isinstance(given, Sequence) and len(given) == 2
            if not two or not 0 < given[0] <= given[1] <= most:
                raise ValueError(
                    f"ImageInput.{name} is {given!r}: give the least and the largest, "
                    f"above 0{' and at most 1' if most == 1 else ''}"
                )
            object.__setattr__(self, name, tuple(given))

    def element_spec(self, batch: int | None) -> NestedMap:
        image = [batch, self.size, self.size, CHANNELS]
        return NestedMap(
            image=tf.TensorSpec(image, tf.uint8),
            label=tf.TensorSpec([batch], tf.int32),
        )

    def records(self, split: Split) -> Records:
        """The pictures of a split; raises as `ImageFiles.records`."""
        return self.files.records(split)

    def read_train(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        records = self.records(Split.TRAIN)

        def numbered(step):
            index = rows.indices(step)
            drawn = shuffled_examples(index, count=len(records), seed=self.seed)
            return index, drawn % len(records)

        def read(index: np.int64, number: np.int64):
            picture = records.picture(number)
            return self._drawn(picture, int(index)), self._label(picture)

        return self._dataset(steps.map(numbered), read, len(rows))

    def held_out_rows(self, global_batch: int) -> int:
        return len(self.records(Split.HELD_OUT))

    def read_held_out(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        records = self.records(Split.HELD_OUT)

        def read(number: np.int64):
            if number >= len(records):
                shape = (self.size, self.size, CHANNELS)
                return np.zeros(shape, np.uint8), np.int32(UNLABELLED)
            picture = records.picture(number)
            part = _middle(_size(picture), self.middle)
            return self._part(picture, part), self._label(picture)

        return self._dataset(steps.map(rows.indices), read, len(rows))

    def _dataset(
        self, numbers: tf.data.Dataset, read: Callable, rows: int
    ) -> tf.data.Dataset:
        """Batches of the results of `read` for each row's numbers; many at a time."""
        spec = self.element_spec(rows)
        kinds = [spec.image.dtype, spec.label.dtype]

        def row(*numbers):
            image, label = tf.numpy_function(read, numbers, kinds, stateful=False)
            return NestedMap(
                image=tf.ensure_shape(image, spec.image.shape[1:]),
                label=tf.ensure_shape(label, []),
            )

        pictures = numbers.unbatch().map(
            row, num_parallel_calls=os.cpu_count(), deterministic=True
        )
        batches = pictures.batch(rows, drop_remainder=True)
        return read_ahead(batches, _READY_BATCHES)

    def _label(self, picture: Picture) -> np.int32:
        if not 1 <= picture.label <= self.num_classes:
            raise ValueError(
                f"{picture.name} has label {picture.label}, but there are "
                f"{self.num_classes} classes, from 1 on: set ImageInput.num_classes to "
                "what the files have, or correct them"
            )
        return np.int32(picture.label - 1)

    def _drawn(self, picture: Picture, index: int) -> np.ndarray:
        """A training picture, uint8 [H, W, 3]."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        part = _random_part(rng, _size(picture), self.area, self.aspect)
        image = self._part(picture, part)
        return image[:, ::-1] if rng.random() < self.mirrored else image

    def _part(self, picture: Picture, part: Part) -> np.ndarray:
        """Part of a picture at the size of the input, uint8 [H, W, 3].

        Rows below the part are not decoded, nor checked for errors.
        """
        try:
            image = tf.io.decode_and_crop_jpeg(picture.encoded, part, CHANNELS)
        except tf.errors.OpError as error:
            raise _broken(picture, error) from error
        resized = tf.raw_ops.ResizeBilinear(
            images=image[None], size=[self.size] * 2, half_pixel_centers=True
        )
        return np.rint(resized[0].numpy()).astype(np.uint8)


def _size(picture: Picture) -> tuple[int, int]:
    """A picture's height and width."""
    try:
        height, width, _ = tf.io.extract_jpeg_shape(picture.encoded).numpy().tolist()
    except tf.errors.OpError as error:
        raise _broken(picture, error) from error
    return height, width


def _broken(picture: Picture, error: tf.errors.OpError) -> ValueError:
    return ValueError(
        f"the picture in {picture.name} is no JPEG file, or not all of one "
        f"({reason(error)}): write it anew, or leave it out"
    )


def _random_part(
    rng: np.random.Generator,
    size: tuple[int, int],
    area: Sequence[float],
    aspect: Sequence[float],
) -> Part:
    """A part with such an area and aspect; all of the picture if few of them fit."""
    for _ in range(_DRAWS):
        pixels = math.prod(size) * rng.uniform(*area)
        by_height = math.exp(rng.uniform(*np.log(aspect)))
        height = round(math.sqrt(pixels / by_height))
        width = round(math.sqrt(pixels * by_height))
        if 1 <= height <= size[0] and 1 <= width <= size[1]:
            top = rng.integers(size[0] - height + 1)
            left = rng.integers(size[1] - width + 1)
            return int(top), int(left), height, width
    return 0, 0, *size


def _middle(size: tuple[int, int], share: float) -> Part:
    """The square in the middle, whose side is `share` of the shorter side."""
    side = max(1, round(share * min(size)))
    return (size[0] - side) // 2, (size[1] - side) // 2, side, side
