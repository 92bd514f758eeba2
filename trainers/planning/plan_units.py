"""Figures of a plan as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineOrder

_LOW_USE = 0.2
_UNIT = 128  # Rows of a matrix unit.
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_PREFIXES = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def seconds_text(seconds: float | None) -> str:
    """A time as `1.23 ms`; `-` if it is not known."""
    if seconds is None:
        return "-"
    if not seconds:
        return "0"
    size = abs(seconds)
    unit, scale = next(((u, s) for u, s in _UNITS if size >= 0.9995 * s), _UNITS[-1])
    value = size / scale
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{'-' if seconds < 0 else ''}{value:.{digits}f} {unit}"


def low_use_texts(document: Mapping[str, Any]) -> Iterator[str]:
    """What takes the time of a step that uses little of the peak."""
    use, step = document["flops_utilization"], document["step_seconds"]
    if use is None or use >= _LOW_USE:
        return
    where = "; ".join(
        f"{share_text(row['seconds'], step)} {row['what']}"
        f"{_in_layer(row)} ({seconds_text(row['seconds'])}, {_times(row['count'])})"
        for row in document["slowest"]
    )
    least = seconds_text(use * step)
    yield (
        f"The model's products would take {least} at the peak. What takes longest, of "
        f"ops and collectives of one layer: {where}."
    )
    if product := document["slowest_product"]:
        text = (
            f"The slowest product{_in_layer(product)} multiplies "
            f"{' by '.join(product['types'])} on a device: "
            f"{seconds_text(product['seconds'])}, {_times(product['count'])}."
        )
        dims = re.findall(r"\d+(?=[,\]])", " ".join(product["types"]))
        if any(1 < int(dim) < _UNIT for dim in dims):
            text += (
                f" Where a product contracts or keeps a dim below {_UNIT}, or 256 on "
                "v6e and tpu7x, parts of the matrix units are idle."
            )
        yield text


def _in_layer(row: Mapping[str, Any]) -> str:
    return f" in {row['layer']}" if row["layer"] else ""


def _times(count: float) -> str:
    return f"{count_text(count)} times"


def prefixed(number: float, unit: str) -> str:
    """A number as `12 GFLOP`."""
    for prefix, scale in _PREFIXES:
        if number >= scale:
            return f"{number / scale:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit.strip()}"


def share_text(part: float, total: float = 1.0) -> str:
    """A share as `12.3%`, `0.03%` below 0.1%; down to `<0.01%`."""
    if not total:
        return "-"
    percent = 100 * part / total
    if 0 < percent < 0.01:
        return "<0.01%"
    return f"{percent:.{2 if 0 < percent < 0.095 else 1}f}%"


def count_text(count: float) -> str:
    """A count as `20`, or `0.1` for what a call of several steps does once."""
    return f"{count:g}" if count < 100 else f"{count:.0f}"


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh as `X=2, Y=4`."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())


def box_text(box: Sequence[int] | None) -> str:
    """The placement of the devices along an axis, as `4 along x, both cores`."""
    if box is None:
        return "as the mesh's device_ids say"
    *chips, cores = box
    along = [f"{n} along {dim}" for n, dim in zip(chips, "xyz", strict=False) if n > 1]
    along += ["both cores"] if cores > 1 else []
    return ", ".join(along) or "one device"


def torus_text(order: Mapping[str, Any]) -> str:
    """A torus as `2 x 2 chips of 2 cores, no ends linked`."""
    chips = " x ".join(map(str, order["chips"]))
    cores = f" of {order['cores']} cores" if order["cores"] > 1 else ""
    dims = [dim for dim, wraps in zip("xyz", order["wraps"], strict=False) if wraps]
    ends = f"ends linked along {' and '.join(dims)}" if dims else "no ends linked"
    return f"{chips} chips{cores}, {ends}"


def schedule_text(pipeline: Mapping[str, Any]) -> str:
    """A schedule as `8 stages x 32 microbatches`, and `x 2 repeats` if it has them.

    And `, 1F1B` in that order.
    """
    counts = ("stages", "microbatches", "repeats")
    sizes = [(pipeline[f"num_{name}"], name) for name in counts]
    text = " x ".join(f"{n} {name}" for n, name in sizes if n > 1 or name != "repeats")
    is_1f1b = PipelineOrder(pipeline["order"]) is PipelineOrder.ONE_F_ONE_B
    return f"{text}, 1F1B" if is_1f1b else text
