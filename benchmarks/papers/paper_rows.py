"""How `paper_tables.py` and its neighbours plan rows, print them and keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.trainers.search.plan_cache import PlanCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowKind:
    """Rows of one class: what is found of them, and their part of the output.

    Args:
      paper: names of a row's attributes that are the paper's numbers.
      ours: (row, cache) -> what is found, by name.
      header: the lines above the rows.
      table_row: (row, found) -> the row's line.
      summary: [(row, found)] -> the lines below.
    """

    paper: tuple[str, ...]
    ours: Callable[[Any, PlanCache], Mapping[str, Any]]
    header: str
    table_row: Callable[[Any, Mapping[str, Any]], str]
    summary: Callable[[Sequence[tuple[Any, Mapping[str, Any]]]], list[str]]

    def show(self, rows: Sequence[Any], cache: PlanCache) -> list[dict[str, Any]]:
        """Plans rows, if there are any, and prints them; what was found, for JSON."""
        if not rows:
            return []
        print(self.header)
        found = []
        for row in rows:
            found.append((row, self.ours(row, cache)))
            print(self.table_row(*found[-1]), flush=True)
        print(*self.summary(found), sep="\n")
        return [self.json_row(*pair) for pair in found]

    def json_row(self, row: Any, found: Mapping[str, Any]) -> dict[str, Any]:
        """`{row, table, paper: {...}, ours: {...}}`, without what is not known."""
        paper = {name: getattr(row, name) for name in self.paper}
        return {
            "row": row.name,
            "table": row.table,
            "paper": _known(paper),
            "ours": _known(found),
        }


def _known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in numbers.items() if x == x}  # NaN is no JSON.
