"""The messages that docs/help/troubleshooting.md names are in the sources."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "help" / "troubleshooting.md").read_text()
# The first column of a row, where it is a message: words in backticks.
MESSAGES = re.findall(r"^\| (`[^|]*`)[^|]*\|", PAGE, re.MULTILINE)


@functools.cache
def texts() -> str:
    """All texts of the rooms, each on a line of its own, placeholders left out."""
    found = []
    for room in ("framework", "layers", "tasks", "trainers"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(" ".join(node.value.split()))
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_sources(message):
    for quoted in re.findall(r"`([^`]+)`", message):
        for piece in quoted.split(" ... "):
            assert piece.removesuffix(" ...") in texts(), piece


def test_there_are_messages():
    assert len(MESSAGES) > 12
