"""Hypothesis strategies: what goes wrong with numbers, words and valid files."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

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


def utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
