"""How `paper_tables.py` and its neighbours plan rows, print and keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.trainers.planning.search.plan_cache import PlanCache


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
