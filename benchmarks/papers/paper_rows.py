"""How `paper_tables.py` and its neighbours plan rows, print and keep them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.trainers.planning.search.plan_cache import PlanCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table, as published; NaN where no number was.

    Args:
      table: one of those that `paper_tables.py` lists.
      name: our name of it.
      topology: the TPU slice with the paper's number of cores.
      gin_file: path below params/.
      gin_params: bindings that override it.
      peak_gb: peak memory of a core.
      step_s: seconds of a step.
      util: FLOPS utilization, of 1, by the model's FLOPs.
      all_to_all: the share of the step in AllToAlls.
      bubbles: the share of the step in pipelines' bubbles.
      recompute: the share of the step that recomputes, outside bubbles.
    """

    table: str
    name: str
    topology: str
    gin_file: str
    gin_params: tuple[str, ...] = ()
    peak_gb: float = math.nan
    step_s: float = math.nan
    util: float = math.nan
    all_to_all: float = math.nan
    bubbles: float = math.nan
    recompute: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowKind:
    """Rows of one class: their results, and their part of the output.

    Args:
      paper: names of a row's attributes that are the paper's numbers.
      ours: (row, cache) -> our numbers, by name.
      header: the lines above the rows.
      table_row: (row, result) -> the row's line.
      summary: [(row, result)] -> the lines below.
    """

    paper: tuple[str, ...]
    ours: Callable[[Any, PlanCache], Mapping[str, Any]]
    header: str
    table_row: Callable[[Any, Mapping[str, Any]], str]
    summary: Callable[[Sequence[tuple[Any, Mapping[str, Any]]]], list[str]]

    def show(self, rows: Sequence[Any], cache: PlanCache) -> list[dict[str, Any]]:
        """Plans rows, if any, prints them, and returns the results for JSON."""
        if not rows:
            return []
        print(self.header)
        results = []
        for row in rows:
            results.append((row, self.ours(row, cache)))
            print(self.table_row(*results[-1]), flush=True)
        print(*self.summary(results), sep="\n")
        return [self.json_row(*pair) for pair in results]

    def json_row(self, row: Any, result: Mapping[str, Any]) -> dict[str, Any]:
        """`{row, table, paper: {...}, ours: {...}}`, without unknown numbers."""
        paper = {name: getattr(row, name) for name in self.paper}
        return {
            "row": row.name,
            "table": row.table,
            "paper": _known(paper),
            "ours": _known(result),
        }


def _known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in numbers.items() if x == x}  # NaN is no JSON.
