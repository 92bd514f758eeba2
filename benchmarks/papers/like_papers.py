"""What rows would take if our programs were the papers': where they differ, if known.

Each function takes a row of `paper_tables` and our result, and gives seconds of a step
with one difference taken away, or NaN where there is no such difference. `program`
takes away those by which a row's program is nearest to the paper's. These figures are
computed from those of our programs; nothing was compiled for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.framework.devices.network import LINK_EFFICIENCY

# Seconds of a step for reducing gradients in each iteration of a pipeline, not once a
# step: what was saved when the trainer changed (a496736, beside 46f6f0b).
_REDUCTIONS = {
    "2x16x8": 1.95,
    "4x16x4_16": 2.31,
    "4x16x4_32": 4.50,
    "8x16x2": 5.06,
    "8x8x4": 2.36,
}


def with_its_flops(row: Any, result: Mapping[str, Any]) -> float:
    """At the paper's FLOPs, those of its utilization."""
    return result["step_s"] * row.util * row.step_s / result["full_speed_s"]


def with_its_scatters(row: Any, result: Mapping[str, Any]) -> float:
    """If all-reduces of activations scattered, see `scattered`."""
    if row.table not in ("2", "3") or row.name == "8x32":
        return math.nan
    ours = scattered(row, result)
    return ours["ops_s"] + ours["link_s"] / LINK_EFFICIENCY


def scattered(row: Any, result: Mapping[str, Any]) -> dict[str, float]:
    """`ops_s` and `link_s` if all-reduces of activations scattered: they send half.

    Where each device's slice is 128 wide, libtpu all-reduces and then slices. Without
    pipelines or experts the large all-reduces are all of these. The paper's (8,32)
    stays: its step is 1.7 times those of its neighbours, as with all-reduces.
    """
    whole = result["parts"].get("all-reduce", 0.0)
    saved = 0.0 if row.name == "8x32" else whole / 2
    return {
        "ops_s": result["ops_s"],
        "link_s": result["link_s"] - saved * LINK_EFFICIENCY,
    }


def with_its_recomputation(row: Any, result: Mapping[str, Any]) -> float:
    """With the paper's share of recomputation."""
    return _recomputing(row, result, result["step_s"])


def with_its_reductions(row: Any, result: Mapping[str, Any]) -> float:
    """Likewise, with gradients reduced in each iteration of a pipeline."""
    return _recomputing(
        row, result, result["step_s"] + _REDUCTIONS.get(row.name, math.nan)
    )


def _recomputing(row: Any, result: Mapping[str, Any], step_s: float) -> float:
    known = result["of_which"]
    busy = 1 - known.get("in bubbles", 0.0) / result["step_s"]
    recomputed = known.get("recomputed", math.nan) / busy
    return (step_s - recomputed) / (1 - row.recompute)


DIFFERENCES = {
    "as many FLOPs as the paper's": with_its_flops,
    "as much recomputed as in the paper": with_its_recomputation,
    "that, and gradients reduced each iteration": with_its_reductions,
    "the reduce-scatters of the paper's Figure 7": with_its_scatters,
}
"""What each function takes away, for a text."""


def program(row: Any, result: Mapping[str, Any]) -> float:
    """Our step time for a program as much like the paper's as is known.

    Tables 2 and 3 scatter, Table 4 reduces gradients in each iteration, Tables 4 and 5
    recompute more, Table 7 has fewer FLOPs. Of other rows no differences are known.
    """
    for tables, like_paper in (
        ("23", with_its_scatters),
        ("4", with_its_reductions),
        ("5", with_its_recomputation),
        ("7", with_its_flops),
    ):
        if row.table in tables:
            seconds = like_paper(row, result)
            return result["step_s"] if math.isnan(seconds) else seconds
    return result["step_s"]
