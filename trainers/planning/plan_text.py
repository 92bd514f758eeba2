"""A plan's sections for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.trainers.planning.plan_parts import Section
from meshwright.trainers.planning.plan_sections import sections

_WIDTH = 80
_UNBROKEN = 24  # Cells of up to so many characters stay on one line.


def plan_text(document: Mapping[str, Any]) -> str:
    """The text that `meshwright-plan --topology` prints of a `document`."""
    parts = (_lines(part) for part in sections(document) if part.in_text)
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _lines(section: Section) -> Iterator[str]:
    yield from _wrapped(section.title)
    for note in section.notes:
        yield from _wrapped(note, "  ")
    names = max(map(len, section.facts), default=0)
    for name, value in section.facts.items():
        yield from _wrapped(value, f"  {name:<{names}}  ", hang=names + 4)
    if section.rows:
        yield from _table(section)


def _table(section: Section) -> Iterator[str]:
    """Columns where they fit; else columns of numbers, then the rest in a row."""
    shown, rest = section.rows[: section.brief], section.rows[section.brief :]
    columns = section.columns
    numbers = sum(column.is_number for column in columns)
    rows = [[column.head for column in columns]]
    rows += [[column.text(row[column.field]) for column in columns] for row in shown]
    if rest:
        sums = [
            column.text(_sum([row[column.field] for row in rest]))
            for column in columns[:numbers]
        ]
        more = f"{len(rest)} more row{'s' * (len(rest) > 1)}"
        rows.append([*sums, f"in {more}" if sums else more])
    widths = [
        max(len(row[i]) for row in rows if i < len(row)) for i in range(len(columns))
    ]
    fits = sum(widths) + 2 * len(widths) <= _WIDTH
    for row in rows:
        pairs = list(zip(row, widths, strict=False))
        lead = "".join(f"  {cell:>{width}}" for cell, width in pairs[:numbers])
        if fits:
            cells = (f"  {cell:<{width}}" for cell, width in pairs[numbers:])
            yield (lead + "".join(cells)).rstrip()
        else:
            words = "  ".join(_unbroken(cell) for cell in row[numbers:] if cell)
            for line in _wrapped(words, f"{lead}  ", hang=max(6, len(lead) + 2)):
                yield line.replace("\xa0", " ")


def _unbroken(cell: str) -> str:
    return cell.replace(" ", "\xa0") if len(cell) <= _UNBROKEN else cell


def _sum(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(values)


def _wrapped(text: str, indent: str = "", *, hang: int = 2) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * hang,
        break_on_hyphens=False,
    )
