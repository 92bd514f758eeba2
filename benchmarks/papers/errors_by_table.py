"""Errors of the kept rows' step times by table, and of other fits of the estimate.

    python benchmarks/papers/errors_by_table.py

The rows are those of tests/data/paper_rows.json. `ours` are the estimates of our
programs, `like` those of programs like the paper's (`like_papers.py`), `faster` those
of ours if ops without a product took 0.7 times their cycles. Below are the errors of
our programs if each table is left out of a fit to all others: of the efficiency of
links, and of that together with a factor for ops without a product.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import like_papers
import numpy as np
import paper_tables

KEPT = pathlib.Path(__file__).parents[2] / "tests" / "data" / "paper_rows.json"

Pairs = Sequence[tuple[paper_tables.Row, Mapping[str, Any]]]


def kept_pairs() -> Pairs:
    """The rows of GSPMD's tables that fit, with our results."""
    rows = json.loads(KEPT.read_text())
    kept = {(row["table"], row["row"]): row["ours"] for row in rows}
    pairs = [(row, kept[row.table, row.name]) for row in paper_tables.GSPMD_ROWS]
    return [
        (row, {"of_which": {}, **result}) for row, result in pairs if result["fits"]
    ]


def errors(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of our programs, and of programs like the paper's."""
    paper = np.array([row.step_s for row, _ in pairs])
    ours = np.array([result["step_s"] for _, result in pairs])
    like = np.array([like_papers.program(*pair) for pair in pairs])
    return ours / paper - 1, like / paper - 1


def left_out(pairs: Pairs, *, with_factor: bool) -> np.ndarray:
    """Relative errors of each table's rows by a least-squares fit to all others.

    Args:
      pairs: rows of several tables.
      with_factor: whether the time of ops without a product is fitted as well as that
        of links.
    """
    paper = np.array([row.step_s for row, _ in pairs])
    link = np.array([result["link_s"] for _, result in pairs])
    ops = np.array([result["ops_s"] for _, result in pairs])
    others = np.array([r["parts"]["vector"] + r["parts"]["memory"] for _, r in pairs])
    fitted = np.stack([link, others] if with_factor else [link]) / paper
    rest = (ops - others if with_factor else ops) / paper
    tables = np.array([row.table for row, _ in pairs])
    result = np.empty(len(pairs))
    for table in set(tables):
        out = tables == table
        factors, *_ = np.linalg.lstsq(fitted[:, ~out].T, 1 - rest[~out])
        result[out] = (rest + factors @ fitted - 1)[out]
    return result


def scaled(pairs: Pairs, factor: float) -> np.ndarray:
    """Relative errors if ops without a product took `factor` times their cycles.

    The efficiency of links is fitted to the rows that the estimate was calibrated on.
    """
    faster = [
        {
            **result,
            "ops_s": result["ops_s"]
            - (1 - factor) * (result["parts"]["vector"] + result["parts"]["memory"]),
        }
        for _, result in pairs
    ]
    rows = [row for row, _ in pairs]
    calibrated = [
        pair
        for pair in zip(rows, faster, strict=True)
        if pair[0].table in paper_tables.CALIBRATED
    ]
    links = paper_tables.calibrate(calibrated).efficiency
    steps = [result["ops_s"] + result["link_s"] / links for result in faster]
    return np.array(steps) / [row.step_s for row in rows] - 1


def _text(errors: np.ndarray) -> str:
    return f"{np.abs(errors).mean():7.1%}{errors[np.abs(errors).argmax()]:+8.1%}"


def main() -> None:
    """Prints the table and the fits."""
    pairs = kept_pairs()
    columns = (*errors(pairs), scaled(pairs, 0.7))
    tables = np.array([row.table for row, _ in pairs])
    names = ("ours", "like", "faster")
    head = "".join(f"{name:>7}{'worst':>8}" for name in names)
    print(f"{'table':6}{'steps':>6}{head}")
    for table in sorted(set(tables)):
        of = tables == table
        texts = "".join(_text(column[of]) for column in columns)
        print(f"{table:6}{of.sum():6}{texts}")
    print(f"{'all':6}{len(pairs):6}{''.join(map(_text, columns))}")
    for what, with_factor in (("links", False), ("links and a factor", True)):
        fit = _text(left_out(pairs, with_factor=with_factor))
        print(f"each table left out of a fit of {what}:{fit}")


if __name__ == "__main__":
    main()
