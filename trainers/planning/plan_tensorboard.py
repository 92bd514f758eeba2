"""A plan in TensorBoard: its figures as scalars, its pictures as images."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from meshwright.trainers.planning.plan_plots import pictures
from meshwright.trainers.training.summaries import Summaries


def write(document: Mapping[str, Any], log_dir: str) -> None:
    """Writes a plan as the run `plan` below a folder, a training run's for example.

    Args:
      document: of `plan_document.document`.
      log_dir: the folder.

    Raises:
      OSError: it cannot be written.
    """
    with contextlib.closing(Summaries(log_dir, "plan", flag="--log_dir")) as summaries:
        summaries.scalars(0, scalars(document))
        summaries.images(
            0, {f"plan/{one.name}": one.png() for one in pictures(document)}
        )


def scalars(document: Mapping[str, Any]) -> dict[str, float]:
    """By tag: bytes of one device, seconds of one step; nothing that is not known."""
    found = {
        name: document[name]
        for name in ("peak_bytes", "memory_limit", "step_seconds", "flops_utilization")
    }
    for one in document["breakdown"]:
        found[f"memory/{one['part']}"] = one["bytes"]
    for part, seconds in (document["parts"] or {}).items():
        found[f"time/{part}"] = seconds
    for what, seconds in (document["of_which"] or {}).items():
        found[f"time_of_which/{what}"] = seconds
    for one in document["pipelines"]:
        found[f"bubble_fraction/{one['path']}"] = one["bubble_fraction"]
    for one in document["collectives"]:
        tag = f"collective_bytes/{one['kind']} along {one['axis'] or 'no axis'}"
        found[tag] = found.get(tag, 0.0) + one["bytes"]
    if updates := document["weight_updates"]:
        sharded = [one for one in updates["lines"] if not one["why"]]
        found["weight_updates/sharded"] = len(sharded)
        for what in ("state_saved_bytes", "gathered_bytes", "gain_seconds"):
            found[f"weight_updates/{what}"] = sum(one[what] for one in sharded)
    return {tag: value for tag, value in found.items() if value is not None}
