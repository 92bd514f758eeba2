"""Folders for each reader: with a valid file broken anyhow, or a hostile one."""

from __future__ import annotations

import gzip

from hypothesis import strategies as st

from tests.fuzz.damage import broken, junk
from tests.fuzz.hostile_binaries import (
    mos,
    niftis,
    pair_records,
    picture_records,
    safetensors,
    wavs,
)
from tests.fuzz.hostile_texts import (
    columns,
    configs,
    datasets,
    flags,
    gins,
    indices,
    objects,
    pos,
    ratings,
)
from tests.fuzz.valid import VALID

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
    "safetensors": safetensors(),
    "config": configs(),
    "index": indices(),
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
