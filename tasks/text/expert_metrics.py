"""Metrics and pictures of mixtures of experts, from their sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def expert_metrics(sums: Mapping[str, np.ndarray], part: str) -> dict[str, float]:
    """Metrics of the mixtures of one stack, means over its K layers.

    Args:
      sums: sums by path; those of `Routing.sums`, with a leading dim K, are under
        `part`.
      part: path of the stack's sums, such as "encoder".

    Returns:
      Under `part`/: `dropped`, the share of tokens that no expert took;
      `gate_entropy`, nats; `busiest_expert`, its load over the mean; `balance_loss` and
      `z_loss`. Empty if the stack has no mixture.
    """
    if f"{part}.tokens" not in sums:
        return {}
    tokens = np.maximum(sums[f"{part}.tokens"], 1.0)
    load = np.asarray(sums[f"{part}.load"])
    busiest = load.max(-1) / np.maximum(load.mean(-1), 1e-9)
    values = {
        "dropped": sums[f"{part}.dropped"] / tokens,
        "gate_entropy": sums[f"{part}.entropy"] / tokens,
        "busiest_expert": busiest,
        "balance_loss": sums[f"{part}.balance"] / tokens,
        "z_loss": sums[f"{part}.z"] / tokens,
    }
    return {f"{part}/{name}": float(np.mean(value)) for name, value in values.items()}


def expert_heat_maps(
    sums: Mapping[str, np.ndarray], part: str
) -> dict[str, np.ndarray]:
    """The load of each expert, a row for each of the K layers; see `expert_metrics`."""
    if f"{part}.load" not in sums:
        return {}
    return {f"{part}/load_per_expert": np.asarray(sums[f"{part}.load"])}
