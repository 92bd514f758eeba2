"""TFRecord files: what TensorFlow writes is found, and what is wrong is named."""

import pytest
import tensorflow as tf

from meshwright.tasks.input.record_files import find_records, read_record
from tests.fuzz.valid import record


def test_what_tensorflow_writes_is_found(tmp_path):
    written = [b"one", b"", b"x" * 1000]
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        for record in written:
            writer.write(record)
    places = find_records(tmp_path / "a").tolist()
    assert [read_record(tmp_path / "a", *p, name="it") for p in places] == written


@pytest.mark.parametrize("length", [4, 2**31, 2**40, 2**62, 2**64 - 5])
def test_a_length_beyond_the_file_is_told(tmp_path, length):
    """Of 2**40, TensorFlow's reader ends the process."""
    (tmp_path / "a").write_bytes(record(b"one") + record(b"two", length=length))
    with pytest.raises(ValueError, match="record 1 of .*/a: the file ends within it"):
        find_records(tmp_path / "a")


def test_zeros_are_no_records(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    with pytest.raises(ValueError, match="record 0 of .*/a: the file is no TFRecord"):
        find_records(tmp_path / "a")


@pytest.mark.parametrize("at", [12, 14, 15, 18])
def test_a_bit_that_flipped_is_told(tmp_path, at):
    content = bytearray(record(b"one"))
    content[at] ^= 1
    (tmp_path / "a").write_bytes(content)
    ((start, size),) = find_records(tmp_path / "a").tolist()
    with pytest.raises(ValueError, match="record 7 is not as it was written"):
        read_record(tmp_path / "a", start, size, name="record 7")
