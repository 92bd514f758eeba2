"""TFRecord files: where their records are, and the bytes of one.

A TFRecord file is a sequence of records without an index: 8 bytes of length, 4 of
checksum, the data, 4 of checksum. One pass over the lengths finds where each begins;
then any of them can be read alone, in any order. TensorFlow's own reader believes a
length that its checksum bears out, and a large enough one ends the process.
"""

from __future__ import annotations

import os
import struct

import google_crc32c
import numpy as np

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_HEAD, _TAIL = 12, 4


def find_records(path: str | os.PathLike) -> np.ndarray:
    """int64 [records, 2]: where the data of each record of a file begins, and its size.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is none of records, or ends within one.
    """
    found, at, end = [], 0, os.path.getsize(path)
    with open(path, "rb", buffering=0) as opened:
        while at < end:
            head = os.pread(opened.fileno(), _HEAD, at)
            length = head[: _LENGTH.size]
            if head[_LENGTH.size :] != _checksum(length):
                problem = "is no TFRecord file, or not as it was written: leave it out"
                raise ValueError(f"record {len(found)} of {path}: the file {problem}")
            (size,) = _LENGTH.unpack(length)
            if at + _HEAD + size + _TAIL > end:
                raise ValueError(
                    f"record {len(found)} of {path}: the file ends within it: copy the "
                    "file anew, or leave it out"
                )
            found.append((at + _HEAD, size))
            at += _HEAD + size + _TAIL
    return np.array(found, np.int64).reshape(-1, 2)


def read_record(path: str | os.PathLike, start: int, size: int, *, name: str) -> bytes:
    """The data of a record that `find_records` found.

    Args:
      path: of the file.
      start: where the data begins.
      size: bytes of data.
      name: of the record, for messages.

    Raises:
      OSError: the file cannot be read.
      ValueError: the data is not what was written.
    """
    with open(path, "rb", buffering=0) as opened:
        whole = os.pread(opened.fileno(), size + _TAIL, start)
    data = whole[:size]
    if whole[size:] != _checksum(data):
        raise ValueError(
            f"{name} is not as it was written, says its checksum: copy the file anew, "
            "or leave it out"
        )
    return data


def _checksum(data: bytes) -> bytes:
    """CRC32C, turned and shifted as the format has it."""
    crc = google_crc32c.value(data)
    return _CHECKSUM.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)
