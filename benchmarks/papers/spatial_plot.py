"""GSPMD's Table 8 as a figure: step time and memory against spatial partitions.

    python benchmarks/papers/paper_tables.py --table=8 --json_out=rows.json
    python benchmarks/papers/spatial_plot.py --rows=rows.json --plot_out=table8.svg

Both axes are logarithmic: a straight line down is what partitioning promises. Volumes
of 128^3 are one line, those of 256^3 two points, of (4, 16) and (2, 32) devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from absl import app
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from plots import BLUE, ORANGE, define_flags, draw

_PANELS = {"step_s": "seconds a step", "peak_gb": "peak memory of a core, GB"}
# The paper's marks are hollow.
_WHOSE = {"paper": (ORANGE, "white", "--"), "ours": (BLUE, BLUE, "-")}


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure of `paper_tables.py`'s JSON rows; only rows of Table 8 that fit count.

    Raises:
      ValueError: there is no such row.
    """
    known = [
        row
        for row in rows
        if row["table"] == "8" and all("step_s" in row[of] for of in _WHOSE)
    ]
    if not known:
        raise ValueError("no row of Table 8 that fits: see paper_tables.py --table=8")
    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    for axes, (what, title) in zip(drawn.subplots(1, 2), _PANELS.items(), strict=True):
        for whose in _WHOSE:
            _draw(axes, known, whose, what)
        counts = sorted({_spatial(row) for row in known})
        axes.set(xscale="log", yscale="log", xlabel="spatial partitions", title=title)
        axes.set_xticks(counts, list(map(str, counts)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=7)
    drawn.axes[0].legend(frameon=False)
    return drawn


def _spatial(row: Mapping[str, Any]) -> int:
    return int(row["row"].rpartition("x")[2])


def _draw(axes: Axes, rows, whose: str, what: str) -> None:
    color, fill, line = _WHOSE[whose]
    for size, marker, style in (("128", "o", line), ("256", "s", "")):
        points = sorted(
            (_spatial(row), row[whose][what])
            for row in rows
            if row["row"].startswith(size)
        )
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle=style or "none",
                marker=marker,
                color=color,
                markerfacecolor=fill,
                label=f"{size}$^3$, {whose}",
            )


def main(argv: Sequence[str]) -> None:
    """Draws the figure."""
    draw(__file__, figure, argv)


if __name__ == "__main__":
    define_flags()
    app.run(main)
