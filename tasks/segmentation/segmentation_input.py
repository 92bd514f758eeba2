"""Labelled volumes, and what a patch of them is.

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
import math
from collections.abc import Sequence
from typing import Any

import gin

from meshwright.framework.modeling.checks import Checked, bounded, instance
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.segmentation.volume_cache import KeptVolume, VolumeCache
from meshwright.tasks.segmentation.volume_files import (
    Case,
    Intensities,
    SegmentationFiles,
    Volume,
    load,
)

Size = tuple[int, int, int]


@gin.constants_from_enum
class Crop(enum.Enum):
    """What a row is: a part of a volume, or all of it, padded to one size for all."""

    PATCHES = "patches"
    WHOLE = "whole"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationInput(Checked):
    """Volumes to cut patches from. Making one does not touch the file system.

    A batch of `Patches` is a nested map of tensors:
      image: float32 [rows, X, Y, Z, C].
      label: int32 [rows, U, V, W], the class of each voxel or `IGNORED`.

    Args:
      files: what names volumes: `VolumeFiles` or `SyntheticVolumes`.
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

    files: SegmentationFiles = instance(example="@VolumeFiles()")
    patch: Sequence[int]
    num_classes: int = bounded(at_least=2)
    channels: int = bounded(1, at_least=1)
    crop: Crop = Crop.PATCHES
    spacing: Sequence[float] | None = None
    intensities: Intensities = Intensities()
    flips: Sequence[int] = (0, 1, 2)
    foreground: float = bounded(1 / 3, at_least=0, at_most=1)
    overlap: float = bounded(0.25, at_least=0, below=1)
    cache_bytes: int = bounded(2**31, at_least=0)
    seed: int = bounded(0, at_least=0)

    def __post_init__(self):
        super().__post_init__()
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
        return self.kept(case).volume

    def kept(self, case: Case) -> KeptVolume:
        """As `volume`, with what is found out about it."""
        return _cache(self).get(case)


def _is_size(given: Any, kind: type | tuple[type, ...]) -> bool:
    three = isinstance(given, Sequence) and len(given) == 3
    return three and all(isinstance(n, kind) and 0 < n < math.inf for n in given)


def _are_dims(given: Any) -> bool:
    several = isinstance(given, Sequence) and set(given) <= {0, 1, 2}
    return several and len(set(given)) == len(given)


@functools.cache
def _cache(given: SegmentationInput) -> VolumeCache:
    def read(case: Case) -> Volume:
        how = {"spacing": given.spacing, "intensities": given.intensities}
        return load(case, given.classes(), **how)

    return VolumeCache(read, given.cache_bytes)


def fingerprint(cases: Sequence[Case]) -> str:
    """Of the names of volumes; runs that resume must agree on it."""
    return hashlib.sha256("\n".join(one.name for one in cases).encode()).hexdigest()
