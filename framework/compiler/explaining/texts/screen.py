"""Lines of reports on a screen of 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

from meshwright.framework.sharding.mesh import DeviceMesh

WIDTH = 80
_PART = re.compile(r"[\w-]+:\(\d+\)\d+")


def on_screen(lines: Iterable[str], mesh: DeviceMesh) -> str:
    """A text of lines, with notes on the parts of axes that are in it.

    A line that is wider than the screen goes on below, with a hanging indent.
    """
    lines = [*lines]
    notes = _notes_on_parts("\n".join(lines), mesh)
    return "\n".join(part for line in [*lines, *notes] for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=f"{indent}      ",
        break_on_hyphens=False,
    )


def _notes_on_parts(text: str, mesh: DeviceMesh) -> Iterator[str]:
    """Which devices `model:(2)2` stands for."""
    for name in dict.fromkeys(_PART.findall(text)):
        axis = name.partition(":")[0]
        if axis in mesh.axis_names:
            part, size = mesh.part(name), mesh.axis_size(axis)
            apart = size // part.end
            how = "neighbours" if apart == 1 else f"devices, each {apart} apart"
            yield (
                f"{name} is a part of the axis {axis}: of its {size} devices groups "
                f"of {part.size} {how}."
            )
