"""Weight-update sharding's Figure 12: memory with sharded updates and without.

    python benchmarks/papers/paper_tables.py --table=wus --json_out=rows.json
    python benchmarks/papers/memory_plot.py --rows=rows.json --plot_out=figure12.svg

Of each model of the paper's Table 1 the compiled peak of a core, and how much of it is
saved. The paper's figure has no numbers in its text.
"""

from __future__ import annotations

from absl import app
from matplotlib.figure import Figure
from paper_updates import ROWS, TABLE
from plots import BLUE, ORANGE, Rows, define_flags, draw

_BARS = {"off": (ORANGE, "repeated on each core"), "on": (BLUE, "sharded")}
_WIDTH = 0.38


def figure(rows: Rows) -> Figure:
    """The figure of `paper_tables.py`'s JSON rows; only models of Table 1 count.

    Raises:
      ValueError: there is no such row.
    """
    models = [row.name for row in ROWS if not row.gin_params]
    ours = {row["row"]: row["ours"] for row in rows if row["table"] == TABLE}
    shown = [name for name in models if name in ours]
    if not shown:
        raise ValueError("no model of Table 1: see paper_tables.py --table=wus")
    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    axes = drawn.subplots()
    for side, (mode, (color, label)) in zip((-0.5, 0.5), _BARS.items(), strict=True):
        places = [number + side * _WIDTH for number in range(len(shown))]
        peaks = [ours[name][mode]["peak_gb"] for name in shown]
        axes.bar(places, peaks, _WIDTH, color=color, label=label)
    for number, name in enumerate(shown):
        axes.annotate(
            f"-{saved(ours[name]):.0%}",
            (number + 0.5 * _WIDTH, ours[name]["on"]["peak_gb"]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
        )
    labels = [name.replace("_", ", ") + " cores" for name in shown]
    axes.set_xticks(range(len(shown)), labels)
    axes.set_ylabel("peak memory of a core, GB")
    axes.legend(frameon=False, title="weight updates")
    return drawn


def saved(ours) -> float:
    """The share of the peak that a row's sharded updates save."""
    return 1 - ours["on"]["peak_gb"] / ours["off"]["peak_gb"]


def main(argv) -> None:
    """Draws the figure."""
    draw(__file__, figure, argv)


if __name__ == "__main__":
    define_flags()
    app.run(main)
