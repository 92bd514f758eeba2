"""Synthetic pictures: one shape each, plain or striped, on another colour."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib

import gin
import numpy as np
import tensorflow as tf
from absl import logging

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.user_cache import user_cache
from meshwright.tasks.images.image_files import ImageFiles, Records
from meshwright.tasks.input.atomic_files import atomic_write
from meshwright.tasks.input.example_order import Split

_SHAPES = ("disc", "square", "triangle", "cross")
_TEXTURES = ("plain", "striped")
CLASSES = tuple(f"{texture} {shape}" for shape in _SHAPES for texture in _TEXTURES)
"""The meanings of the labels 1, 2, ..."""

# To be raised when the same settings come to draw other pictures.
_RECIPE = 1
_FILES = 4
# Least distance between two colours of a picture; black and white are 1.7 apart.
_CONTRAST = 0.5


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticImages(Checked):
    """Pictures of eight classes: a disc, square, triangle or cross, plain or striped.

    Colours, places, sizes, angles and the light are random, so that only shape and
    texture tell classes apart. Missing files are made when records are requested, in
    the form that `ImageFiles` reads, and kept; each picture is a function of the
    settings and its number.

    Args:
      folder: where the files are kept; default: meshwright/images in the user's
        cache.
      train: number of pictures to train on.
      held_out: number of pictures to evaluate on.
      size: sides of the pictures.
      noise: standard deviation of the noise on each colour, which is from 0 to 1.
      seed: seed of everything.

    Raises:
      ValueError: a number is out of range.
    """

    folder: str | None = None
    train: int = bounded(4096, at_least=1)
    held_out: int = bounded(1000, at_least=1)
    size: int = bounded(64, at_least=8)
    noise: float = bounded(0.1, at_least=0)
    seed: int = bounded(0, at_least=0)

    def records(self, split: Split) -> Records:
        """As `ImageFiles.records`, after missing files were made.

        Raises:
          OSError: the folder cannot be written.
        """
        train, held_out = (_made(self, s) for s in (Split.TRAIN, Split.HELD_OUT))
        return ImageFiles(train=train, held_out=held_out).records(split)


@functools.cache
def _made(given: SyntheticImages, split: Split) -> str:
    """A pattern of files, which are made unless they exist."""
    count = given.train if split is Split.TRAIN else given.held_out
    settings = (_RECIPE, split.value, count, given.size, given.noise, given.seed)
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    folder = pathlib.Path(given.folder or user_cache("images")).expanduser()
    names = [f"{split.value}-{digest}-{i:05d}-of-{_FILES:05d}" for i in range(_FILES)]
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        if not (folder / name).is_file():
            logging.info("making pictures, into %s", folder / name)
            with atomic_write(folder / name) as new:
                part = range(i * count // _FILES, (i + 1) * count // _FILES)
                _write(new, given, split, part)
    return str(folder / f"{split.value}-{digest}-*")


def _write(
    path: pathlib.Path, given: SyntheticImages, split: Split, numbers: range
) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers:
            index = 2 * number + (split is Split.HELD_OUT)
            rng = np.random.Generator(np.random.Philox(key=[given.seed, index]))
            # By turns, so that each class has as many.
            kind = number % len(CLASSES)
            image = _drawn(rng, kind, given.size, given.noise)
            writer.write(_example(image, kind + 1).SerializeToString())


def _example(image: np.ndarray, label: int) -> tf.train.Example:
    jpeg = tf.io.encode_jpeg(image, quality=95).numpy()
    values = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg])),
        "image/class/label": tf.train.Feature(
            int64_list=tf.train.Int64List(value=[label])
        ),
    }
    return tf.train.Example(features=tf.train.Features(feature=values))


def _drawn(rng: np.random.Generator, kind: int, size: int, noise: float) -> np.ndarray:
    """A picture uint8 [size, size, 3] of class number `kind`."""
    shape, texture = divmod(kind, len(_TEXTURES))
    x, y = _places(rng, size)
    behind, front, stripe = _colours(rng)
    inside = _inside(_SHAPES[shape], x, y)[..., None]
    image = np.where(inside, front, behind)
    if _TEXTURES[texture] == "striped":
        waves = np.sin(rng.uniform(3, 5) * math.pi * x + rng.uniform(0, 2 * math.pi))
        image = np.where(inside & (waves > 0)[..., None], stripe, image)
    ramp = rng.uniform(-0.15, 0.15, 2) @ np.indices([size, size]).reshape(2, -1) / size
    image += ramp.reshape(size, size, 1) + noise * rng.standard_normal(image.shape)
    return np.rint(255 * np.clip(image, 0, 1)).astype(np.uint8)


def _places(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[size, size] each: pixels' coordinates in the frame of the shape, of radius 1."""
    rows, columns = np.indices([size, size]) / (size - 1) - 0.5
    radius = rng.uniform(0.2, 0.35)
    down, right = rng.uniform(-0.5 + radius, 0.5 - radius, 2)
    angle = rng.uniform(0, 2 * math.pi)
    rows, columns = (rows - down) / radius, (columns - right) / radius
    x = math.cos(angle) * columns + math.sin(angle) * rows
    return x, math.cos(angle) * rows - math.sin(angle) * columns


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """bool, like both: whether a point is in the shape; all fit into radius 1."""
    if shape == "disc":
        return np.hypot(x, y) < 0.85
    if shape == "square":
        return np.maximum(abs(x), abs(y)) < math.sqrt(0.5)
    if shape == "triangle":
        return (y < 0.5) & (abs(x) * math.sqrt(3) < y + 1)
    return (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 0.95)


def _colours(rng: np.random.Generator) -> np.ndarray:
    """[3, 3], each in [0, 1]: three colours, none near another."""
    while True:
        colours = rng.random([3, 3])
        apart = np.linalg.norm(colours - np.roll(colours, 1, axis=0), axis=-1)
        if apart.min() > _CONTRAST:
            return colours
