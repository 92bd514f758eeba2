"""Patches of labelled volumes as batches; the state of the input is the step number.

Dims: B batch rows, X Y Z the patch's image, U V W its labelled part, C channels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import BatchedInput, read_batches
from meshwright.tasks.input.example_order import BatchRows, Split, shuffled_examples
from meshwright.tasks.segmentation.segmentation_input import (
    Crop,
    SegmentationInput,
    Size,
)
from meshwright.tasks.segmentation.segmentation_loss import IGNORED
from meshwright.tasks.segmentation.volume_cache import KeptVolume
from meshwright.tasks.segmentation.volume_files import Case, Volume, grid

_AS_READ = " (axes run right, front and up, voxels are resampled)"
# A batch of volumes may have a gigabyte.
_READY_BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a held-out volume.

    Args:
      case: number of the volume in `read(Split.HELD_OUT)`.
      start: first labelled voxel; voxels before `fresh` are in other tiles too.
      fresh: first voxel, along each dim, that no earlier tile counted.
    """

    case: int
    start: Size
    fresh: Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patches(BatchedInput):
    """Batches of patches whose middle a network labels.

    A batch is as `SegmentationInput` describes. A held-out batch has `tile` too, int32
    [rows]: each row's number in `tiles`, -1 in rows that fill up a batch.

    Args:
      volumes: the volumes that patches are cut from, and how.
      labelled: U, V and W.
      overlap: the least share of a side that neighbouring tiles have in common.
    """

    volumes: SegmentationInput
    labelled: Size
    overlap: float = 0.0

    def element_spec(self, batch: int | None) -> NestedMap:
        return NestedMap(
            image=tf.TensorSpec([batch, *self.volumes.patch, self.volumes.channels]),
            label=tf.TensorSpec([batch, *self.labelled], tf.int32),
        )

    def read_train(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        cases = self.volumes.cases(Split.TRAIN)

        def read(index: np.ndarray, case: np.ndarray):
            drawn = zip(index, case, strict=True)
            return _stacked(
                self._drawn(cases[number % len(cases)], int(at)) for at, number in drawn
            )

        def batch(step):
            index = rows.indices(step)
            case = shuffled_examples(index, count=len(cases), seed=self.volumes.seed)
            return self._read(read, [index, case])

        return read_batches(steps, batch, ready=_READY_BATCHES)

    def held_out_rows(self, global_batch: int) -> int:
        return len(self.tiles())

    def read_held_out(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        """Volumes one after another, tile by tile; each voxel counts once."""
        cases, tiles = self.volumes.cases(Split.HELD_OUT), self.tiles()

        def read(number: np.ndarray):
            return _stacked(
                self._tile(cases[tiles[i].case], tiles[i])
                if i < len(tiles)
                else self._nothing()
                for i in number
            )

        def batch(step):
            number = rows.indices(step)
            out = self._read(read, [number])
            out.tile = tf.cast(tf.where(number < len(tiles), number, -1), tf.int32)
            return out

        return read_batches(steps, batch, ready=_READY_BATCHES)

    def tiles(self) -> list[Tile]:
        """The tiles that cover the held-out volumes, volume by volume."""
        return _tiles(self)

    def size(self, case: Case) -> Size:
        """X, Y and Z of a volume, from its files' headers.

        Raises:
          FileNotFoundError, ImportError: see `load`.
          ValueError: the files cannot be used, as far as headers tell; the message
            names the file.
        """
        return _size(self.volumes, case, self.labelled)

    def _read(self, read, inputs) -> NestedMap:
        """The result of `read` for `inputs`, with static shapes."""
        kinds = [tf.float32, tf.int32]
        image, label = tf.numpy_function(read, inputs, kinds, stateful=False)
        spec = self.element_spec(inputs[0].shape[0])
        return NestedMap(
            image=tf.ensure_shape(image, spec.image.shape),
            label=tf.ensure_shape(label, spec.label.shape),
        )

    def _drawn(self, case: Case, index: int):
        """A training patch: image and label."""
        given = self.volumes
        size, kept = self.size(case), given.kept(case)
        rng = np.random.Generator(np.random.Philox(key=[given.seed, index]))
        room = [n - m for n, m in zip(size, self.labelled, strict=True)]
        if given.crop is Crop.WHOLE:
            start = [0, 0, 0]
        else:
            start = [int(rng.integers(n + 1)) for n in room]
            if rng.random() < given.foreground:
                start = _around_a_class(kept, rng, self.labelled, room) or start
        image, label = self._cut(kept.volume, start)
        dims = [dim for dim in given.flips if rng.random() < 0.5]
        return np.flip(image, dims), np.flip(label, dims)

    def _tile(self, case: Case, tile: Tile):
        image, label = self._cut(self.volumes.volume(case), tile.start)
        for dim, (start, fresh) in enumerate(zip(tile.start, tile.fresh, strict=True)):
            label[(slice(None),) * dim + (slice(0, fresh - start),)] = IGNORED
        return image, label

    def _nothing(self):
        spec = self.element_spec(1)
        image = np.zeros(spec.image.shape[1:], np.float32)
        return image, np.full(self.labelled, IGNORED, np.int32)

    def _cut(self, volume: Volume, start: Sequence[int]):
        """The image and label of the patch whose label begins at `start`."""
        patch, labelled = self.volumes.patch, self.labelled
        dims = zip(start, patch, labelled, volume.label.shape, strict=True)
        indices = [_mirrored(i - (n - m) // 2, n, length) for i, n, m, length in dims]
        image = volume.image[np.ix_(*indices)]
        ends = [i + m for i, m in zip(start, labelled, strict=True)]
        label = volume.label[tuple(map(slice, start, ends))]
        missing = [(0, m - n) for n, m in zip(label.shape, labelled, strict=True)]
        return image, np.pad(label, missing, constant_values=IGNORED)


def _mirrored(first: int, size: int, length: int) -> np.ndarray:
    """Indices first, ..., first + size - 1 of a dim, mirrored at its ends."""
    period = max(2 * (length - 1), 1)
    index = np.abs(np.arange(first, first + size)) % period
    return np.where(index < length, index, period - index)


def _around_a_class(kept: KeptVolume, rng, labelled: Size, room) -> list[int] | None:
    """The start of a patch whose middle is a random voxel of a random class."""
    if not kept.voxels:
        return None
    of_class = kept.voxels[rng.integers(len(kept.voxels))]
    voxel = of_class[rng.integers(len(of_class))]
    index = np.unravel_index(voxel, kept.volume.label.shape)
    middles = zip(index, labelled, room, strict=True)
    return [int(np.clip(i - m // 2, 0, most)) for i, m, most in middles]


def _stacked(pairs) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*pairs, strict=True)
    return np.stack(images), np.stack(labels)


@functools.cache
def _size(given: SegmentationInput, case: Case, labelled: Size) -> Size:
    given.classes()
    if case.label is None:
        raise ValueError(
            f"{case.image} has no label: name one for each volume that is trained on "
            "or held out, or leave it out"
        )
    *size, channels = grid(case, spacing=given.spacing)
    if channels != given.channels:
        raise ValueError(
            f"{case.image} has {channels} channels, but SegmentationInput.channels is "
            f"{given.channels}: set it to what the files have"
        )
    both = list(zip(size, labelled, strict=True))
    if given.crop is Crop.WHOLE:
        if any(n > most for n, most in both):
            raise ValueError(
                f"{case.image} has {tuple(size)} voxels, more than the {labelled} that "
                f"whole volumes are labelled at{_AS_READ}: raise "
                "SegmentationInput.patch, widen its spacing, or use Crop.PATCHES"
            )
    elif any(n < least for n, least in both):
        raise ValueError(
            f"{case.image} has {tuple(size)} voxels, less than the {labelled} that "
            f"are labelled of a patch{_AS_READ}: lower SegmentationInput.patch, narrow "
            "its spacing, or use Crop.WHOLE, which pads"
        )
    return tuple(size)


@functools.cache
def _tiles(given: Patches) -> list[Tile]:
    tiles = []
    for number, case in enumerate(given.volumes.cases(Split.HELD_OUT)):
        along = [
            list(_starts(n, m, given.overlap))
            for n, m in zip(given.size(case), given.labelled, strict=True)
        ]
        for corner in itertools.product(*along):
            start, fresh = zip(*corner, strict=True)
            tiles.append(Tile(case=number, start=start, fresh=fresh))
    return tiles


def _starts(length: int, tile: int, overlap: float) -> Iterator[tuple[int, int]]:
    """Where tiles begin along a dim, evenly, and from where each counts."""
    step = max(1, math.floor(tile * (1 - overlap)))
    count = 1 + max(0, -(-(length - tile) // step))
    done = 0
    for i in range(count):
        start = i * max(length - tile, 0) // max(count - 1, 1)
        yield start, done
        done = start + tile
