"""Small files that every reader reads, to be broken, and what makes some."""

from __future__ import annotations

import functools
import gzip
import json
import pathlib
import struct
import tempfile

import google_crc32c
import nibabel
import numpy as np
import tensorflow as tf
from safetensors.numpy import save

from meshwright.tasks.text.vocabulary import SentencePieceVocabulary
from tests.tasks.images.image_records import example, gradient, jpeg
from tests.tasks.segmentation.volume_files_on_disk import boxes, image_of
from tests.tasks.text.parallel_files import catalogue, sentences, spell


def wav(
    frames: bytes,
    *,
    kind: int = 1,
    channels: int = 1,
    rate: int = 16000,
    bits: int = 16,
    align: int | None = None,
    per_second: int | None = None,
    before: bytes = b"",
    data_size: int | None = None,
    riff_size: int | None = None,
) -> bytes:
    """A wav file; what is given replaces what would be true."""
    align = channels * bits // 8 if align is None else align
    per_second = rate * align if per_second is None else per_second
    shorts = [n % 2**16 for n in (kind, channels, align, bits)]
    longs = [n % 2**32 for n in (rate, per_second)]
    header = struct.pack("<HHIIHH", *shorts[:2], *longs, *shorts[2:])
    size = len(frames) if data_size is None else data_size
    body = b"WAVEfmt " + struct.pack("<I", len(header)) + header + before
    body += b"data" + struct.pack("<I", size % 2**32) + frames
    size = len(body) if riff_size is None else riff_size
    return b"RIFF" + struct.pack("<I", size % 2**32) + body


def mo(
    entries: list[tuple[bytes, bytes]],
    *,
    places: dict[int, tuple[int, int]] | None = None,
) -> bytes:
    """A catalogue; `places` replaces (length, offset) of some of its 2 N strings."""
    texts = [source for source, _ in entries] + [target for _, target in entries]
    at, table = 28 + 8 * len(texts), []
    for number, text in enumerate(texts):
        table.append((places or {}).get(number, (len(text), at)))
        at += len(text) + 1
    count = len(entries)
    head = struct.pack("<7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, at)
    flat = [number % 2**32 for place in table for number in place]
    return (
        head
        + struct.pack(f"<{len(flat)}I", *flat)
        + b"".join(text + b"\0" for text in texts)
    )


def record(data: bytes, *, length: int | None = None) -> bytes:
    """A TFRecord with right checksums, though its length may be another."""
    head = struct.pack("<Q", len(data) if length is None else length)
    return head + _checksum(head) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Masked, as the format has it."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def features(**values) -> bytes:
    """A `tf.train.Example` of lists of bytes, whole numbers or floats."""
    kinds = {
        bytes: ("bytes_list", tf.train.BytesList),
        int: ("int64_list", tf.train.Int64List),
        float: ("float_list", tf.train.FloatList),
    }
    by_name = {}
    for name, listed in values.items():
        field, kind = kinds[type(listed[0])] if listed else kinds[bytes]
        by_name[name] = tf.train.Feature(**{field: kind(value=listed)})
    return tf.train.Example(
        features=tf.train.Features(feature=by_name)
    ).SerializeToString()


def nifti(values: np.ndarray, **header) -> bytes:
    """A file, not compressed; what is given replaces fields of its header."""
    image = nibabel.Nifti1Image(values, np.diag([1.0, 2.0, 3.0, 1.0]))
    content = bytearray(image.to_bytes())
    dtype = image.header.structarr.dtype
    for name, value in header.items():
        kind, at = dtype.fields[name][:2]
        with np.errstate(all="ignore"):
            new = np.array(value).astype(kind.base).tobytes()
        content[at : at + len(new)] = new
    return bytes(content)


@functools.cache
def subwords() -> bytes:
    """A SentencePiece model of 300 pieces."""
    return SentencePieceVocabulary(vocab_size=300).trained(sentences(200), ["de"]).model


def _mo() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.mo")
        texts = sentences(40)
        catalogue({text: spell("de", text) for text in texts}).save_as_mofile(str(path))
        return path.read_bytes()


_FRAMES = (1000 * np.sin(np.arange(400))).astype("<i2").tobytes()
_LABEL = boxes((6, 5, 4))
_PO = "\n".join(
    ['msgid ""', 'msgstr "Content-Type: text/plain; charset=UTF-8\\n"', ""]
    + [f'msgid "{s}"\nmsgstr "{spell("de", s)}"\n' for s in sentences(40)]
)
PAIRS = [
    features(source=[b"red"], target=[b"rot"], target_language=[b"de"]),
    features(source=[b"tree"], target=[b"Baum"], target_language=[b"de"]),
    features(source=[b"stone"], target=[b"pierre"], target_language=[b"fr"]),
]
_TEXTS = ("red house", "blue bird", "old tree")
_PICTURE = jpeg(gradient(20, 30, 100))
_GIN = b"""include 'lm/stdlib_tiny.gin'
WIDTH = 32
MODEL_DIMS = %WIDTH
Experiment.num_steps = 600
Adam.clip_global_norm = 1.5
Repeat.recompute = %Recompute.NOTHING
"""

CONFIG = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_SHAPES = {
    "model.embed_tokens.weight": (264, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (264, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.post_attention_layernorm.weight": (4,),
    **{f"model.layers.0.self_attn.{w}_proj.weight": (4, 4) for w in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": (6, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 6),
}
_TENSORS = save({name: np.ones(shape, np.float16) for name, shape in _SHAPES.items()})
_CONFIG = json.dumps(CONFIG).encode()
_INDEX = json.dumps({"weight_map": dict.fromkeys(_SHAPES, "a.safetensors")}).encode()

VALID: dict[str, dict[str, bytes]] = {
    "wav": {"a.wav": wav(_FRAMES)},
    "volume": {"a.nii.gz": gzip.compress(nifti(image_of(_LABEL)), 1)},
    "label": {
        "a.nii.gz": gzip.compress(nifti(_LABEL), 1),
        "image.nii.gz": gzip.compress(nifti(image_of(_LABEL)), 1),
    },
    "dataset": {
        "dataset.json": json.dumps(
            {
                "labels": {"0": "background", "1": "liver"},
                "training": [{"image": "a.nii", "label": "b.nii"}],
                "validation": [{"image": "c.nii", "label": "b.nii"}],
            }
        ).encode(),
        **dict.fromkeys(("a.nii", "b.nii", "c.nii"), b""),
    },
    "mo": {"de/LC_MESSAGES/a.mo": _mo()},
    "po": {"de.po": _PO.encode()},
    "tsv": {"en-de.tsv": b"red\trot\nhouse\tHaus\ntree\tBaum\nbird\tVogel\n"},
    "pairs": {"a.tfrecord": b"".join(map(record, PAIRS))},
    "pictures": {
        "a.records": b"".join(
            record(example(encoded=_PICTURE, label=label)) for label in (1, 2, 3)
        )
    },
    "manifest": {
        "manifest.tsv": "".join(f"a.wav\t{text}\n" for text in _TEXTS).encode(),
        "a.wav": b"",
    },
    "objects": {
        "manifest.jsonl": "\n".join(
            json.dumps({"audio": "a.wav", "text": text}) for text in _TEXTS
        ).encode(),
        "a.wav": b"",
    },
    "ratings": {
        "ratings.csv": b"userId,movieId,rating,timestamp\n"
        + b"".join(b"%d,%d,4.0,%d\n" % (n // 4, n % 5, 100 + n) for n in range(20))
    },
    "subwords": {"a.model": subwords()},
    "safetensors": {"model.safetensors": _TENSORS, "config.json": _CONFIG},
    "config": {"config.json": _CONFIG, "model.safetensors": _TENSORS},
    "index": {
        "model.safetensors.index.json": _INDEX,
        "a.safetensors": _TENSORS,
        "config.json": _CONFIG,
    },
    "gin": {"a.gin": _GIN},
    "flags": {"flags": b"--search_batch=8,16\0--profile_steps=1,2"},
}
"""Files by path, for each of `tests.fuzz.readers`; the first is the one to break."""
