"""Synthetic volumes: ellipsoids and tubes, in noise and uneven light."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from typing import Any

import gin
import numpy as np
from absl import logging

from meshwright.framework.modeling.checks import Checked, bounded, check_value
from meshwright.framework.user_cache import user_cache
from meshwright.tasks.input.atomic_files import atomic_write
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.segmentation.nifti import libraries, write_nifti
from meshwright.tasks.segmentation.volume_files import Case, VolumeFiles

_CLASSES = ("background", "ellipsoid", "tube")
# Mean intensities of the classes, one contrast apart.
_MEANS = np.array([200.0, 300.0, 400.0], np.float32)
_CONTRAST = 100.0
# To be raised when the same settings come to draw other volumes.
_RECIPE = 1
_CURVE_POINTS = 256


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticVolumes(Checked):
    """Volumes with two to four ellipsoids, and one to three curved tubes over them.

    Missing volumes are made when cases are requested, and kept; each is a function of
    the settings and its number. Sizes and voxels differ from volume to volume, shapes
    are drawn in millimetres, and half of the files are askew: turned by up to 10
    degrees, with axes in any order and direction.

    Args:
      folder: the folder of NIfTI files and lists of them; default:
        meshwright/volumes in the user's cache.
      volumes: number of volumes.
      size: voxels along each axis, up to 10 % more or fewer.
      spacing: size of a voxel along each axis in mm, up to 20 % more or less.
      noise: standard deviation, in contrasts from one class to the next.
      bias_field: the share by which the light differs from its mean at most.
      seed: seed of everything.
      held_out_one_in: of every so many volumes the first is held out.

    Raises:
      ValueError: a number is out of range.
    """

    folder: str | None = None
    volumes: int = bounded(40, at_least=2)
    size: tuple[int, int, int] = (48, 48, 32)
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.5)
    noise: float = bounded(0.35, at_least=0)
    bias_field: float = bounded(0.3, at_least=0, below=1)
    seed: int = bounded(0, at_least=0)
    held_out_one_in: int = bounded(5, at_least=2)

    def __post_init__(self):
        super().__post_init__()
        for name, bound in (("size", {"at_least": 8}), ("spacing", {"above": 0})):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != 3:
                raise ValueError(f"SyntheticVolumes.{name} is {values}: give 3 numbers")
            for value in values:
                check_value(f"SyntheticVolumes.{name}", value, **bound)

    def read(self, split: Split) -> list[Case]:
        """As `VolumeFiles.read`, after missing volumes were made.

        Raises:
          ImportError: nibabel or SciPy is missing.
          OSError: the folder cannot be written.
        """
        return VolumeFiles(path=str(_made(self))).read(split)

    def classes(self) -> tuple[str, ...]:
        """The names background, ellipsoid, tube."""
        return _CLASSES

    def _name(self, number: int) -> str:
        settings = (self.size, self.spacing, self.noise, self.bias_field, self.seed)
        return f"{_digest(repr((_RECIPE, *settings)))}-{number:04d}"


@functools.cache
def _made(given: SyntheticVolumes) -> pathlib.Path:
    """The list of volumes; its files are made unless they exist."""
    folder = pathlib.Path(given.folder or user_cache("volumes")).expanduser()
    names = [given._name(number) for number in range(given.volumes)]
    missing = [
        name for name in names if not all(f.is_file() for f in _pair(folder, name))
    ]
    if missing:
        libraries()  # Raises if they are not installed.
        logging.info("making %d volumes, into %s", len(missing), folder)
    for name in missing:
        for path, image in zip(_pair(folder, name), _drawn(given, name), strict=True):
            write_nifti(str(path), image)
    return _written(folder, names, given.held_out_one_in)


def _pair(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    """The paths of image and label."""
    return folder / f"images/{name}.nii.gz", folder / f"labels/{name}.nii.gz"


def _written(folder: pathlib.Path, names: list[str], one_in: int) -> pathlib.Path:
    entries = [
        {"image": f"./images/{name}.nii.gz", "label": f"./labels/{name}.nii.gz"}
        for name in names
    ]
    content = {
        "name": "meshwright synthetic volumes",
        "modality": {"0": "synthetic"},
        "labels": {str(value): name for value, name in enumerate(_CLASSES)},
        "training": [entry for i, entry in enumerate(entries) if i % one_in],
        "validation": entries[::one_in],
    }
    text = json.dumps(content, indent=1)
    path = folder / f"dataset-{_digest(text)}.json"
    if not path.is_file():
        with atomic_write(path) as new:
            new.write_text(text, encoding="utf-8")
    return path


def _drawn(given: SyntheticVolumes, name: str) -> tuple[Any, Any]:
    """The nibabel images of a volume and its labels."""
    rng = np.random.default_rng(int.from_bytes(name.encode(), "big"))
    size = np.rint(given.size * rng.uniform(0.9, 1.1, 3)).astype(int)
    spacing = given.spacing * rng.uniform(0.8, 1.2, 3)
    positions = _places(size, spacing)
    label = _label(rng, positions, size * spacing, spacing.max())
    light = 1 + given.bias_field * _smooth(rng, positions / (size * spacing))
    noise = given.noise * _CONTRAST * rng.standard_normal(size, np.float32)
    image = _MEANS[label] * light + noise
    return _files(rng, image.astype(np.float32), label, spacing)


def _places(size: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """float32 [X, Y, Z, 3]: positions of voxels, in mm from the middle."""
    indices = np.moveaxis(np.indices(size, np.float32), 0, -1)
    return ((indices - (size - 1) / 2) * spacing).astype(np.float32)


def _label(
    rng: np.random.Generator, places: np.ndarray, extent: np.ndarray, coarsest: float
) -> np.ndarray:
    """Labels uint8 [X, Y, Z]; tubes have radii of 2.5 to 4 mm in a volume of 48 mm."""
    label = np.zeros(places.shape[:3], np.uint8)
    smallest = extent.min()
    for _ in range(rng.integers(2, 5)):
        middle = rng.uniform(-0.25, 0.25, 3) * extent
        radii = rng.uniform(0.12, 0.22, 3) * smallest
        label[_ellipsoid(places, middle, radii, _rotation(rng, math.pi))] = 1
    for _ in range(rng.integers(1, 4)):
        radius = max(rng.uniform(0.052, 0.083) * smallest, coarsest)
        label[_tube(places, _curve(rng, extent), radius)] = 2
    return label


def _ellipsoid(places, middle, radii, rotation) -> np.ndarray:
    """bool [X, Y, Z]: whether each of places [X, Y, Z, 3] is inside."""
    along = (places - middle.astype(np.float32)) @ (rotation / radii).astype(np.float32)
    return np.einsum("xyzi,xyzi->xyz", along, along) <= 1


def _tube(places, curve, radius: float) -> np.ndarray:
    """bool [X, Y, Z]: whether each place is within `radius` of points [N, 3]."""
    from scipy.spatial import KDTree

    distance, _ = KDTree(curve).query(places, distance_upper_bound=radius)
    return np.isfinite(distance)


def _curve(rng: np.random.Generator, extent: np.ndarray) -> np.ndarray:
    """float64 [N, 3]: a cubic Bézier curve, most of the way along one axis."""
    controls = rng.uniform(-0.4, 0.4, [4, 3])
    controls[:, rng.integers(3)] = np.linspace(-0.4, 0.4, 4)
    t = np.linspace(0, 1, _CURVE_POINTS)[:, None]
    weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3]
    return np.concatenate(weights, axis=1) @ controls * extent


def _smooth(rng: np.random.Generator, places: np.ndarray) -> np.ndarray:
    """[X, Y, Z], largest 1 or smallest -1: waves as long as the volume, or longer."""
    waves = rng.uniform(-2 * math.pi, 2 * math.pi, [3, 3])
    field = np.cos(places @ waves + rng.uniform(0, 2 * math.pi, 3)).sum(-1)
    return field / np.abs(field).max()


def _rotation(rng: np.random.Generator, most: float) -> np.ndarray:
    """float64 [3, 3]: rotation by at most `most` about a random axis (Rodrigues)."""
    axis = rng.standard_normal(3)
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = rng.uniform(-most, most)
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def _files(rng: np.random.Generator, image, label, spacing) -> tuple[Any, Any]:
    """nibabel images: int16 with a scale, and uint8; in half of the cases askew."""
    nibabel, _ = libraries()
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = rng.uniform(-100, 100, 3)
    if rng.integers(2):
        affine[:3, :3] = _rotation(rng, math.radians(10)) @ affine[:3, :3]
        orientation = np.stack([rng.permutation(3), rng.choice([-1, 1], 3)], axis=1)
        affine = affine @ nibabel.orientations.inv_ornt_aff(orientation, image.shape)
        image, label = (
            nibabel.apply_orientation(array, orientation) for array in (image, label)
        )
    images = []
    for values, dtype in ((image, np.int16), (label, np.uint8)):
        file = nibabel.Nifti1Image(values, affine)
        file.set_data_dtype(dtype)
        file.header.set_xyzt_units("mm")
        images.append(file)
    return tuple(images)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
