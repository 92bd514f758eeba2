"""Pictures with labels, in TFRecord files of `tf.train.Example`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import glob
import hashlib
import os
from typing import Protocol, runtime_checkable

import gin
import numpy as np
import tensorflow as tf

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.input.places import on_disk
from meshwright.tasks.input.record_files import find_records, read_record

# Files whose lengths are read at a time: their disks take the time.
_FILES_AT_A_TIME = 16

_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string, b""),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64, -1),
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """The contents of a record.

    Args:
      name: the record's name, for messages.
      encoded: a JPEG file's bytes.
      label: the label as written, which is from 1 on.
    """

    name: str
    encoded: bytes
    label: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Records:
    """The records of several files, numbered through.

    Args:
      paths: the files.
      first: int64 [files + 1], the number of each file's first record, and the number
        of all records.
      starts: int64 [records], where each record's data begins in its file.
      sizes: int64 [records], bytes of the data.
    """

    paths: tuple[str, ...]
    first: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def picture(self, number: int) -> Picture:
        """Reads a record.

        Raises:
          OSError: its file cannot be read.
          ValueError: the record is not as it was written, is no `tf.train.Example`, or
            lacks a feature.
        """
        file = int(np.searchsorted(self.first, number, side="right")) - 1
        path = self.paths[file]
        name = f"record {number - int(self.first[file])} of {path}"
        start, size = int(self.starts[number]), int(self.sizes[number])
        data = read_record(path, start, size, name=name)
        try:
            features = tf.io.parse_single_example(data, _FEATURES)
        # TensorFlow quotes the record, which need not be text.
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{name} is no tf.train.Example with the features "
                f"{' (bytes) and '.join(_FEATURES)} (a whole number): {reason(error)}"
            ) from error
        encoded, label = (features[feature].numpy() for feature in _FEATURES)
        for feature, missing in zip(_FEATURES, (not encoded, label < 0), strict=True):
            if missing:
                raise ValueError(
                    f"{name} has no {feature!r}: write the file as TensorFlow's "
                    "ImageNet scripts do, or leave it out"
                )
        return Picture(name, encoded, int(label))

    def fingerprint(self) -> str:
        """Digest of file names and record sizes; runs that resume must agree on it."""
        names = "\n".join(os.path.basename(path) for path in self.paths)
        digest = hashlib.sha256(names.encode())
        digest.update(self.first.tobytes())
        digest.update(self.sizes.tobytes())
        return digest.hexdigest()


@runtime_checkable
class PictureFiles(Protocol):
    """A source of labelled pictures, such as `ImageFiles` or `SyntheticImages`."""

    def records(self, split: Split) -> Records:
        """The pictures of a split."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """TFRecord files as TensorFlow's ImageNet scripts write them.

    A record is a `tf.train.Example` with `image/encoded`, the bytes of a JPEG file, and
    `image/class/label`, a number from 1 on. Construction does not touch the file
    system.

    Args:
      train: shell pattern of the files to train on, such as "/data/imagenet/train-*".
      held_out: shell pattern of the files to evaluate on, such as
        "/data/imagenet/validation-*".
    """

    train: str
    held_out: str

    def records(self, split: Split) -> Records:
        """Where the records of a split are; found once in a process.

        Raises:
          FileNotFoundError: no file matches.
          OSError: a file cannot be read.
          ValueError: a file is no TFRecord file, or ends too soon; or there is no
            record.
        """
        field = "train" if split is Split.TRAIN else "held_out"
        return _records(getattr(self, field), f"ImageFiles.{field}")


def reason(error: Exception) -> str:
    """The message of an op's error, without where the op ran."""
    return str(error).split("}} ")[-1].split(" [Op:")[0]


@functools.cache
def _records(pattern: str, field: str) -> Records:
    matching = glob.glob(on_disk(pattern, field))
    paths = sorted(p for p in matching if os.path.isfile(p))
    if not paths:
        raise FileNotFoundError(
            f"no file matches {pattern!r}: set {field} to a pattern of TFRecord files, "
            "such as '/data/imagenet/train-*'"
        )
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        places = list(pool.map(find_records, paths))
    first = np.cumsum([0, *map(len, places)])
    if not first[-1]:
        raise ValueError(f"no record is in the files of {pattern!r}: set {field} anew")
    starts, sizes = np.concatenate(places).T
    return Records(paths=tuple(paths), first=first, starts=starts, sizes=sizes)
