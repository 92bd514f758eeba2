"""Files in folders of a disk, or of a bucket such as `gs://...` by TensorFlow."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Callable, Iterator

import tensorflow as tf


def is_in_bucket(path: str) -> bool:
    """Whether `path` is of a file system of TensorFlow's, such as `gs://bucket/x`."""
    return "://" in path


def is_folder(path: str) -> bool:
    """Whether `path` is a folder.

    Raises:
      OSError: it is in a bucket that cannot be read.
    """
    if not is_in_bucket(path):
        return os.path.isdir(path)
    try:
        return tf.io.gfile.stat(path).is_directory  # isdir would hide errors.
    except tf.errors.NotFoundError:
        return False
    except tf.errors.OpError as error:
        raise _os_error(path, error) from error


def walk(
    folder: str, onerror: Callable[[OSError], object]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, top down.

    Args:
      folder: the folder to begin with.
      onerror: called with the error of a folder that cannot be listed.
    """
    if not is_in_bucket(folder):
        return os.walk(folder, onerror=onerror)
    return tf.io.gfile.walk(
        folder, onerror=lambda error: onerror(_os_error(folder, error))
    )


def read(path: str) -> bytes:
    """The content of a file.

    Raises:
      OSError: it cannot be read, or is a pipe or device, which might never end.
    """
    if not is_in_bucket(path):
        file = pathlib.Path(path)
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is no regular file", path)
        return file.read_bytes()
    try:
        with tf.io.gfile.GFile(path, "rb") as opened:
            return opened.read()
    except tf.errors.OpError as error:
        raise _os_error(path, error) from error


def on_disk(path: str, field: str) -> str:
    """`path` with the user's folder for `~`.

    Raises:
      ValueError: it is in a bucket; the message names `field`, which has it.
    """
    if is_in_bucket(path):
        raise ValueError(
            f"{field} is {path!r}, in a bucket, which this input does not read: copy "
            "the files to a disk"
        )
    return os.path.expanduser(path)


def _os_error(path: str, error: tf.errors.OpError) -> OSError:
    # Some file systems give no reason.
    reason, *_ = error.message.splitlines() or [type(error).__name__]
    return OSError(errno.EIO, reason.rsplit("; ", 1)[-1], path)
