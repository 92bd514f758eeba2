"""The parts of a plan's report: sections, with their tables and plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.framework.sizes import bytes_text
from meshwright.trainers.planning.plan_units import (
    box_text,
    count_text,
    seconds_text,
    share_text,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture, not drawn yet.

    Args:
      name: short, for ids and tags.
      title: its caption.
      text: its description, for readers who cannot see it.
      kind: the function of `plan_plots` that draws it.
      figures: the function's keyword arguments.
    """

    name: str
    title: str
    text: str
    kind: str
    figures: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
      field: its key in the rows.
      head: its heading.
      text: formats a value.
      is_number: whether its values are right-aligned, and may be added up.
    """

    field: str
    head: str
    text: Callable[[Any], str] = str
    is_number: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a plan's report.

    Args:
      name: short, for ids.
      title: its heading.
      notes: paragraphs.
      facts: short values by name.
      fields: the table's columns, numbers first.
      rows: the table's rows.
      brief: how many rows the text has at most; it adds up the numbers of the rest.
      plots: its pictures.
      scalars: values that TensorBoard follows from plan to plan, by tag; None if not
        known.
      details: a heading and a long text under it, for the page alone.
      in_text: whether the text has the section too.
    """

    name: str
    title: str
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields: Sequence[str] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    brief: int = 100
    plots: Sequence[Plot] = ()
    scalars: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    details: tuple[str, str] | None = None
    in_text: bool = True

    @property
    def columns(self) -> list[Column]:
        """The table's columns."""
        return [_COLUMNS.get(field, Column(field, field)) for field in self.fields]


_COLUMNS = {
    column.field: column
    for column in (
        Column("bytes", "bytes", bytes_text, is_number=True),
        Column("count", "count", count_text, is_number=True),
        Column("share", "share", share_text, is_number=True),
        Column("seconds", "time", seconds_text, is_number=True),
        Column("iterations", "iterations", is_number=True),
        Column("bubble_fraction", "bubbles", share_text, is_number=True),
        Column("seconds_in_bubbles", "of a step", seconds_text, is_number=True),
        Column("load", "load of a link", is_number=True),
        Column("state_saved_bytes", "state saved", bytes_text, is_number=True),
        Column("gathered_bytes", "gathered", bytes_text, is_number=True),
        Column("gain_seconds", "est. gain", seconds_text, is_number=True),
        Column("source", "made at"),
        Column("box", "placement", box_text),
        # Tensors that are updated together go by the name of the first.
        Column("names", "weight", lambda names: names[0]),
        Column("dims", "dims", ", ".join),
        Column("shard_shape", "shard"),
    )
}
