"""A plan as a list of sections, which its text, its page and TensorBoard loop over."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.framework.compiler.hlo.out_of_memory import REMEDY
from meshwright.framework.compiler.hlo.step_errors import seen_text
from meshwright.framework.sizes import bytes_text
from meshwright.layers.stacks.pipelines.pipeline_schedule import (
    PipelineOrder,
    PipelineSchedule,
)
from meshwright.trainers.planning.plan_parts import Plot, Section
from meshwright.trainers.planning.plan_units import (
    low_use_texts,
    mesh_text,
    prefixed,
    schedule_text,
    seconds_text,
    share_text,
    torus_text,
)

Document = Mapping[str, Any]

_MOST_WEIGHTS = 60


def sections(document: Document) -> list[Section]:
    """The report's sections, the summary first.

    Args:
      document: the result of `plan_document.document`.
    """
    makers: Sequence[Callable[[Document], Iterator[Section]]] = (
        _summary,
        _memory,
        _time,
        _pipelines,
        _collectives,
        _device_order,
        _weight_updates,
        _weights,
        _replicated,
        _configuration,
    )
    return [section for make in makers for section in make(document)]


def _verdict(document: Document) -> str:
    """Whether the program fits, and by how much."""
    limit, peak = document["memory_limit"], document["peak_bytes"]
    of = f"of {bytes_text(limit)} a device"
    if document["fits"]:
        return f"fits: {bytes_text(peak)} {of}, {bytes_text(limit - peak)} to spare"
    over = bytes_text(document["over_bytes"])
    return f"does not fit: {over} more than the {bytes_text(limit)} of a device"


_UNKNOWN = "unknown, as the task has no train_flops"


def _summary(document: Document) -> Iterator[Section]:
    scalars = ("peak_bytes", "memory_limit", "step_seconds", "flops_utilization")
    peak, limit, step, utilization = (document[name] for name in scalars)
    weights = prefixed(document["num_weights"], " weights")
    flops = document["model_flops"]
    facts = {
        "model": f"{document['model']}, {weights}",
        "devices": f"{document['devices']}, partitioned by {document['partitioner']}",
        "peak of a device": f"{bytes_text(peak)} ({share_text(peak, limit)})",
        "model, a step": _UNKNOWN if flops is None else prefixed(flops, "FLOP"),
    }
    if step is not None:
        facts["step, estimated"] = seconds_text(step) + _error_bar(document)
        if (least := document["roofline_seconds"]) is not None:
            facts["by roofline alone"] = seconds_text(least)
        known = utilization is not None
        facts["FLOPS utilization"] = share_text(utilization) if known else "unknown"
    if document["fits"]:
        facts["compiling"] = f"{document['compile_seconds']:.1f} s"
    yield Section(
        name="summary",
        title=f"Plan of {document['name']} on {document['topology']} as "
        f"{mesh_text(document['mesh'])}",
        notes=[_verdict(document)],
        facts=facts,
        scalars={name: document[name] for name in scalars},
    )


def _memory(document: Document) -> Iterator[Section]:
    limit, peak = document["memory_limit"], document["peak_bytes"]
    parts = {row["part"]: row["bytes"] for row in document["breakdown"]}
    sizes = parts | {"total at the peak": peak}
    if (allocated := document["allocated_bytes"]) is not None:
        sizes["as XLA lays them out"] = allocated
    elif peak <= limit and document["over_bytes"]:
        sizes["with gaps between buffers"] = limit + document["over_bytes"]
    notes = [
        "These parts are the buffers alive at the peak, padded to the tiles of the "
        "device's layout. By their elements alone weights take "
        f"{bytes_text(document['weights_bytes'])} between steps, and slots "
        f"{bytes_text(document['slots_bytes'])}."
    ]
    if allocated is not None:
        notes.append(
            "CUDA, NCCL and cuDNN need memory of their own, which is not counted. JAX "
            "takes three quarters of a GPU's unless XLA_PYTHON_CLIENT_MEM_FRACTION "
            "says otherwise."
        )
    if not document["fits"]:
        notes.append(f"To make it fit: {REMEDY}.")
    yield Section(
        name="memory",
        title=f"Memory per device ({bytes_text(limit)})",
        notes=notes,
        fields=("bytes", "share", "part"),
        rows=_shares(sizes, limit, "bytes"),
        plots=[
            *_timeline(document),
            *_bars(
                "breakdown",
                "Uses of a device's memory at the peak",
                _by_size(parts),
                axis="bytes of a device at the peak",
            ),
        ],
        scalars={f"memory/{part}": size for part, size in parts.items()},
    )
    if document["buffers"]:
        yield Section(
            name="buffers",
            title="Largest buffers at the peak",
            fields=("bytes", "count", "kind", "type", "name", "source"),
            rows=document["buffers"],
            brief=5,
        )


def _timeline(document: Document) -> Iterator[Plot]:
    alive, limit = document["timeline"], document["memory_limit"]
    if alive:
        peak = max(alive)
        yield Plot(
            name="timeline",
            title="Memory in use on a device during a step",
            text=f"{bytes_text(alive[0])} at first; {bytes_text(peak)} at the peak, "
            f"after {share_text(alive.index(peak), len(alive))} of the points; "
            f"{bytes_text(alive[-1])} at the end; the device has {bytes_text(limit)}.",
            kind="curve",
            figures={"alive": alive, "limit": limit},
        )


def _use_of_peak(document: Document) -> str:
    peak = f"the devices' peak, {prefixed(document['peak_flops'], 'FLOP')}/s"
    if (flops := document["model_flops"]) is None:
        return f"The model's FLOPs are {_UNKNOWN}, and so is their share of {peak}."
    share = share_text(document["flops_utilization"])
    return f"The model's {prefixed(flops, 'FLOP')} use {share} of {peak}."


def _time(document: Document) -> Iterator[Section]:
    parts, step = document["parts"], document["step_seconds"]
    if parts is None:
        why = "estimates are for topologies of TPUs and GPUs"
        if not document["fits"]:
            why = "the program does not fit"
        note = f"There is no estimate: {why}."
        yield Section(name="time", title="Time of a step", notes=[note])
        return
    of_which = document["of_which"]
    shares = dict(_by_size(parts))
    shares |= {f"of which {what}": took for what, took in of_which.items()}
    yield Section(
        name="time",
        title="Time of a step",
        notes=[
            f"{seconds_text(step)} by estimate: {_error_text(document)}.",
            _use_of_peak(document),
            *low_use_texts(document),
        ],
        fields=("seconds", "share", "part"),
        rows=_shares(shares, step, "seconds"),
        plots=list(_step_time(document)),
        scalars={
            **{f"time/{part}": took for part, took in parts.items()},
            **{f"time_of_which/{what}": took for what, took in of_which.items()},
        },
    )


def _step_time(document: Document) -> Iterator[Plot]:
    step, error = document["step_seconds"], document["step_error"]
    kinds = {row["kind"] for row in document["collectives"]}
    parts = _by_size(document["parts"])
    sent = [0.0, *(took if part in kinds else 0.0 for part, took in parts)]
    computed = [0.0, *(0.0 if part in kinds else took for part, took in parts)]
    labels = [f"{seconds_text(took)}, {share_text(took, step)}" for _, took in parts]
    return _bars(
        "time",
        "Parts of the time of a step",
        [("step", step), *parts],
        series={
            "computing": computed,
            "sending": sent,
            "all": [step, *(0.0 for _ in parts)],
        },
        labels=[seconds_text(step) + _error_bar(document), *labels],
        axis="time of a step",
        error=step * error["worst"] if error else None,
    )


def _error_bar(document: Document) -> str:
    error = document["step_error"]
    return f" \u00b1 {share_text(error['worst'])}" if error else ""


def _error_text(document: Document) -> str:
    """The error of the step time, by the measured steps that it was compared with."""
    error, step = document["step_error"], document["step_seconds"]
    if (least := document["roofline_seconds"]) is not None:
        return (
            f"{seconds_text(least)} by roofline, as no op is faster than its FLOPs or "
            "bytes allow, and more where XLA's own estimates of ops are longer; "
            "launches are not counted, nor what else slows a GPU, and no device was "
            "measured"
        )
    if error is None and (seen := document["seen_error"]) is not None:
        return seen_text(seen["tpu"], seen["steps"], seen["worst"])
    if error is None:
        return "error unknown, as no measured step of such devices was compared"
    least, most = (seconds_text(step * (1 + sign * error["worst"])) for sign in (-1, 1))
    worst, mean = share_text(error["worst"]), share_text(error["mean"])
    share = f"({worst} at worst, {mean} on average)"
    if error["kind"] is None:
        return (
            f"{least} to {most}, if no further off than all {error['steps']} published "
            f"TPU v3 steps {share}, none of which is of such a model"
        )
    return (
        f"{least} to {most}, if no further off than the {error['steps']} published TPU "
        f"v3 steps of {error['kind']} {share}; of those of all kinds the worst is off "
        f"by {error['worst_of_all']:.0%}"
    )


def _pipelines(document: Document) -> Iterator[Section]:
    pipelines = document["pipelines"]
    if pipelines:
        yield Section(
            name="pipelines",
            title="Pipelines",
            fields=(
                *("iterations", "bubble_fraction", "seconds_in_bubbles"),
                *("path", "schedule"),
            ),
            rows=[row | {"schedule": schedule_text(row)} for row in pipelines],
            plots=[_schedule(*pair) for pair in enumerate(pipelines, start=1)],
            scalars={
                f"bubble_fraction/{row['path']}": row["bubble_fraction"]
                for row in pipelines
            },
        )


def _schedule(number: int, pipeline: Mapping[str, Any]) -> Plot:
    sizes = ("num_stages", "num_microbatches", "num_repeats")
    schedule = PipelineSchedule(
        **{name: pipeline[name] for name in sizes},
        order=PipelineOrder(pipeline["order"]),
    )
    waits = schedule.iterations - int(schedule.valid[:, 0].sum())
    both = ""
    if schedule.is_one_f_one_b:
        total = schedule.iterations + schedule.backward_start
        both = (
            f" Backward passes have as many, the first in iteration "
            f"{schedule.backward_start}: {total} iterations together."
        )
    return Plot(
        name=f"pipeline{number}",
        title=f"Schedule of the pipeline {pipeline['path']}: "
        f"{share_text(pipeline['bubble_fraction'])} bubbles",
        text=f"{schedule_text(pipeline)}: {schedule.iterations} iterations, in {waits} "
        f"of which a stage works on no microbatch.{both}",
        kind="timetable",
        figures={"schedule": schedule},
    )


def _collectives(document: Document) -> Iterator[Section]:
    collectives = document["collectives"]
    notes = ["There are none." if document["fits"] else "Not known if refused."]
    if collectives:
        total = bytes_text(sum(row["bytes"] for row in collectives))
        notes = [
            f"{total} in total, in one step of the compiled program; bytes are those "
            "of a group's full tensors."
        ]
    if any(row["seconds"] == 0 and row["bytes"] for row in collectives):
        notes.append(
            "Collectives that take no time stay within a chip: its cores exchange data "
            "through no link, and links alone are counted."
        )
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in collectives:
        sums[row["kind"], row["axis"] or "no axis"] += row["bytes"]
    kinds = list(dict.fromkeys(kind for kind, _ in sums))
    by_axis: collections.Counter[str] = collections.Counter()
    for (_, axis), size in sums.items():
        by_axis[axis] += size
    totals = _by_size(by_axis)
    yield Section(
        name="collectives",
        title="Collectives of a step",
        notes=notes,
        fields=("count", "bytes", "seconds", "kind", "axis", "layer"),
        rows=collectives,
        brief=8,
        plots=list(
            _bars(
                "collectives",
                "Bytes that collectives send along each mesh axis",
                totals,
                series={
                    kind: [sums[kind, axis] for axis, _ in totals] for kind in kinds
                },
                axis="bytes of full tensors, a step",
            )
        ),
        scalars={
            f"collective_bytes/{kind} along {axis}": size
            for (kind, axis), size in sums.items()
        },
    )


def _device_order(document: Document) -> Iterator[Section]:
    order = document["device_order"]
    if order is not None:
        yield Section(
            name="order",
            title="Placement of the mesh on the torus",
            notes=[f"Device order on {torus_text(order)}."],
            fields=("load", "axis", "size", "box"),
            rows=order["axes"],
        )


def _weight_updates(document: Document) -> Iterator[Section]:
    updates = document["weight_updates"]
    if updates is None:
        return
    sharded = [line for line in updates["lines"] if not line["why"]]
    unsharded = [line for line in updates["lines"] if line["why"]]
    sums = ("state_saved_bytes", "gathered_bytes", "gain_seconds")
    yield Section(
        name="updates",
        title="Sharded weight updates",
        notes=[f"{updates['summary']}."],
        fields=(*sums, "names", "shape", "format"),
        rows=sharded,
        brief=5,
        scalars={
            "weight_updates/sharded": len(sharded),
            **{f"weight_updates/{x}": sum(line[x] for line in sharded) for x in sums},
        },
    )
    if unsharded:
        yield Section(
            name="left",
            title="Weight updates left unsharded",
            fields=("names", "shape", "why"),
            rows=sorted(unsharded, key=lambda line: -math.prod(line["shape"])),
            brief=3,
        )


def _weights(document: Document) -> Iterator[Section]:
    weights, notes = document["weights"], []
    if document["weights_bytes"] < sum(row["bytes"] for row in weights):
        notes.append(
            "These are the plan's shards, with which a step computes. Between steps a "
            "device holds less of weights that are updated on shards: "
            f"{bytes_text(document['weights_bytes'])} in total."
        )
    ordered = sorted(weights, key=lambda row: -row["bytes"])
    drawn, rest = ordered[:_MOST_WEIGHTS], len(ordered[_MOST_WEIGHTS:])
    plot = Plot(
        name="weights",
        title="The dim of each weight that each mesh axis splits"
        + (f"; without the {rest} smallest" if rest else ""),
        text="; ".join(f"{row['path']} {row['sharding']}" for row in drawn) + ".",
        kind="grid",
        figures={"weights": drawn, "mesh": document["mesh"]},
    )
    yield Section(
        name="weights",
        title="Weights and their shards",
        notes=notes,
        fields=("bytes", "path", "type", "dims", "sharding", "shard_shape"),
        rows=weights,
        plots=[plot] if drawn else [],
        in_text=False,
    )


def _replicated(document: Document) -> Iterator[Section]:
    tensors = document["replicated"]
    total = bytes_text(sum(row["bytes"] for row in tensors))
    note = f"{len(tensors)} tensors of state and batch, {total}."
    yield Section(
        name="replicated",
        title="Tensors replicated on every device",
        notes=[note if tensors else "No tensor of state and batch."],
        fields=("bytes", "name", "type", "why"),
        rows=tensors,
        brief=3,
    )


def _configuration(document: Document) -> Iterator[Section]:
    versions, config = document["versions"].items(), document["config"]
    yield Section(
        name="configuration",
        title="Configuration",
        notes=[", ".join(f"{name} {version}" for name, version in versions)],
        details=("All values in effect, as a gin file", config) if config else None,
        in_text=False,
    )


def _bars(
    name: str,
    title: str,
    sizes: Sequence[tuple[str, float]],
    *,
    axis: str,
    series: Mapping[str, Sequence[float]] | None = None,
    labels: Sequence[str] = (),
    error: float | None = None,
) -> Iterator[Plot]:
    """A bar for each name, stacked from the series; of bytes if unlabelled."""
    if not sizes:
        return
    unit = "seconds" if labels else "bytes"
    labels = labels or [bytes_text(size) for _, size in sizes]
    series = series or {"": [size for _, size in sizes]}
    names = [name for name, _ in sizes]
    text = "; ".join(f"{bar} {label}" for bar, label in zip(names, labels, strict=True))
    yield Plot(
        name=name,
        title=title,
        text=text + (f". Stacked of {', '.join(series)}." if len(series) > 1 else "."),
        kind="bars",
        figures={
            "names": names,
            "series": series,
            "labels": labels,
            "unit": unit,
            "axis": axis,
            "error": error,
        },
    )


def _shares(sizes: Mapping[str, float], total: float, field: str) -> list[dict]:
    return [
        {field: size, "share": size / total, "part": part}
        for part, size in sizes.items()
    ]


def _by_size(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """The parts that are not 0, largest first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return [(name, size) for name, size in ordered if size > 0]
