"""Lines of reports on a screen of 80 columns."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterable, Iterator

from meshwright.framework.sharding.mesh import DeviceMesh

WIDTH = 80
_PART = re.compile(r"[\w-]+:\(\d+\)\d+")


def on_screen(lines: Iterable[str], *meshes: DeviceMesh) -> str:
    """A text of lines, with notes on the parts of the meshes' axes that are in it.

    A line that is wider than the screen goes on below, with a hanging indent; a name
    that is wider than the screen stays whole, as it is to be copied.
    """
    lines = [*lines]
    parts = dict.fromkeys(_PART.findall("\n".join(lines)))
    notes = dict.fromkeys(
        note for part in parts for mesh in meshes for note in _notes(part, mesh)
    )
    return "\n".join(part for line in [*lines, *notes] for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}      ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _notes(name: str, mesh: DeviceMesh) -> Iterator[str]:
    """Which devices `model:(2)2` stands for, if the mesh has such a part."""
    axis = name.partition(":")[0]
    if axis not in mesh.axis_names:
        return
    size = mesh.axis_size(axis)
    with contextlib.suppress(ValueError):  # It may be of the other mesh of two.
        part = mesh.part(name)
        apart = size // part.end
        how = "neighbours" if apart == 1 else f"devices, each {apart} apart"
        yield (
            f"{name} is a part of the axis {axis}, whose {size} devices it divides "
            f"into groups of {part.size} {how}."
        )
