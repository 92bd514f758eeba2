"""Sounds, volumes, catalogues and records that are hostile by design."""

from __future__ import annotations

import functools
import gzip
import json
import struct

import numpy as np
from hypothesis import strategies as st

from tests.fuzz import valid
from tests.fuzz.damage import broken, floats, junk, numbers, utf8, words
from tests.tasks.images.image_records import gradient, jpeg
from tests.tasks.segmentation.volume_files_on_disk import boxes


def wavs() -> st.SearchStrategy[bytes]:
    """Headers that lie, rates that are absurd, samples that are no numbers."""
    ints = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=32)
    frames = (
        junk
        | ints.map(lambda values: np.array(values, "<i4").tobytes())
        | st.lists(floats, max_size=16).map(lambda v: np.array(v, "<f8").tobytes())
        | st.lists(floats, max_size=16).map(_singles)
    )
    few = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 24, 32, 33, 64, 65535])
    rates = st.sampled_from([0, 1, 8000, 16000, 44101, 192000, 2**32 - 5]) | numbers
    claimed = st.none() | numbers
    return st.builds(
        valid.wav,
        frames,
        kind=st.sampled_from([1, 1, 3, 3, 0, 2, 6, 0xFFFE, 0xFFFF]),
        channels=few,
        rate=rates,
        bits=few,
        align=st.none() | few,
        per_second=claimed,
        before=junk
        | st.builds(
            _chunk, st.sampled_from([b"LIST", b"fmt ", b"ds64"]), numbers, junk
        ),
        data_size=claimed,
        riff_size=claimed,
    )


def safetensors() -> st.SearchStrategy[bytes]:
    """Headers that lie about shapes, places and themselves."""
    name = st.sampled_from(["model.norm.weight", "lm_head.weight", "x"]) | words
    number = st.integers(-1, 32) | st.integers(-(2**64), 2**64)
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F8_E4M3", "F4"]),
            "shape": st.lists(number, max_size=3),
            "data_offsets": st.lists(number, min_size=1, max_size=3),
        }
    )
    header = st.dictionaries(name, entry, max_size=3).map(
        lambda said: json.dumps(said).encode()
    )
    return st.builds(
        lambda text, size, data: (
            struct.pack("<Q", len(text) if size is None else size % 2**64) + text + data
        ),
        header | junk,
        st.none() | st.none() | numbers,
        junk,
    )


def _singles(values: list[float]) -> bytes:
    with np.errstate(all="ignore"):
        return np.array(values).astype("<f4").tobytes()


def _chunk(name: bytes, size: int, content: bytes) -> bytes:
    return name + struct.pack("<I", size % 2**32) + content


def niftis() -> st.SearchStrategy[bytes]:
    """Headers with any dims, types, offsets, scales and affines; a bomb among them."""
    dims = st.lists(
        st.sampled_from([1, 2, 3, 6, 0, -1, 32767, -32768]), min_size=8, max_size=8
    )
    row = st.lists(floats, min_size=4, max_size=4)
    fields = st.fixed_dictionaries(
        {},
        optional={
            "sizeof_hdr": numbers,
            "dim": dims | dims.map(lambda listed: [3, *listed[1:]]),
            "datatype": st.sampled_from(
                [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1536, 1792, 2304, 9999]
            ),
            "bitpix": numbers,
            "pixdim": st.lists(floats, min_size=8, max_size=8),
            "vox_offset": floats,
            "scl_slope": floats,
            "scl_inter": floats,
            "xyzt_units": st.integers(0, 255),
            "qform_code": st.integers(-2, 5),
            "sform_code": st.integers(-2, 5),
            "quatern_b": floats,
            "srow_x": row,
            "srow_y": row,
            "srow_z": row,
            "magic": st.binary(min_size=4, max_size=4) | st.just(b"n+1\0"),
        },
    )
    label = boxes((6, 5, 4))
    plain = fields.map(lambda changed: valid.nifti(label, **changed))
    tails = st.sampled_from([b"", gzip.compress(bytes(10)), _bomb()])
    return st.builds(lambda file, tail: gzip.compress(file, 1) + tail, plain, tails)


@functools.cache
def _bomb() -> bytes:
    """2 MiB that become 2 GiB: gzip joins what parts it is given."""
    return gzip.compress(bytes(2**24)) * 128


def mos() -> st.SearchStrategy[bytes]:
    """Strings beyond the file, over each other, in no charset; plurals with code."""
    text = junk | words.map(utf8)
    charset = st.sampled_from(
        [
            b"UTF-8",
            b"latin-1",
            b"utf-16",
            b"utf-7",
            b"zlib",
            b"hex",
            b"rot13",
            b"idna",
            b"punycode",
            b"undefined",
            b"unicode_escape",
            b"no-such",
            b"os",
            b"mbcs",
            b"cp037",
        ]
    )
    plural = st.sampled_from(
        [
            b"n != 1",
            b"__import__('os').system('touch pwned')",
            b"(" * 5000,
            b"1/0",
            b"n**n**n",
        ]
    )
    header = st.builds(
        lambda charset, plural: (
            b"Content-Type: text/plain; charset=%s\nPlural-Forms: "
            b"nplurals=2; plural=%s;\nLanguage: de\n" % (charset, plural)
        ),
        charset,
        plural,
    )
    entries = st.lists(st.tuples(text, text), min_size=1, max_size=6)
    place = st.tuples(numbers, numbers) | st.tuples(
        st.integers(0, 400), st.integers(0, 400)
    )
    return st.builds(
        lambda header, entries, places: valid.mo(
            [(b"", header), *entries], places=places
        ),
        header,
        entries,
        st.dictionaries(st.integers(0, 13), place, max_size=4),
    )


def records(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """TFRecords with right checksums, and lengths that may be other than true."""
    record = st.builds(
        lambda d, n: valid.record(d, length=n), data, st.none() | numbers
    )
    good = data.map(valid.record)
    return st.lists(good | good | record, max_size=4).map(b"".join)


def pair_records() -> st.SearchStrategy[bytes]:
    """Features that are missing, of another type, several, in no UTF-8."""
    names = ("source", "target", "target_language")
    value = _values(words.map(utf8) | junk)
    examples = st.fixed_dictionaries({}, optional=dict.fromkeys(names, value))
    pairs = st.sampled_from(valid.PAIRS)
    return records(
        examples.map(lambda fields: valid.features(**fields))
        | pairs
        | pairs.flatmap(broken)
        | junk
    )


def picture_records() -> st.SearchStrategy[bytes]:
    """Pictures that are none, of any size, with any label."""
    picture = jpeg(gradient(20, 30, 100))
    size = st.tuples(st.integers(0, 65535), st.integers(0, 65535))
    pictures = (
        broken(picture)
        | junk
        | size.map(lambda hw: _sized(picture, *hw))
        | st.just(picture)
    )
    labels = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4)
    intact = st.builds(
        lambda picture, label: valid.features(
            **{"image/encoded": [picture], "image/class/label": [label]}
        ),
        pictures,
        labels,
    )
    names = ("image/encoded", "image/class/label")
    odd = st.fixed_dictionaries({}, optional=dict.fromkeys(names, _values(junk)))
    return records(
        intact | intact | odd.map(lambda fields: valid.features(**fields)) | junk
    )


def _sized(picture: bytes, height: int, width: int) -> bytes:
    """A picture whose header says another height and width."""
    at = picture.index(b"\xff\xc0") + 5
    return picture[:at] + struct.pack(">HH", height, width) + picture[at + 4 :]


def _values(content: st.SearchStrategy[bytes]):
    """Lists of one type, as features have."""
    integers = st.integers(-(2**63), 2**63 - 1)
    number = st.floats(width=32, allow_nan=False)
    return (
        content.map(lambda value: [value])
        | st.lists(content, max_size=3)
        | st.lists(integers, min_size=1, max_size=3)
        | st.lists(number, min_size=1, max_size=3)
    )
