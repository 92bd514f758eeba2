"""The shards of an array on its devices, in colour, for terminals and notebooks."""

from __future__ import annotations

import dataclasses
import html
import itertools
import os
import sys
from collections.abc import Sequence

import jax
import tensorflow as tf

from meshwright.framework.functions.mesh_variable import placed
from meshwright.framework.markup import color_of

_COLUMNS = 80
_LEAST = 6
"""Columns of a terminal that a shard takes at least."""
_ROWS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A shard.

    Args:
      bounds: begin and end of it along each dim.
      devices: ids of the devices that hold it.
    """

    bounds: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPicture:
    """Which devices hold which part of an array; its `str` is 80 columns wide.

    A terminal shows it in colours; a notebook as a table.

    Args:
      title: the array's type.
      down, across: what the rows and the columns of the drawing are.
      cells: the rows of shards.
    """

    title: str
    down: str
    across: str
    cells: tuple[tuple[Cell, ...], ...]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        return self.text(has_colors=has_colors)

    def text(self, *, has_colors: bool = False) -> str:
        """The drawing for a terminal."""
        most = (_COLUMNS - 1) // (_LEAST + 1)
        rows, columns = (
            _some(len(self.cells), _ROWS),
            _some(len(self.cells[0]), most),
        )
        width = min(20, (_COLUMNS - 1) // len(columns) - 1)
        line = "+" + "+".join(["-" * width] * len(columns)) + "+"
        lines = [self.title, *self._legend(), line]
        for row in rows:
            texts = [self._cell(row, column, width, has_colors) for column in columns]
            lines += [f"|{'|'.join(texts)}|", line]
        return "\n".join(lines)

    def _legend(self) -> list[str]:
        named = [("down", self.down), ("across", self.across)]
        parts = [f"{name}: {what}" for name, what in named if what]
        return ["; ".join(parts)] if parts else []

    def _cell(
        self, row: int | None, column: int | None, width: int, color: bool
    ) -> str:
        if row is None or column is None:
            return "...".center(width)
        text = _ids(self.cells[row][column].devices)
        text = text if len(text) <= width else f"{text[: width - 3]}..."
        text = text.center(width)
        if not color:
            return text
        number = row * len(self.cells[0]) + column
        red, green, blue = bytes.fromhex(color_of(number)[1:])
        return f"\x1b[48;2;{red};{green};{blue}m\x1b[97m{text}\x1b[0m"

    def _repr_html_(self) -> str:
        rows, columns = _some(len(self.cells), 32), _some(len(self.cells[0]), 32)
        body = "".join(
            f"<tr>{''.join(self._box(row, column) for column in columns)}</tr>"
            for row in rows
        )
        legend = "".join(f"<div>{html.escape(line)}</div>" for line in self._legend())
        return (
            f"<div><code>{html.escape(self.title)}</code>{legend}"
            f'<table style="border-collapse: separate; border-spacing: 2px">{body}'
            "</table></div>"
        )

    def _box(self, row: int | None, column: int | None) -> str:
        if row is None or column is None:
            return "<td>…</td>"
        cell = self.cells[row][column]
        color = color_of(row * len(self.cells[0]) + column)
        bounds = ", ".join(f"{begin}:{end}" for begin, end in cell.bounds)
        style = (
            f"background: {color}; color: #fff; padding: 6px 14px; text-align: center"
        )
        return f'<td style="{style}" title="[{bounds}]">{_ids(cell.devices)}</td>'


def visualize(array: jax.Array | tf.Variable) -> ShardPicture:
    """Which of its devices hold which part of an array, drawn.

    A notebook shows what is returned as a coloured table, a terminal at the prompt as
    text of 80 columns; `print` has no colours.

    Args:
      array: on devices, as programs return it and `program.shard` makes it; or a
        variable, of Keras or of TF, that a program has placed on a mesh.

    Raises:
      TypeError: it is no such array.
    """
    if variable := placed(getattr(array, "value", None)) or placed(array):
        array = variable.array
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        how = "program.shard(...) puts host arrays onto a mesh"
        if isinstance(getattr(array, "_value", array), tf.Variable):
            how += (
                ". A variable comes onto the mesh with the first call of a program "
                "that has it: for a Keras model call fit, evaluate or predict first"
            )
        raise TypeError(
            "visualize takes an array on devices, as a program returns it; this is of "
            f"type {type(array).__name__}: {how}"
        )
    holders: dict[tuple, list[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = tuple(
            part.indices(size)[:2]
            for part, size in zip(index, array.shape, strict=True)
        )
        holders.setdefault(bounds, []).append(device.id)
    begins = [sorted({bounds[dim] for bounds in holders}) for dim in range(array.ndim)]
    split = [dim for dim, parts in enumerate(begins) if len(parts) > 1]
    # The last split dim goes across, unless it is the first of several dims.
    across = split[-1:] if len(split) > 1 or split == [array.ndim - 1] else []
    down = [dim for dim in split if dim not in across]

    def cell(place: dict[int, tuple[int, int]]) -> Cell:
        bounds = tuple(
            place.get(dim, parts[0]) if parts else (0, 0)
            for dim, parts in enumerate(begins)
        )
        return Cell(bounds=bounds, devices=tuple(sorted(holders.get(bounds, ()))))

    cells = tuple(
        tuple(cell(dict([*row, *column])) for column in _places(begins, across))
        for row in _places(begins, down)
    )
    shape = ",".join(map(str, array.shape))
    return ShardPicture(
        title=f"{array.dtype}[{shape}] on {len(array.sharding.device_set)} devices",
        down=_what(down, begins, array.sharding),
        across=_what(across, begins, array.sharding),
        cells=cells,
    )


def _places(begins: Sequence, dims: Sequence[int]) -> list[tuple]:
    """All combinations of parts of these dims, as (dim, bounds)."""
    return list(
        itertools.product(*([(dim, part) for part in begins[dim]] for dim in dims))
    )


def _what(
    dims: Sequence[int], begins: Sequence, sharding: jax.sharding.Sharding
) -> str:
    """`dim 0 in 2 (data), then dim 1 in 4 (model)`; axes only where they have names."""
    spec = getattr(sharding, "spec", ())

    def axes(dim: int) -> str:
        named = spec[dim] if dim < len(spec) else None
        named = (named,) if isinstance(named, str) else named
        return f" ({', '.join(named)})" if named else ""

    return ", then ".join(f"dim {d} in {len(begins[d])}{axes(d)}" for d in dims)


def _some(count: int, most: int) -> list[int | None]:
    """All numbers, or the first and the last with None between them."""
    if count <= most:
        return list(range(count))
    half = (most - 1) // 2
    return [*range(half), None, *range(count - half, count)]


def _ids(devices: Sequence[int]) -> str:
    """`0-3,8`: numbers, those in a row joined."""
    runs: list[list[int]] = []
    for number in devices:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs
    )
