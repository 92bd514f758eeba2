"""Hypothesis strategies: valid files broken anyhow, and files hostile by design."""

from __future__ import annotations

import functools
import gzip
import json
import struct

import numpy as np
from hypothesis import strategies as st

from tests.fuzz import valid
from tests.fuzz.valid import VALID
from tests.tasks.images.image_records import gradient, jpeg
from tests.tasks.segmentation.volume_files_on_disk import boxes

# Where sizes, offsets and counts go wrong.
_NUMBERS = (0, 1, 2, 3, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31)
_NUMBERS += (2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 5, 2**64 - 1)
numbers = st.sampled_from(_NUMBERS) | st.integers(0, 2**64 - 1)
floats = st.floats() | st.sampled_from([1e-30, 1e30, 3e38, 1e300, -0.0])
junk = st.binary(max_size=64)
words = st.text(max_size=8) | st.sampled_from(
    ["", "\0", "\n", "\t", "..", "/", "/dev/zero", "a" * 5000, "\ud800", "\x1b[2J", "é"]
)


@st.composite
def broken(draw, content: bytes) -> bytes:
    """A valid file after a few accidents."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(1, 32)))
        new = draw(_instead(content[at:end]))
        content = content[:at] + new + content[end:]
    if draw(st.integers(0, 4)) == 0:
        content = content[: draw(st.integers(0, len(content)))]
    return content


def _instead(part: bytes) -> st.SearchStrategy[bytes]:
    """A bit flips, a number is another; a part goes, comes twice, is junk."""
    number = st.builds(_packed, numbers, st.sampled_from("<>"), st.sampled_from("BHIQ"))
    flipped = st.integers(0, 7).map(lambda bit: _flipped(part, bit))
    return flipped | number | st.sampled_from([b"", part * 2]) | junk


def _flipped(part: bytes, bit: int) -> bytes:
    return bytes([part[0] ^ 1 << bit]) + part[1:] if part else part


def _packed(number: int, order: str, kind: str) -> bytes:
    size = struct.calcsize(kind)
    return struct.pack(order + kind, number % 256**size)


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
    text = junk | words.map(_utf8)
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


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def pos() -> st.SearchStrategy[bytes]:
    """Lines of catalogues in any order."""
    keyword = st.sampled_from(
        [
            "msgid",
            "msgstr",
            "msgctxt",
            "msgid_plural",
            "msgstr[0]",
            "msgstr[9]",
            "msgstr[]",
            "msgstr[-1]",
            "#,",
            "#:",
            "#|",
            "#~",
            "#~|",
            "#.",
            "#",
            "",
            "domain",
        ]
    )
    quoted = words.map(lambda text: json.dumps(text)) | words
    line = st.builds(lambda *parts: " ".join(parts), keyword, quoted)
    return st.lists(line, max_size=20).map(lambda lines: _utf8("\n".join(lines)))


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
    value = _values(words.map(_utf8) | junk)
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


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)
    ),
    max_leaves=8,
)
_deep = st.sampled_from(
    ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "NaN", "-Infinity"]
)


def datasets() -> st.SearchStrategy[bytes]:
    """Objects with the right keys and anything under them; nesting without end."""
    path = st.sampled_from(["a.nii", "b.nii", "c.nii", "./a.nii", "d.txt"]) | words
    case = st.fixed_dictionaries({"image": path | _json, "label": path | _json}) | _json
    labels = st.dictionaries(
        st.sampled_from(["0", "1", "2", "01", "-1", "x", "9" * 5000, "²"]),
        words | _json,
        max_size=3,
    )
    cases = st.lists(case, max_size=3) | _json
    content = st.fixed_dictionaries(
        {}, optional={"labels": labels | _json, "training": cases, "validation": cases}
    )
    return content.map(_dumped) | _json.map(_dumped) | _deep.map(str.encode)


def _dumped(content) -> bytes:
    return json.dumps(content).encode()


def objects() -> st.SearchStrategy[bytes]:
    """Lines of JSON: utterances, nearly, and anything else."""
    audio = st.just("a.wav") | words | _json
    entry = st.fixed_dictionaries({}, optional={"audio": audio, "text": words | _json})
    line = entry.map(_dumped) | _json.map(_dumped) | _deep.map(str.encode) | junk
    return st.lists(line, max_size=5).map(b"\n".join)


def columns(first: str) -> st.SearchStrategy[bytes]:
    """Lines of columns that tabs part."""
    cells = st.lists(st.just(first) | words, min_size=1, max_size=3)
    line = cells.map(lambda row: _utf8("\t".join(row))) | junk
    return st.lists(line, max_size=5).map(b"\n".join)


def ratings() -> st.SearchStrategy[bytes]:
    """Columns in any order, values that are no numbers or too large ones."""
    names = ["userId", "movieId", "rating", "timestamp"]
    header = st.permutations(names) | st.lists(st.sampled_from(names), max_size=5)
    value = st.integers(-(2**70), 2**70).map(str) | st.integers(0, 3).map(str)
    value |= st.sampled_from(
        ["", "1.0", "1_0", "#", '"1"', "nan", "٣", " 1 ", "0x1", "9" * 5000]
    )
    row = st.lists(value, min_size=4, max_size=4) | st.lists(value | words, max_size=5)
    small = st.lists(st.integers(0, 3).map(str), min_size=4, max_size=4)
    return st.builds(
        lambda header, rows: _utf8("\n".join(",".join(row) for row in (header, *rows))),
        header,
        st.lists(small | small | row, max_size=12),
    )


def gins() -> st.SearchStrategy[bytes]:
    """Bindings of known and unknown names to literals, references and worse."""
    name = st.sampled_from(
        [
            "Experiment.num_steps",
            "Experiment.task",
            "Experiment.seed",
            "Experiment.plan",
            "Experiment.global_batch",
            "MODEL_DIMS",
            "MESH_SHAPE",
            "NUM_LAYERS",
            "Adam.beta1",
            "Adam.learning_rate",
            "TextFiles.root",
            "TextFiles.excluded_dirs",
            "TextInput.seed",
            "LinearWarmup.schedule",
            "a/b/Adam.beta1",
            "NEW",
            "Repeat.body",
            "x.y.z",
            "gin.macro.value",
            "os.system.command",
            "ShardingPlan.weights",
            "Experiment.activation_dtype",
        ]
    )
    value = st.one_of(
        _json.map(repr),
        st.integers(-(10**40), 10**40).map(str),
        floats.map(repr),
        words.map(repr),
        words,
        st.sampled_from(
            [
                "%NEW",
                "%MODEL_DIMS",
                "[%NEW, %NEW]",
                "@Adam()",
                "@Adam",
                "@Experiment()",
                "%gin.REQUIRED",
                "@os.system()",
                "@gin.singleton()",
                "__import__('os').system('touch pwned')",
                "1 if True else 2",
                "lambda: 0",
                "1+1",
                "9**9**9",
                "'a' * 10**9",
                "{[]: 1}",
                "[" * 3000,
                "(" * 100 + ")" * 100,
                "-" * 3000 + "1",
                "9" * 5000,
                "1e999",
                "{" * 150 + "}" * 150,
                "b'\\xff'",
                "'\\ud800'",
                "f'{1}'",
                "...",
                "()",
                "(2, 4)",
                "0",
                "None",
                "float('nan')",
            ]
        ),
    )
    line = st.one_of(
        st.builds("{} = {}".format, name, value),
        st.builds("{} = {}".format, name, value),
        st.builds("{}:\n  {} = {}".format, name, words, value),
        words.map("include {!r}".format),
        st.sampled_from(
            [
                "include 'a.gin'",
                "include 'lm/stdlib_tiny.gin'",
                "include '/etc'",
                "include '/dev/zero'",
                "from __gin__ import dynamic_registration",
                "import os",
                "import antigravity",
                "import pickle",
                "from os import system",
                "import tests.fuzz.planted as p",
                "# é",
                "\x0c",
                "\\",
                "'''",
                "Adam.beta1 =",
                "\t\tx",
            ]
        ),
    )
    start = st.sampled_from(["include 'lm/stdlib_tiny.gin'", ""])
    return st.builds(
        lambda start, lines: _utf8("\n".join([start, *lines, ""])),
        start,
        st.lists(line, max_size=4),
    )


def flags() -> st.SearchStrategy[bytes]:
    """Words of a command line, with odd values for flags there are."""
    name = st.sampled_from(
        [
            "gin_file",
            "gin_param",
            "device_count",
            "profile_steps",
            "json_out",
            "html_out",
            "search_batch",
            "search_microbatches",
            "search_budget",
            "search_jobs",
            "mode",
            "platform",
            "topology",
            "model_dir",
            "no_such",
        ]
    )
    value = words | st.sampled_from(
        [
            "-1",
            "0",
            "9" * 30,
            "9" * 5000,
            "1,2",
            "1,,2",
            "٣,4",
            "²",
            "1e3",
            "nan",
            "/",
            "a/b/c",
            "x\ny",
            "train",
            "tpu",
        ]
    )
    word = st.builds("--{}={}".format, name, value) | words
    return st.lists(word, max_size=4).map(lambda listed: _utf8("\0".join(listed)))


HOSTILE: dict[str, st.SearchStrategy[bytes]] = {
    "wav": wavs(),
    "volume": niftis(),
    "label": niftis(),
    "dataset": datasets(),
    "mo": mos(),
    "po": pos(),
    "tsv": columns("red"),
    "pairs": pair_records(),
    "pictures": picture_records(),
    "manifest": columns("a.wav"),
    "objects": objects(),
    "ratings": ratings(),
    "gin": gins(),
    "flags": flags(),
}
"""Files that are hostile by design, for readers whose format has a structure."""


def cases(reader: str) -> st.SearchStrategy[dict[str, bytes]]:
    """Folders for a reader, with one hostile file."""
    name, content = next(iter(VALID[reader].items()))
    drawn = [broken(content), HOSTILE.get(reader, junk), st.binary(max_size=400)]
    if name.endswith(".gz"):  # What gzip would notice is not all that can be wrong.
        inner = gzip.decompress(content)
        drawn.append(broken(inner).map(lambda data: gzip.compress(data, 1)))
    # Hostile ones first and twice, as they go deepest.
    drawn.insert(0, drawn[1])
    return st.one_of(*drawn).map(lambda data: {**VALID[reader], name: data})
