"""TFRecord files: where their records are, and the bytes of a record.

A TFRecord file is a sequence of records without an index: 8 bytes of length, 4 of
checksum, the data, 4 of checksum. One pass over the lengths finds where each record
begins; then any record can be read alone, in any order. TensorFlow's own reader trusts
a length that matches its checksum, and a large enough length ends the process.
"""

from __future__ import annotations

import os
import struct

import google_crc32c
import numpy as np

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_HEAD, _TAIL = 12, 4


def find_records(path: str | os.PathLike) -> np.ndarray:
    """int64 [records, 2]: where each record's data begins in a file, and its size.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no TFRecord file, or ends within a record.
    """
    spans, start, end = [], 0, os.path.getsize(path)
    with open(path, "rb", buffering=0) as opened:
        while start < end:
            head = os.pread(opened.fileno(), _HEAD, start)
            length = head[: _LENGTH.size]
            if head[_LENGTH.size :] != _checksum(length):
                problem = "is no TFRecord file, or not as it was written: leave it out"
                raise ValueError(f"record {len(spans)} of {path}: the file {problem}")
            (size,) = _LENGTH.unpack(length)
            if start + _HEAD + size + _TAIL > end:
                raise ValueError(
                    f"record {len(spans)} of {path}: the file ends within it: copy "
                    "the file anew, or leave it out"
                )
            spans.append((start + _HEAD, size))
            start += _HEAD + size + _TAIL
    return np.array(spans, np.int64).reshape(-1, 2)


def read_record(path: str | os.PathLike, start: int, size: int, *, name: str) -> bytes:
    """The data of a record that `find_records` found.

    Args:
      path: the file's path.
      start: where the data begins.
      size: bytes of data.
      name: the record's name, for messages.

    Raises:
      OSError: the file cannot be read.
      ValueError: the data is not what was written.
    """
    with open(path, "rb", buffering=0) as opened:
        content = os.pread(opened.fileno(), size + _TAIL, start)
    data = content[:size]
    if content[size:] != _checksum(data):
        raise ValueError(
            f"{name} is not as it was written, by its checksum: copy the file anew, or "
            "leave it out"
        )
    return data


def _checksum(data: bytes) -> bytes:
    """CRC32C, rotated and offset as the format has it."""
    crc = google_crc32c.value(data)
    return _CHECKSUM.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)
