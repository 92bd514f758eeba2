"""Labelled volumes as batches of patches; the state of the input is the step number.

A volume is read when a patch of it is due, and kept while there is room. A patch's
image may be wider than what the model labels of it, its middle: what lies beyond the
volume's ends is then mirrored.

Dims: B batch rows, X Y Z the patch's image, U V W what is labelled of it, C channels.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import check_kind, check_number
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.segmentation.segmentation_loss import IGNORED
from meshwright.tasks.segmentation.volume_cache import KeptVolume, VolumeCache
from meshwright.tasks.segmentation.volume_files import (
    Case,
    Intensities,
    Volume,
    grid,
    load,
)
from meshwright.tasks.text.text_input import (
    Split,
    held_out_steps,
    places,
    shuffled_examples,
    text_dataset,
)

Size = tuple[int, int, int]

_AS_READ = " (axes run right, front and up, voxels are resampled)"
# A batch of volumes may have a gigabyte.
_READY_BATCHES = 2


@gin.constants_from_enum
class Crop(enum.Enum):
    """What a row is: a part of a volume, or all of it, padded to one size for all."""

    PATCHES = "patches"
    WHOLE = "whole"


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a held-out volume.

    Args:
      case: number of the volume in `read(Split.HELD_OUT)`.
      start: first voxel that is labelled; those before `fresh` are in other tiles too.
      fresh: first voxel, along each dim, that no tile before counted.
    """

    case: int
    start: Size
    fresh: Size


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationInput:
    """Batches of patches. Making one does not touch the file system.

    A batch is a nested map of tensors:
      image: float32 [rows, X, Y, Z, C].
      label: int32 [rows, U, V, W], the class of each voxel or `IGNORED`.

    Args:
      files: what names volumes, by `read(split)` and `classes()`: `VolumeFiles` or
        `SyntheticVolumes`.
      patch: X, Y and Z, in voxels.
      num_classes: K, with the background.
      channels: C of the files.
      crop: patches of volumes, or whole volumes of at most that size.
      spacing: mm between voxels along each dim, which all volumes are resampled to;
        None trains on voxels as they come, whatever their spacing.
      intensities: how values of images are scaled.
      flips: the dims, of 0, 1 and 2, along which half of the training patches are
        mirrored.
      foreground: the share of training patches that lie around a voxel of a random
        class but the background.
      overlap: the share of a tile's side that the next one covers again, where whole
        volumes are put together from tiles; below 1.
      cache_bytes: of volumes, decoded, that stay in memory.
      seed: of the order of training, places and flips.

    Raises:
      ValueError: a number out of range, or other than three of them.
    """

    files: Any
    patch: Sequence[int]
    num_classes: int
    channels: int = 1
    crop: Crop = Crop.PATCHES
    spacing: Sequence[float] | None = None
    intensities: Intensities = Intensities()
    flips: Sequence[int] = (0, 1, 2)
    foreground: float = 1 / 3
    overlap: float = 0.25
    cache_bytes: int = 2**31
    seed: int = 0

    def __post_init__(self):
        for name, good, wanted in (
            ("patch", _is_size(self.patch, int), "three whole numbers above 0"),
            (
                "spacing",
                self.spacing is None or _is_size(self.spacing, (int, float)),
                "three numbers above 0, or None",
            ),
            ("flips", _are_dims(self.flips), "some of 0, 1 and 2, each once"),
        ):
            given = getattr(self, name)
            if not good:
                raise ValueError(
                    f"SegmentationInput.{name} is {given!r}: give {wanted}"
                )
            if given is not None:
                object.__setattr__(self, name, tuple(given))
        check_number(self, "num_classes", at_least=2)
        check_number(self, "channels", at_least=1)
        check_number(self, "foreground", at_least=0, at_most=1)
        check_number(self, "overlap", at_least=0, below=1)
        check_number(self, "cache_bytes", at_least=0)
        check_number(self, "seed", at_least=0)
        check_kind(self, "crop", Crop)

    def element_spec(self, batch: int, labelled: Size) -> NestedMap:
        """The `tf.TensorSpec` of each tensor in a batch of so many rows."""
        return NestedMap(
            image=tf.TensorSpec([batch, *self.patch, self.channels]),
            label=tf.TensorSpec([batch, *labelled], tf.int32),
        )

    def classes(self) -> tuple[str, ...]:
        """Their names, the background's first.

        Raises:
          ValueError: they are not `num_classes`.
        """
        found = self.files.classes()
        if len(found) != self.num_classes:
            raise ValueError(
                f"SegmentationInput.num_classes is {self.num_classes}, but the files "
                f"have {len(found)} classes: {', '.join(found)}; set it to that"
            )
        return found

    def cases(self, split: Split) -> tuple[Case, ...]:
        """The volumes of a split; see `VolumeFiles.read`."""
        return tuple(self.files.read(split))

    def volume(self, case: Case) -> Volume:
        """A volume, from memory if it is there.

        Raises:
          FileNotFoundError, ImportError, ValueError: see `load`.
        """
        return _cache(self).get(case).volume

    def train_batches(
        self, start_step: int, *, global_batch: int, rows: range, labelled: Size
    ) -> tf.data.Dataset:
        """Endless batches from `start_step` on.

        Args:
          start_step: number of the first batch.
          global_batch: rows of a step, over all processes.
          rows: which of them to read here; processes may read the same ones.
          labelled: U, V and W.
        """
        cases = self.cases(Split.TRAIN)
        place = places(global_batch, rows)

        def read(place: np.ndarray, case: np.ndarray):
            drawn = zip(place, case, strict=True)
            return _stacked(
                self._drawn(cases[number % len(cases)], int(at), labelled)
                for at, number in drawn
            )

        def batch(step):
            at = place(step)
            case = shuffled_examples(at, count=len(cases), seed=self.seed)
            return self._read(read, [at, case], labelled)

        steps = tf.data.Dataset.range(start_step, tf.int64.max)
        return text_dataset(steps, batch, ready=_READY_BATCHES)

    def held_out_batches(
        self,
        *,
        global_batch: int,
        rows: range,
        labelled: Size,
        overlap: float = 0.0,
        max_batches: int | None = None,
    ) -> tf.data.Dataset:
        """One pass over the held-out volumes, tile by tile; each voxel counts once.

        An element has `tile` too, int32 [rows]: its number in `tiles`, -1 in rows that
        fill up a batch.

        Args:
          global_batch: rows of a step, over all processes.
          rows: which of them to read here.
          labelled: U, V and W.
          overlap: see `tiles`.
          max_batches: read so many at most, spread evenly over all.
        """
        cases, tiles = self.cases(Split.HELD_OUT), self.tiles(labelled, overlap)
        place = places(global_batch, rows)

        def read(number: np.ndarray):
            return _stacked(
                self._tile(cases[tiles[i].case], tiles[i], labelled)
                if i < len(tiles)
                else self._nothing(labelled)
                for i in number
            )

        def batch(step):
            number = place(step)
            out = self._read(read, [number], labelled)
            out.tile = tf.cast(tf.where(number < len(tiles), number, -1), tf.int32)
            return out

        steps = held_out_steps(len(tiles), global_batch, max_batches)
        return text_dataset(steps, batch, ready=_READY_BATCHES)

    def tiles(self, labelled: Size, overlap: float) -> list[Tile]:
        """The tiles that cover the held-out volumes, volume by volume.

        Args:
          labelled: their size.
          overlap: the share of a side that neighbours have in common at least.
        """
        return _tiles(self, labelled, overlap)

    def size(self, case: Case, labelled: Size) -> Size:
        """X, Y and Z of a volume, from its files' headers.

        Raises:
          FileNotFoundError, ImportError: see `load`.
          ValueError: what is there cannot be used, as far as headers tell; it is named.
        """
        return _size(self, case, labelled)

    def _read(self, read, inputs, labelled: Size) -> NestedMap:
        """What `read` gives for `inputs`, with static shapes."""
        kinds = [tf.float32, tf.int32]
        image, label = tf.numpy_function(read, inputs, kinds, stateful=False)
        spec = self.element_spec(inputs[0].shape[0], labelled)
        return NestedMap(
            image=tf.ensure_shape(image, spec.image.shape),
            label=tf.ensure_shape(label, spec.label.shape),
        )

    def _drawn(self, case: Case, place: int, labelled: Size):
        """A training patch: image and label."""
        size, kept = self.size(case, labelled), _cache(self).get(case)
        rng = np.random.Generator(np.random.Philox(key=[self.seed, place]))
        room = [n - m for n, m in zip(size, labelled, strict=True)]
        if self.crop is Crop.WHOLE:
            start = [0, 0, 0]
        else:
            start = [int(rng.integers(n + 1)) for n in room]
            if rng.random() < self.foreground:
                start = _around_a_class(kept, rng, labelled, room) or start
        image, label = self._cut(kept.volume, start, labelled)
        dims = [dim for dim in self.flips if rng.random() < 0.5]
        return np.flip(image, dims), np.flip(label, dims)

    def _tile(self, case: Case, tile: Tile, labelled: Size):
        image, label = self._cut(self.volume(case), tile.start, labelled)
        for dim, (start, fresh) in enumerate(zip(tile.start, tile.fresh, strict=True)):
            label[(slice(None),) * dim + (slice(0, fresh - start),)] = IGNORED
        return image, label

    def _nothing(self, labelled: Size):
        image = np.zeros((*self.patch, self.channels), np.float32)
        return image, np.full(labelled, IGNORED, np.int32)

    def _cut(self, volume: Volume, start: Sequence[int], labelled: Size):
        """Image and label of the patch whose label begins at `start`."""
        dims = zip(start, self.patch, labelled, volume.label.shape, strict=True)
        places = [_mirrored(i - (n - m) // 2, n, length) for i, n, m, length in dims]
        image = volume.image[np.ix_(*places)]
        ends = [i + m for i, m in zip(start, labelled, strict=True)]
        label = volume.label[tuple(map(slice, start, ends))]
        missing = [(0, m - n) for n, m in zip(label.shape, labelled, strict=True)]
        return image, np.pad(label, missing, constant_values=IGNORED)


def _is_size(given: Any, kind: type | tuple[type, ...]) -> bool:
    three = isinstance(given, Sequence) and len(given) == 3
    return three and all(isinstance(n, kind) and 0 < n < math.inf for n in given)


def _are_dims(given: Any) -> bool:
    several = isinstance(given, Sequence) and set(given) <= {0, 1, 2}
    return several and len(set(given)) == len(given)


def _mirrored(first: int, size: int, length: int) -> np.ndarray:
    """Places first, ..., first + size - 1 of a dim, mirrored at its ends."""
    period = max(2 * (length - 1), 1)
    at = np.abs(np.arange(first, first + size)) % period
    return np.where(at < length, at, period - at)


def _around_a_class(kept: KeptVolume, rng, labelled: Size, room) -> list[int] | None:
    """Where a patch begins whose middle is a random voxel of a random class."""
    if not kept.voxels:
        return None
    of_class = kept.voxels[rng.integers(len(kept.voxels))]
    voxel = of_class[rng.integers(len(of_class))]
    at = np.unravel_index(voxel, kept.volume.label.shape)
    middles = zip(at, labelled, room, strict=True)
    return [int(np.clip(i - m // 2, 0, most)) for i, m, most in middles]


def _stacked(pairs) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*pairs, strict=True)
    return np.stack(images), np.stack(labels)


@functools.cache
def _cache(given: SegmentationInput) -> VolumeCache:
    def read(case: Case) -> Volume:
        how = {"spacing": given.spacing, "intensities": given.intensities}
        return load(case, given.classes(), **how)

    return VolumeCache(read, given.cache_bytes)


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
def _tiles(given: SegmentationInput, labelled: Size, overlap: float) -> list[Tile]:
    found = []
    for number, case in enumerate(given.cases(Split.HELD_OUT)):
        size = given.size(case, labelled)
        along = [
            list(_starts(n, m, overlap)) for n, m in zip(size, labelled, strict=True)
        ]
        for corner in itertools.product(*along):
            start, fresh = zip(*corner, strict=True)
            found.append(Tile(case=number, start=start, fresh=fresh))
    return found


def _starts(length: int, tile: int, overlap: float) -> Iterator[tuple[int, int]]:
    """Where tiles begin along a dim, evenly, and where each counts from."""
    step = max(1, math.floor(tile * (1 - overlap)))
    count = 1 + max(0, -(-(length - tile) // step))
    done = 0
    for i in range(count):
        start = i * max(length - tile, 0) // max(count - 1, 1)
        yield start, done
        done = start + tile


def fingerprint(cases: Sequence[Case]) -> str:
    """Of the names of volumes; runs that resume must agree on it."""
    return hashlib.sha256("\n".join(one.name for one in cases).encode()).hexdigest()
