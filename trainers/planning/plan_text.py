"""A plan as a table for a terminal of 80 columns."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from meshwright.framework.compiler.hlo.out_of_memory import REMEDY
from meshwright.framework.sizes import bytes_text

_WIDTH = 80
_LARGEST = 8
_BUFFERS = 5
_SHARDED, _LEFT_ALONE = 5, 3
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def plan_text(document: dict[str, Any]) -> str:
    """What `meshwright-plan --topology` prints of a `document`."""
    sections = (
        _head(document),
        _memory(document),
        _buffers(document),
        _time(document),
        _pipelines(document),
        _collectives(document),
        _device_order(document["device_order"]),
        _weight_updates(document["weight_updates"]),
        _replicated(document),
    )
    filled = [one for one in map(list, sections) if one]
    lines = itertools.chain.from_iterable(["", *one] for one in filled)
    return "\n".join(_cut(line) for line in list(lines)[1:]) + "\n"


def verdict(document: dict[str, Any]) -> str:
    """Whether it fits, and by how much."""
    limit, peak = document["memory_limit"], document["peak_bytes"]
    of = f"of {bytes_text(limit)} a device"
    if document["fits"]:
        free = bytes_text(limit - peak)
        return f"fits: {bytes_text(peak)} {of}, {free} to spare"
    over = bytes_text(document["over_bytes"])
    return f"does not fit: {over} more than the {bytes_text(limit)} of a device"


def mesh_text(document: dict[str, Any]) -> str:
    """`X=2, Y=4`."""
    return ", ".join(f"{axis}={size}" for axis, size in document["mesh"].items())


def seconds_text(seconds: float) -> str:
    """`1.23 ms`."""
    unit, size = next(
        ((unit, size) for unit, size in _UNITS if seconds >= 0.9995 * size), _UNITS[-1]
    )
    value = seconds / size
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def flops_text(flops: float) -> str:
    """`1.2e+10 FLOPs` as `11.7 GFLOP`."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"


def share_text(part: float, whole: float) -> str:
    """`12.3%`."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def count_text(count: float) -> str:
    """`20`, or `0.1` for what a call of several steps does once."""
    return f"{count:g}" if count < 100 else f"{count:.0f}"


def box_text(axis: dict[str, Any]) -> str:
    """Where the devices along an axis are: `2 x 2 chips`, `4 along x, both cores`."""
    if axis["box"] is None:
        return "as the mesh's device_ids say"
    *chips, cores = axis["box"]
    along = [f"{n} along {dim}" for n, dim in zip(chips, "xyz", strict=False) if n > 1]
    along += ["both cores"] if cores > 1 else []
    return ", ".join(along) or "one device"


def _head(document: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{document['topology']}: {document['devices']} devices as "
        f"{mesh_text(document)}, partitioned by {document['partitioner']}"
    )
    yield verdict(document)
    if document["fits"]:
        yield f"compiled in {document['compile_seconds']:.1f} s"


def _memory(document: dict[str, Any]) -> Iterator[str]:
    whole = document["memory_limit"]
    yield "memory of a device" + f"{bytes_text(whole):>28}"
    parts = [(one["part"], one["bytes"]) for one in document["breakdown"]]
    peak = document["peak_bytes"]
    parts.append(("at its peak", peak))
    if peak <= whole and document["over_bytes"]:
        parts.append(("with gaps between buffers", whole + document["over_bytes"]))
    for part, size in parts:
        yield f"  {part:<31}{bytes_text(size):>13}{share_text(size, whole):>9}"


def _buffers(document: dict[str, Any]) -> Iterator[str]:
    yield "most at the peak is taken by"
    for one in document["buffers"][:_BUFFERS]:
        times = f" ({one['count']} of them)" if one["count"] > 1 else ""
        place = f"{one['name']}, {one['source']}" if one["source"] else one["name"]
        text = f"{bytes_text(one['bytes'])} {one['kind']} {one['type']}{times}: {place}"
        yield from textwrap.wrap(
            text, _WIDTH, initial_indent="  ", subsequent_indent="      "
        )
    if not document["fits"]:
        yield from textwrap.wrap(f"To make it fit: {REMEDY}.", _WIDTH)


def _time(document: dict[str, Any]) -> Iterator[str]:
    flops = flops_text(document["model_flops"])
    if document["parts"] is None:
        yield f"a step: {flops}; no estimate of its time"
        return
    step = document["step_seconds"]
    yield f"a step, estimated{seconds_text(step):>29}"
    yield from textwrap.wrap(
        error_text(document), _WIDTH, initial_indent="  ", subsequent_indent="  "
    )
    for part, seconds in by_size(document["parts"]):
        share = share_text(seconds, step)
        yield f"  {part:<31}{seconds_text(seconds):>13}{share:>9}"
    for what, seconds in document["of_which"].items():
        share = share_text(seconds, step)
        yield f"  {f'of all this {what}':<31}{seconds_text(seconds):>13}{share:>9}"
    peak = flops_text(document["peak_flops"])
    use = share_text(document["flops_utilization"], 1)
    yield f"  {flops}, {use} of what the devices can do ({peak}/s)"


def _pipelines(document: dict[str, Any]) -> Iterator[str]:
    for one in document["pipelines"]:
        yield f"pipeline {one['path']}: {schedule_text(one)}"
        took = one["seconds_in_bubbles"]
        yield (
            f"  {one['iterations']} iterations, {bubbles_text(one)} of them bubbles"
            + ("" if took is None else f": {seconds_text(took)} of a step")
        )


def schedule_text(pipeline: dict[str, Any]) -> str:
    """`8 stages x 32 microbatches`, `4 stages x 8 microbatches x 2 repeats`."""
    counts = ("stages", "microbatches", "repeats")
    found = [(pipeline[f"num_{what}"], what) for what in counts]
    return " x ".join(f"{n} {what}" for n, what in found if n > 1 or what != "repeats")


def bubbles_text(pipeline: dict[str, Any]) -> str:
    """`17.9%`."""
    return share_text(pipeline["bubble_fraction"], 1)


def error_text(document: dict[str, Any]) -> str:
    """How far off the step time may be, by what it was compared with."""
    error = document["step_error"]
    if error is None:
        return "error unknown: no measured step of such devices was compared"
    worst, mean = share_text(error["worst"], 1), share_text(error["mean"], 1)
    step = document["step_seconds"]
    least, most = step * (1 - error["worst"]), step * (1 + error["worst"])
    return (
        f"{seconds_text(least)} to {seconds_text(most)}, if no further off than the 13 "
        f"published TPU v3 steps compared ({worst} at worst, {mean} on average; dense "
        "Transformers only)"
    )


def by_size(parts: dict[str, float]) -> list[tuple[str, float]]:
    """Those that are not 0, largest first."""
    return sorted(
        ((name, n) for name, n in parts.items() if n > 0), key=lambda one: -one[1]
    )


def _collectives(document: dict[str, Any]) -> Iterator[str]:
    found = document["collectives"]
    if not found:
        return
    total = bytes_text(sum(one["bytes"] for one in found))
    yield f"collectives of a step: {total} in all; bytes of whole tensors"
    yield f"  {'kind':<18} {'axis':<8} {'count':>6} {'bytes':>8} {'time':>8}  layer"
    for one in found[:_LARGEST]:
        took = "" if one["seconds"] is None else seconds_text(one["seconds"])
        yield (
            f"  {one['kind']:<18} {one['axis']:<8} {count_text(one['count']):>6} "
            f"{bytes_text(one['bytes']):>8} {took:>8}  {one['layer'] or '-'}"
        )
    if rest := found[_LARGEST:]:
        count = count_text(sum(one["count"] for one in rest))
        total = bytes_text(sum(one["bytes"] for one in rest))
        took = ""
        if rest[0]["seconds"] is not None:
            took = seconds_text(sum(one["seconds"] for one in rest))
        yield f"  {f'{len(rest)} more':<27} {count:>6} {total:>8} {took:>8}"


def _device_order(order: dict[str, Any] | None) -> Iterator[str]:
    if order is None:
        return
    yield f"device order on {torus_text(order)}"
    for one in order["axes"]:
        yield (
            f"  {one['axis'] + '=' + str(one['size']):<8} {box_text(one):<44} "
            f"link load {one['load']}"
        )


def torus_text(order: dict[str, Any]) -> str:
    """`2 x 2 chips of 2 cores, no ends linked`."""
    chips = " x ".join(map(str, order["chips"]))
    cores = f" of {order['cores']} cores" if order["cores"] > 1 else ""
    dims = [dim for dim, wraps in zip("xyz", order["wraps"], strict=False) if wraps]
    ends = f"ends linked along {' and '.join(dims)}" if dims else "no ends linked"
    return f"{chips} chips{cores}, {ends}"


def _weight_updates(updates: dict[str, Any] | None) -> Iterator[str]:
    if updates is None:
        return
    yield from textwrap.wrap(updates["summary"], _WIDTH, subsequent_indent="  ")
    sharded = [one for one in updates["lines"] if not one["why"]]
    if sharded:
        yield _update_row("state saved", "gathered", "est. gain") + "weight"
    for one in sharded[:_SHARDED]:
        yield from textwrap.wrap(
            f"{one['names'][0]} {one['format']}",
            _WIDTH,
            initial_indent=_update_row(*update_sizes([one])),
            subsequent_indent=_update_row("", "", ""),
        )
    if rest := sharded[_SHARDED:]:
        yield _update_row(*update_sizes(rest)) + f"{len(rest)} more"
    left = [one for one in updates["lines"] if one["why"]]
    left.sort(key=lambda one: -math.prod(one["shape"]))
    for one in left[:_LEFT_ALONE]:
        yield from textwrap.wrap(
            f"left alone: {one['names'][0]} {one['shape']}, as {one['why']}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="      ",
        )
    if rest := left[_LEFT_ALONE:]:
        yield f"  left alone: {len(rest)} more"


def _update_row(saved: str, gathered: str, gain: str) -> str:
    return f"  {saved:>11} {gathered:>9} {gain:>9}  "


def update_sizes(lines: list[dict[str, Any]]) -> tuple[str, str, str]:
    """State saved, gathered and estimated gain of some updates together."""
    saved = sum(one["state_saved_bytes"] for one in lines)
    gathered = sum(one["gathered_bytes"] for one in lines)
    gain = sum(one["gain_seconds"] for one in lines)
    sign = "-" if gain < 0 else ""
    return bytes_text(saved), bytes_text(gathered), sign + seconds_text(abs(gain))


def _replicated(document: dict[str, Any]) -> Iterator[str]:
    found = document["replicated"]
    if not found:
        yield "replicated: nothing of state and batch"
        return
    total = bytes_text(sum(one["bytes"] for one in found))
    yield (
        f"replicated on each of {document['devices']} devices: {len(found)} tensors "
        f"of state and batch, {total}"
    )
    for one in found[:3]:
        text = f"{bytes_text(one['bytes'])} {one['type']} {one['name']}: {one['why']}"
        yield from textwrap.wrap(
            text, _WIDTH, initial_indent="  ", subsequent_indent="      "
        )


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
