"""HTML for notebooks: tables, names of mesh axes in colour, splits drawn."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

COLORS = ("#0072b2", "#c96f00", "#00805c", "#b0508a", "#2f8fc4", "#b84d00", "#6b6f78")
"""Of mesh axes in their order, and of shards; readable on white and on black."""
_WIDTH, _HEIGHT, _MOST = 34, 20, 8
_CELL = "padding: 1px 12px 1px 0; text-align: left; vertical-align: top"


def color_of(number: int) -> str:
    """The colour of a mesh axis, or a shard, of a number."""
    return COLORS[number % len(COLORS)]


def axes_html(axes: Iterable[str], axis_names: Sequence[str]) -> str:
    """Mesh axes, or parts of them, each in its colour; a dash for none."""
    marks = []
    for axis in axes:
        color = color_of(axis_names.index(axis.partition(":")[0]))
        marks.append(f'<b style="color: {color}">{html.escape(axis)}</b>')
    return ", ".join(marks) or "–"


def split_html(splits: Sequence[tuple[int, int]], is_last: bool) -> str:
    """A picture of a split, in which the shard of one device is filled.

    Args:
      splits: of the dims that are split, at most two of which are drawn: the number of
        the axis that splits it first, and the number of shards.
      is_last: whether the only split dim is the tensor's last, and drawn across.
    """
    drawn = list(splits[:2])
    if len(drawn) < 2:
        drawn = [(0, 1)] * (2 - len(drawn)) + drawn
        drawn = drawn if is_last else drawn[::-1]
    (row_axis, rows), (column_axis, columns) = (
        (axis, min(count, _MOST)) for axis, count in drawn
    )
    color = color_of(column_axis if columns > 1 else row_axis) if splits else "#999"
    lines = [
        f'<path d="M0 {_HEIGHT * i / rows:.1f}h{_WIDTH}" '
        f'stroke="{color_of(row_axis)}"/>'
        for i in range(1, rows)
    ] + [
        f'<path d="M{_WIDTH * i / columns:.1f} 0v{_HEIGHT}" '
        f'stroke="{color_of(column_axis)}"/>'
        for i in range(1, columns)
    ]
    shard = (
        f'<rect width="{_WIDTH / columns:.1f}" height="{_HEIGHT / rows:.1f}" '
        f'fill="{color}" fill-opacity=".65"/>'
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" style="vertical-align: middle; '
        f'border: 1px solid {color}; border-radius: 2px; background: {color}22">'
        f"{shard if splits else ''}{''.join(lines)}</svg>"
    )


def table_html(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are HTML."""
    cells = "".join(f'<th style="{_CELL}">{head}</th>' for head in heads)
    lines = [
        "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        '<table style="border-collapse: collapse; margin: 4px 0">'
        f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    )


def code_html(text: str) -> str:
    """A text in a font of one width."""
    return f"<code>{html.escape(text)}</code>"
