"""Text of others, fit for a terminal."""

from __future__ import annotations

_MOST_CHARACTERS = 5000


def printable(text: str) -> str:
    """An error's text, escaped and not too long, whatever it quotes of a file."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}... ({len(text)} characters)"
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)
