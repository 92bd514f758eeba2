"""Labelled volumes, and the patches to cut from them.

A volume is read when a patch of it is due, and kept while there is room. A patch's
image may be wider than its middle, which the model labels: beyond the volume's ends the
image is then mirrored.

Dims: B batch rows, X Y Z the patch's image, U V W its labelled part, C channels.
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
from meshwright.tasks.input.example_order import SEEDS, Split
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
    """The contents of a row: a part of a volume, or all of it, padded to one size."""

    PATCHES = "patches"
    WHOLE = "whole"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationInput(Checked):
    """Volumes to cut patches from. Construction does not touch the file system.

    A batch of `Patches` is a nested map of tensors:
      image: float32 [rows, X, Y, Z, C].
      label: int32 [rows, U, V, W], the class of each voxel or `IGNORED`.

    Args:
      files: the source of volumes: `VolumeFiles` or `SyntheticVolumes`.
      patch: X, Y and Z, in voxels.
      num_classes: K, including the background.
      channels: C, of the files.
      crop: patches of volumes, or whole volumes of at most that size.
      spacing: mm between voxels along each dim, which all volumes are resampled to;
        None trains on voxels as they are, whatever their spacing.
      intensities: how values of images are scaled.
      flips: the dims, of 0, 1 and 2, along which half of the training patches are
        mirrored.
      foreground: the share of training patches around a voxel of a random class but the
        background.
      overlap: the share of a tile's side that the next tile covers again, where volumes
        are assembled from tiles; below 1.
      cache_bytes: bytes of decoded volumes that stay in memory.
      seed: seed of the training order, places and flips.

    Raises:
      ValueError: a number is out of range, or there are other than three.
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
    seed: int = bounded(0, **SEEDS)

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
        """The classes' names, the background's first.

        Raises:
          ValueError: their number is not `num_classes`.
        """
        names = self.files.classes()
        if len(names) != self.num_classes:
            raise ValueError(
                f"SegmentationInput.num_classes is {self.num_classes}, but the files "
                f"have {len(names)} classes: {', '.join(names)}; set it to that"
            )
        return names

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
        """As `volume`, with the voxels of its classes."""
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
    """Digest of the names of volumes; runs that resume must agree on it."""
    return hashlib.sha256("\n".join(case.name for case in cases).encode()).hexdigest()
