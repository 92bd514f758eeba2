"""Draws the pictures of docs/images that show where shards go; run, it writes them.

python docs/images/pictures.py
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

FOLDER = pathlib.Path(__file__).parent
COLOURS = ("#4e79a7", "#c8690f", "#3f8a38", "#94588c")  # Of a tensor's four parts.
SUM = "#3b3b3b"
CARD, INK, FAINT = "#fbfbfc", "#24292f", "#8a9099"
CELL, GAP, TOP = 34, 28, 64

Cell = tuple[str, str] | None
"""The text and the colour of a part of a tensor; None where a device has nothing."""
Rows = Sequence[Sequence[Cell]]
"""For each device, its cells."""


def rect(x, y, width, height, fill, more="") -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" '
        f'fill="{fill}" {more}/>'
    )


def text(x, y, words, *, size=13, fill=INK, anchor="middle", weight="normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
    )


def arrow(x1, y1, x2, y2) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{FAINT}" '
        'stroke-width="2" marker-end="url(#head)"/>'
    )


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """An SVG on a light card, which can be read on light and dark pages."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/>'
        "</marker>"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{title}</title><defs>{head}</defs>",
            rect(0, 0, width, height, CARD, 'stroke="#d8dee4"'),
            *parts,
            "</svg>\n",
        ]
    )


def devices(left: int, rows: Rows) -> list[str]:
    """Four devices below each other, each with its cells."""
    parts = []
    for number, cells in enumerate(rows):
        y = TOP + number * (CELL + GAP / 2)
        parts.append(text(left - 10, y + 22, number, size=12, fill=FAINT, anchor="end"))
        for place, cell in enumerate(cells):
            x = left + place * (CELL + 3)
            if cell is None:
                edge = f'stroke="{FAINT}" stroke-dasharray="3 3"'
                parts.append(rect(x, y, CELL, CELL, "none", edge))
            else:
                parts.append(rect(x, y, CELL, CELL, cell[1]))
                parts.append(text(x + CELL / 2, y + 22, cell[0], fill="#fff"))
    return parts


def collective(title: str, note: str, before: Rows, after: Rows) -> str:
    """Four devices before a collective, and after it."""
    right, width = 300, 490
    height = TOP + 4 * CELL + int(3.5 * GAP) - 6
    middle = TOP + 2 * CELL + GAP * 0.75
    parts = [
        text(20, 28, title, size=16, anchor="start", weight="bold"),
        text(20, 48, note, size=12, fill=FAINT, anchor="start"),
        *devices(60, before),
        arrow(222, middle, right - 36, middle),
        *devices(right, after),
        text(60, height - 12, "device, before", size=11, fill=FAINT, anchor="start"),
        text(right, height - 12, "after", size=11, fill=FAINT, anchor="start"),
    ]
    return picture(width, height, title, parts)


def part(number: int, name: str = "") -> Cell:
    return name or "abcd"[number], COLOURS[number]


def collectives() -> dict[str, str]:
    """A picture for each collective, by its file's name."""
    own = [[part(n) if n == m else None for m in range(4)] for n in range(4)]
    whole = [[part(m) for m in range(4)] for _ in range(4)]
    partial = [[part(n, f"{'abcd'[m]}{n}") for m in range(4)] for n in range(4)]
    sums = [[(f"Σ{letter}", SUM) for letter in "abcd"] for _ in range(4)]
    of_sum = [[sums[0][m] if n == m else None for m in range(4)] for n in range(4)]
    exchanged = [[part(m, f"{'abcd'[n]}{m}") for m in range(4)] for n in range(4)]
    one = [[part(n)] for n in range(4)]
    moved = [[part(n - 1) if n else None] for n in range(4)]
    return {
        "all_gather.svg": collective(
            "all-gather", "Each device sends its part; all have the tensor.", own, whole
        ),
        "all_reduce.svg": collective(
            "all-reduce",
            "Each has a summand of all of it; all have the sum.",
            partial,
            sums,
        ),
        "reduce_scatter.svg": collective(
            "reduce-scatter",
            "The same sum, of which each keeps a part.",
            partial,
            of_sum,
        ),
        "all_to_all.svg": collective(
            "all-to-all", "The split moves from one dim to another.", partial, exchanged
        ),
        "collective_permute.svg": collective(
            "collective-permute",
            "Each sends its part on, as stages of a pipeline do.",
            one,
            moved,
        ),
    }


def _grid(y: int, cell: Callable[[int, int], Cell], label: str, note: str) -> list[str]:
    """A tensor on the (2, 4) mesh: what each device holds of it."""
    parts = [
        text(24, y - 10, label, size=15, anchor="start", weight="bold"),
        *[
            text(330, y + 24 + 20 * n, line, size=14, fill=INK, anchor="start")
            for n, line in enumerate(note.split("\n"))
        ],
    ]
    for row in range(2):
        for column in range(4):
            words, fill = cell(row, column)
            left, top = 24 + column * 72, y + row * 38
            parts.append(rect(left, top, 68, 34, fill))
            parts.append(text(left + 34, top + 22, words, fill="#fff"))
    return parts


def one_program() -> str:
    """A program for one device, and what each of eight devices holds of its tensors."""
    code = [
        'x = mw.mesh_split(x, mesh, ["x", None])',
        'w = mw.mesh_split(w, mesh, [None, "y"])',
        "y = tf.nn.relu(x @ w)",
    ]
    tones, greens = ("#34567f", "#6087b3"), ("#2c5a28", "#3f8a38")
    parts = [
        text(24, 34, "One program ...", size=17, anchor="start", weight="bold"),
        rect(24, 48, 512, 88, "#eef1f5"),
        *[
            f'<text x="38" y="{74 + 23 * n}" font-size="14" fill="{INK}" '
            f'font-family="monospace">{line.replace(chr(34), "&quot;")}</text>'
            for n, line in enumerate(code)
        ],
        text(24, 172, "... on eight devices", size=17, anchor="start", weight="bold"),
        text(536, 172, "a mesh of x=2 by y=4", size=14, fill=FAINT, anchor="end"),
    ]
    parts += _grid(
        214, lambda r, c: (f"rows {r}", tones[r]), "x  [x,_]",
        "Its rows are split by x,\nand copied along y.",
    )  # fmt: skip
    parts += _grid(
        328, lambda r, c: (f"cols {c}", COLOURS[c]), "w  [_,y]",
        "Its columns are split by y,\nand copied along x.",
    )  # fmt: skip
    parts += _grid(
        442, lambda r, c: (f"{r}, {c}", greens[r]), "y  [x,y]",
        "Completion splits it by both.\nThe product sends nothing.",
    )  # fmt: skip
    return picture(560, 534, "One program on eight devices", parts)


def pictures() -> dict[str, str]:
    return {**collectives(), "one_program.svg": one_program()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
