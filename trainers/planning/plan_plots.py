"""The pictures of a plan, by matplotlib: SVG for its page, PNG for TensorBoard."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    import matplotlib
except ImportError as error:
    raise ImportError(
        "a plan's pictures (--html_out, --log_dir) are drawn by matplotlib: pip "
        "install 'meshwright[plan]'"
    ) from error
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from meshwright.framework.sizes import bytes_text
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineSchedule
from meshwright.trainers.planning.plan_parts import Plot
from meshwright.trainers.planning.plan_units import seconds_text

# Okabe and Ito's colours, which most eyes tell apart.
_COLORS = ("#0072B2", "#E69F00", "#777777", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_MAIN, _LIMIT = _COLORS[0], _COLORS[6]
# In inches at SVG's 72 points: letters stay legible on a phone.
_WIDTH = 4.4
_ROW = 0.31
_NAME = 46
# Iterations of a schedule; with more, cells would be narrower than their numbers.
_MOST_NUMBERED = 20
_SMALL = 8.5
_TICKS = 4
_STYLE = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#222222",
    "svg.fonttype": "none",  # Text stays text: to be searched, read out and scaled.
}
_IDS = re.compile(r'(\bid="|href="#|url\(#)')


def svg(plot: Plot) -> str:
    """An `<svg>` element that scales, with the plot's title and text; no scripts."""
    file = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure(plot).savefig(file, format="svg", metadata=nothing)
    code = file.getvalue()
    code = code[code.index("<svg") :]
    code = re.sub(r"<metadata>.*?</metadata>", "", code, flags=re.DOTALL)
    # A page has several plots: their ids must differ.
    code = _IDS.sub(rf"\g<1>{plot.name}-", code)
    head, rest = code.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = f"{plot.name}-title {plot.name}-text"
    return (
        f'{head} role="img" aria-labelledby="{label}">'
        f'<title id="{plot.name}-title">{html.escape(plot.title)}</title>'
        f'<desc id="{plot.name}-text">{html.escape(plot.text)}</desc>{rest}'
    )


def png(plot: Plot) -> bytes:
    """The plot as a PNG file."""
    file = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure(plot).savefig(file, format="png", dpi=144, facecolor="white")
    return file.getvalue()


def figure(plot: Plot) -> Figure:
    """Draws the plot."""
    with matplotlib.rc_context(_STYLE):
        drawn = Figure(layout="constrained")
        rows = _KINDS[plot.kind](drawn.subplots(), **plot.figures)
        drawn.set_size_inches(_WIDTH, 0.8 + _ROW * rows)
    return drawn


def _curve(axes: Axes, *, alive: Sequence[int], limit: int) -> float:
    """Bytes over the run of a program, and the memory of a device."""
    peak = max(alive)
    at = alive.index(peak)
    axes.fill_between(range(len(alive)), alive, color=_MAIN, alpha=0.25)
    axes.plot(alive, color=_MAIN, linewidth=1.3)
    axes.plot([at], [peak], marker="o", color=_MAIN)
    side = "left" if at < len(alive) / 2 else "right"
    _behind(axes, f"peak {bytes_text(peak)}", (at, peak), shift=(0, 6), ha=side)
    axes.set_xlim(0, max(1, len(alive) - 1))
    axes.set_ylim(0, 1.2 * peak)
    if peak > limit / 5:
        axes.set_ylim(0, 1.15 * max(limit, peak))
        axes.axhline(limit, color=_LIMIT, linewidth=1.5)
        title = f"a device has {bytes_text(limit)}"
        axes.set_title(title, color=_LIMIT, fontsize=10.5)
    axes.set_xticks([])
    axes.set_xlabel("instructions as they run, a loop's once")
    _bytes_ticks(axes.yaxis)
    return 7


def _bars(
    axes: Axes,
    *,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    unit: str,
    axis: str,
    error: float | None,
) -> float:
    """Bars, the first on top, each with its label behind it."""
    ends = np.zeros(len(names))
    for number, (name, sizes) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        axes.barh(names, sizes, left=ends, color=color, label=name, height=0.6)
        ends = ends + sizes
    if error:
        axes.errorbar(ends[0], 0, xerr=error, color="#222222", capsize=4)
        ends[0] += error
    for row, end in enumerate(ends):
        _behind(axes, labels[row], (end, row), shift=(4, 0), va="center")
    axes.set_xlim(0, 1.5 * max(ends))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(axis)
    if unit == "bytes":
        _bytes_ticks(axes.xaxis)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(_TICKS))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: seconds_text(x)))
    if len(series) == 1:
        return len(names)
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return len(names) + 0.8 * len(series)


def _behind(axes: Axes, text: str, at, *, shift: tuple[int, int], **aligned) -> None:
    axes.annotate(text, at, shift, textcoords="offset points", **aligned)


def _grid(
    axes: Axes, *, weights: Sequence[Mapping[str, Any]], mesh: Mapping[str, int]
) -> float:
    """The dim of each weight that each mesh axis splits."""
    for row, weight in enumerate(weights):
        # The name has its own line: a mesh may have many axes, a name many letters.
        # Of a long name the end is shown.
        name = weight["path"]
        tail = name if len(name) <= _NAME else "\u2026" + name[-_NAME:]
        axes.annotate(tail, (0, row - 0.27), va="center")
        for column, axis in enumerate(mesh):
            split = zip(weight["dims"], weight["axes"], strict=True)
            dim = next((dim for dim, split_by in split if axis in split_by), "")
            color = (_COLORS[column % len(_COLORS)], 0.35) if dim else "#f1f1f1"
            axes.add_patch(Rectangle((column, row), 0.97, 0.42, facecolor=color))
            if dim:
                middle = (column + 0.48, row + 0.2)
                axes.annotate(dim, middle, ha="center", va="center", fontsize=9.5)
        middle = (len(mesh) + 0.5, row + 0.2)
        axes.annotate(bytes_text(weight["bytes"]), middle, ha="center", va="center")
    axes.set_xlim(0, len(mesh) + 1)
    axes.set_ylim(len(weights) - 0.5, -0.5)
    heads = [f"{axis}={size}" for axis, size in mesh.items()]
    axes.set_xticks([n + 0.5 for n in range(len(mesh) + 1)], [*heads, "a device"])
    axes.set_yticks([])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return 1.4 * len(weights)


def _timetable(axes: Axes, *, schedule: PipelineSchedule) -> float:
    """Stages as rows, iterations as columns, coloured by microbatch.

    With `PipelineOrder.ONE_F_ONE_B` a stage has a row of forward passes, and below it
    one of backward passes.
    """
    tables = [(0, schedule)]  # With the iteration that they start in.
    if schedule.is_one_f_one_b:
        tables.append((schedule.backward_start, schedule.backward))
    iterations, rows = (
        tables[-1][0] + schedule.iterations,
        len(tables) * schedule.num_stages,
    )
    is_numbered = iterations <= _MOST_NUMBERED
    axes.patch.set(facecolor="#f4f4f4", edgecolor="#bbbbbb", hatch="/////")
    # An image: a path for each cell of a wide table would be half a megabyte.
    cells = np.zeros([rows, iterations, 4])
    for row, (start, table) in enumerate(tables):
        colors = _cell_colors(table, is_numbered).transpose(1, 0, 2)
        cells[row :: len(tables), start : start + schedule.iterations] = colors
    axes.imshow(cells, aspect="auto", interpolation="none")
    if is_numbered:
        axes.set_xticks(np.arange(1, iterations) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, rows) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
        for row, (start, table) in enumerate(tables):
            _number_cells(axes, table, start, lambda s, row=row: s * len(tables) + row)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    label = "stage"
    if schedule.is_one_f_one_b:
        label = "stage: forward, backward"
        by_stage = FuncFormatter(lambda row, _: f"{row / 2:g}" if row % 2 == 0 else "")
        axes.yaxis.set_major_formatter(by_stage)
    axes.set_ylabel(label)
    rounds = "; paler: later rounds" if schedule.num_repeats > 1 else ""
    axes.set_xlabel(f"iteration; hatched: bubbles{rounds}")
    return min(9.0, max(2.5, rows * (0.8 if is_numbered else 0.35)))


def _cell_colors(schedule: PipelineSchedule, is_numbered: bool) -> np.ndarray:
    """Colours [iterations, L, RGBA]; none in bubbles, paler in each later round."""
    if is_numbered:
        palette = np.array([to_rgb(color) for color in _COLORS[:-1]])
    else:  # The colours run from the first microbatch to the last.
        ends = np.linspace(0, 1, schedule.num_microbatches)
        palette = matplotlib.colormaps["viridis"](ends)[:, :3]
    full = palette[schedule.microbatch % len(palette)]
    paleness = 0.25 + 0.45 * schedule.repeat / max(1, schedule.num_repeats - 1)
    colors = full + (1 - full) * paleness[..., None]
    return np.concatenate([colors, schedule.valid[..., None]], axis=-1)


def _number_cells(
    axes: Axes, schedule: PipelineSchedule, start: int, row: Callable[[int], int]
) -> None:
    for iteration, stage in np.argwhere(schedule.valid):
        microbatch = str(schedule.microbatch[iteration, stage])
        at = (start + iteration, row(stage))
        axes.annotate(microbatch, at, ha="center", va="center", fontsize=_SMALL)


def _bytes_ticks(axis: Axis) -> None:
    """Puts ticks at multiples of a power of two, in which bytes are counted."""
    most = axis.get_view_interval()[1]
    axis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(most / _TICKS))))
    axis.set_major_formatter(FuncFormatter(lambda size, _: _short(bytes_text(size))))


def _short(text: str) -> str:
    """`1.50 MiB` as `1.5 MiB`."""
    number, unit = text.split()
    return f"{float(number):g} {unit}"


# Each returns its height in rows of text.
_KINDS = {"curve": _curve, "bars": _bars, "grid": _grid, "timetable": _timetable}
