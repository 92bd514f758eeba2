"""The pictures of a plan, by matplotlib: SVG for its page, PNG for TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from meshwright.framework.sizes import bytes_text
from meshwright.layers.stacks.pipeline_schedule import PipelineSchedule
from meshwright.trainers.planning.plan_text import (
    bubbles_text,
    by_size,
    schedule_text,
    seconds_text,
    share_text,
)

# Okabe and Ito's colours, which most eyes tell apart.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#777777")
_MAIN, _SENT, _LIMIT, _WHOLE = _COLORS[0], _COLORS[1], _COLORS[5], _COLORS[6]
# In inches at SVG's 72 points: letters stay legible on a phone.
_WIDTH = 4.4
_ROW = 0.31
_MOST_WEIGHTS = 60
_NAME = 46
# Of a schedule; more would be wider than their numbers.
_MOST_NUMBERED = 20
_SMALL = 8.5
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture.

    Args:
      name: short, for ids and tags.
      title: what it shows.
      text: what can be seen in it, for who cannot see it.
      figure: matplotlib's.
    """

    name: str
    title: str
    text: str
    figure: Figure

    def svg(self) -> str:
        """An `<svg>` element that scales, with its title and text; no scripts."""
        file = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.figure.savefig(file, format="svg", metadata=nothing)
        code = file.getvalue()
        code = code[code.index("<svg") :]
        code = re.sub(r"<metadata>.*?</metadata>", "", code, flags=re.DOTALL)
        # One page has several: their ids must differ.
        code = _IDS.sub(rf"\g<1>{self.name}-", code)
        head, rest = code.split(">", 1)
        head = re.sub(r' (width|height)="[^"]*"', "", head)
        label = f"{self.name}-title {self.name}-text"
        return (
            f'{head} role="img" aria-labelledby="{label}">'
            f'<title id="{self.name}-title">{html.escape(self.title)}</title>'
            f'<desc id="{self.name}-text">{html.escape(self.text)}</desc>{rest}'
        )

    def png(self) -> bytes:
        """The same as a PNG file."""
        file = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(file, format="png", dpi=144, facecolor="white")
        return file.getvalue()


def pictures(document: Mapping[str, Any]) -> list[Picture]:
    """Those that a plan's document has figures for."""
    makers: tuple[Callable[[Mapping[str, Any]], Picture | None], ...] = (
        _timeline,
        _breakdown,
        _step_time,
        _collectives,
        _weights,
    )
    with matplotlib.rc_context(_STYLE):
        made = [make(document) for make in makers]
        made += [_schedule(*pair) for pair in enumerate(document["pipelines"], 1)]
    return [one for one in made if one is not None]


def _timeline(document: Mapping[str, Any]) -> Picture | None:
    alive = document["timeline"]
    if not alive:
        return None
    limit, peak = document["memory_limit"], max(alive)
    at = alive.index(peak)
    with _picture(7) as (figure, axes):
        axes.fill_between(range(len(alive)), alive, color=_MAIN, alpha=0.25)
        axes.plot(alive, color=_MAIN, linewidth=1.3)
        axes.plot([at], [peak], marker="o", color=_MAIN)
        side = "left" if at < len(alive) / 2 else "right"
        axes.annotate(
            f"peak {bytes_text(peak)}",
            (at, peak),
            (0, 6),
            textcoords="offset points",
            ha=side,
        )
        axes.set_xlim(0, max(1, len(alive) - 1))
        axes.set_ylim(0, 1.2 * peak)
        if peak > limit / 5:
            axes.set_ylim(0, 1.15 * max(limit, peak))
            axes.axhline(limit, color=_LIMIT, linewidth=1.5)
            axes.set_title(_limit_text(limit), color=_LIMIT, fontsize=10.5)
        axes.set_xticks([])
        axes.set_xlabel("instructions as they run, a loop's once")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(_bytes_ticks())
    return Picture(
        name="timeline",
        title="What is alive on a device while a step runs",
        text=(
            f"{bytes_text(alive[0])} at first; {bytes_text(peak)} at the peak, after "
            f"{share_text(at, len(alive))} of the points; {bytes_text(alive[-1])} at "
            f"last; the device has {bytes_text(limit)}."
        ),
        figure=figure,
    )


def _breakdown(document: Mapping[str, Any]) -> Picture | None:
    parts = by_size({one["part"]: one["bytes"] for one in document["breakdown"]})
    if not parts:
        return None
    limit = document["memory_limit"]
    with _picture(len(parts)) as (figure, axes):
        _bars(axes, parts, text=bytes_text)
        axes.set_xlabel("bytes of a device at the peak")
    return Picture(
        name="breakdown",
        title="What a device's memory is for at the peak",
        text=_sentence(parts, bytes_text) + f"; the device has {bytes_text(limit)}.",
        figure=figure,
    )


def _step_time(document: Mapping[str, Any]) -> Picture | None:
    if not document["parts"]:
        return None
    parts, step = by_size(document["parts"]), document["step_seconds"]
    sent = {one["kind"] for one in document["collectives"]}

    def text(seconds: float) -> str:
        if seconds == step:
            return seconds_text(step)
        return f"{seconds_text(seconds)}, {share_text(seconds, step)}"

    rows = [("whole step", step), *parts]
    with _picture(len(rows)) as (figure, axes):
        colors = [_WHOLE, *(_SENT if part in sent else _MAIN for part, _ in parts)]
        _bars(axes, rows, text=text, colors=colors)
        if error := document["step_error"]:
            reach = step * error["worst"]
            axes.errorbar(step, 0, xerr=reach, color="#222222", capsize=4)
            axes.texts[0].xy = (step + reach, 0)  # Behind the error bar.
            axes.texts[0].set_text(
                f"{seconds_text(step)} \u00b1 {share_text(error['worst'], 1)}"
            )
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: seconds_text(x) if x else "0")
        )
        axes.set_xlabel("time; orange: sending")
    return Picture(
        name="time",
        title="Where the time of a step goes",
        text=_sentence(parts, text) + f"; {seconds_text(step)} in all.",
        figure=figure,
    )


def _collectives(document: Mapping[str, Any]) -> Picture | None:
    found = [one for one in document["collectives"] if one["bytes"]]
    if not found:
        return None
    kinds = list(dict.fromkeys(one["kind"] for one in found))
    sums: dict[str, dict[str, float]] = {}
    for one in found:
        along = sums.setdefault(one["axis"] or "no axis", dict.fromkeys(kinds, 0.0))
        along[one["kind"]] += one["bytes"]
    totals = by_size({axis: sum(along.values()) for axis, along in sums.items()})
    names = [axis for axis, _ in totals]
    with _picture(len(totals) + 0.8 * len(kinds)) as (figure, axes):
        left = [0.0] * len(totals)
        for number, kind in enumerate(kinds):
            widths = [sums[axis][kind] for axis in names]
            color = _COLORS[number % len(_COLORS)]
            axes.barh(names, widths, left=left, color=color, label=kind, height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        _finish_bars(axes, [total for _, total in totals], text=bytes_text)
        axes.set_xlabel("bytes of whole tensors, a step")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return Picture(
        name="collectives",
        title="What collectives send along each mesh axis",
        text=_sentence(totals, bytes_text) + f"; kinds: {', '.join(kinds)}.",
        figure=figure,
    )


def _weights(document: Mapping[str, Any]) -> Picture | None:
    """For each weight and axis: the dim that the axis splits."""
    weights = sorted(document["weights"], key=lambda one: -one["bytes"])[:_MOST_WEIGHTS]
    if not weights:
        return None
    mesh = list(document["mesh"])
    with _picture(1.4 * len(weights)) as (figure, axes):
        for row, one in enumerate(weights):
            # A line for the name: a mesh may have many axes, a name many letters.
            axes.annotate(_tail(one["path"]), (0, row - 0.27), va="center")
            for column, axis in enumerate(mesh):
                color = _COLORS[column % len(_COLORS)]
                _cell(axes, column, row, dim=_split_dim(one, axis), color=color)
            size = bytes_text(one["bytes"])
            axes.annotate(size, (len(mesh) + 0.5, row + 0.2), ha="center", va="center")
        axes.set_xlim(0, len(mesh) + 1)
        axes.set_ylim(len(weights) - 0.5, -0.5)
        heads = [f"{axis}={size}" for axis, size in document["mesh"].items()]
        axes.set_xticks([n + 0.5 for n in range(len(mesh) + 1)], [*heads, "a device"])
        axes.set_yticks([])
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)
    left = len(document["weights"]) - len(weights)
    return Picture(
        name="weights",
        title="The dim of each weight that each mesh axis splits"
        + (f"; without the {left} smallest" if left else ""),
        text="; ".join(f"{one['path']} {one['sharding']}" for one in weights) + ".",
        figure=figure,
    )


def _tail(name: str) -> str:
    """A weight's name is known by its end."""
    return name if len(name) <= _NAME else "\u2026" + name[-_NAME:]


def _split_dim(weight: Mapping[str, Any], axis: str) -> str:
    """The name of the dim that an axis splits; "" if it splits none."""
    split = zip(weight["dims"], weight["axes"], strict=True)
    return next((dim for dim, axes in split if axis in axes), "")


def _cell(axes: Axes, column: int, row: int, *, dim: str, color: str) -> None:
    fill = (color, 0.35) if dim else "#f1f1f1"
    axes.add_patch(Rectangle((column, row), 0.97, 0.42, facecolor=fill))
    if dim:
        middle = (column + 0.48, row + 0.2)
        axes.annotate(dim, middle, ha="center", va="center", fontsize=9.5)


def _schedule(number: int, pipeline: Mapping[str, Any]) -> Picture:
    """Stages as rows, iterations as columns, coloured by microbatch."""
    sizes = ("num_stages", "num_microbatches", "num_repeats")
    schedule = PipelineSchedule(**{name: pipeline[name] for name in sizes})
    iterations, stages = schedule.valid.shape
    is_numbered = iterations <= _MOST_NUMBERED
    height = stages * (0.8 if is_numbered else 0.35)
    with _picture(min(9.0, max(2.5, height))) as (figure, axes):
        axes.patch.set(facecolor="#f4f4f4", edgecolor="#bbbbbb", hatch="/////")
        # One image: a path for each cell of a wide one would be half a megabyte.
        cells = _cell_colors(schedule, is_numbered).transpose(1, 0, 2)
        axes.imshow(cells, aspect="auto", interpolation="none")
        if is_numbered:
            _number_cells(axes, schedule)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("stage")
        rounds = "; paler: later rounds" if schedule.num_repeats > 1 else ""
        axes.set_xlabel(f"iteration; hatched: bubbles{rounds}")
    waits = iterations - int(schedule.valid[:, 0].sum())
    return Picture(
        name=f"pipeline{number}",
        title=f"Schedule of the pipeline {pipeline['path']}: {bubbles_text(pipeline)} "
        "bubbles",
        text=(
            f"{schedule_text(pipeline)}: {iterations} iterations, in {waits} of which "
            "a stage works on no microbatch."
        ),
        figure=figure,
    )


def _cell_colors(schedule: PipelineSchedule, is_numbered: bool) -> np.ndarray:
    """[iterations, L, RGBA]; nothing in bubbles, paler in each later round."""
    if is_numbered:
        palette = np.array([to_rgb(color) for color in _COLORS[:-1]])
    else:  # From the first microbatch to the last.
        ends = np.linspace(0, 1, schedule.num_microbatches)
        palette = matplotlib.colormaps["viridis"](ends)[:, :3]
    full = palette[schedule.microbatch % len(palette)]
    paleness = 0.25 + 0.45 * schedule.repeat / max(1, schedule.num_repeats - 1)
    colors = full + (1 - full) * paleness[..., None]
    return np.concatenate([colors, schedule.valid[..., None]], axis=-1)


def _number_cells(axes: Axes, schedule: PipelineSchedule) -> None:
    iterations, stages = schedule.valid.shape
    axes.set_xticks(np.arange(1, iterations) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, stages) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    for iteration, stage in np.argwhere(schedule.valid):
        microbatch = str(schedule.microbatch[iteration, stage])
        at = (iteration, stage)
        axes.annotate(microbatch, at, ha="center", va="center", fontsize=_SMALL)


@contextlib.contextmanager
def _picture(rows: float) -> Iterator[tuple[Figure, Axes]]:
    figure = Figure(figsize=(_WIDTH, 0.8 + _ROW * rows), layout="constrained")
    yield figure, figure.subplots()


def _bars(
    axes: Axes,
    parts: Sequence[tuple[str, float]],
    *,
    text: Callable[[float], str],
    colors: str | Sequence[str] = _MAIN,
) -> None:
    names, sizes = zip(*parts, strict=True)
    axes.barh(names, sizes, color=colors, height=0.6)
    _finish_bars(axes, sizes, text=text)


def _finish_bars(
    axes: Axes, sizes: Sequence[float], *, text: Callable[[float], str]
) -> None:
    """The largest on top, each with its size behind it."""
    for row, size in enumerate(sizes):
        axes.annotate(
            text(size), (size, row), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, 1.5 * max(sizes))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(_bytes_ticks())


def _bytes_ticks() -> FuncFormatter:
    return FuncFormatter(lambda size, _: bytes_text(round(size)) if size else "0")


def _limit_text(limit: int) -> str:
    return f"a device has {bytes_text(limit)}"


def _sentence(parts: Sequence[tuple[str, float]], text: Callable[[float], str]) -> str:
    return "; ".join(f"{name} {text(size)}" for name, size in parts)
