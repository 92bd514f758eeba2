"""A plan as a document: plain values that the text, the page and JSON are made of.

Top-level keys are stable; keys may be added. Bytes are of one device, seconds of one
step. None stands for what is not known: times on cpu, much of a program that does not
fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorflow.python.util import nest

from meshwright.framework.compiler.hlo.hlo_text import HloModule, Instruction
from meshwright.framework.compiler.hlo.memory import MemoryTimeline, breakdown
from meshwright.framework.compiler.hlo.out_of_memory import Allocation
from meshwright.framework.compiler.hlo.step_errors import (
    ALL_STEPS,
    MEASURED_KIND,
    SEEN_ERRORS,
    STEP_ERRORS,
    ModelKind,
)
from meshwright.framework.compiler.hlo.step_time import (
    PRODUCTS,
    CollectiveTime,
    OpTime,
    TimePart,
)
from meshwright.trainers.experiment.stacks import model_kind
from meshwright.trainers.experiment.step_programs import StepPrograms

if TYPE_CHECKING:
    from meshwright.trainers.planning.planning import CompileReport

_PACKAGES = ("meshwright", "jax", "jaxlib", "tensorflow", "libtpu", "jax-cuda12-pjrt")
_STATE = {"theta": "weights", "slots": "slots", "ema": "ema"}
_BATCHES = "batches"
_LARGEST = 20
_MOMENTS = 400
_SLOWEST = 3
_OPS = {
    TimePart.MATRIX: "matrix products",
    TimePart.VECTOR: "other ops",
    TimePart.MEMORY: "ops that wait for memory",
}


def document(
    report: CompileReport, *, config_text: str = "", gin_files: Sequence[str] = ()
) -> dict[str, Any]:
    """The contents of a plan, as values that JSON has.

    Args:
      report: the result of `plan`.
      config_text: the configuration in effect, to be kept with the plan.
      gin_files: the files that it was read from; the plan is named after them.

    Returns:
      The document: docs/reference/planning/planning.md has a table of its keys.
    """
    mesh = report.experiment.plan.mesh
    programs = StepPrograms(report.experiment)
    model = type(report.experiment.task).__name__
    return {
        "name": " + ".join(pathlib.PurePath(file).stem for file in gin_files) or model,
        "model": model,
        "num_weights": sum(spec.size for spec in programs.state_specs.theta.leaves()),
        "topology": report.topology,
        "devices": mesh.size,
        "mesh": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "partitioner": report.experiment.partitioner.value,
        **_memory(report, programs),
        **_time(report),
        "pipelines": list(_pipelines(report)),
        "collectives": list(map(dataclasses.asdict, report.collectives)),
        "device_order": _device_order(report),
        "weight_updates": _weight_updates(report),
        "weights": list(_weights(programs)),
        "replicated": [
            {
                "name": tensor.name,
                "type": _type(tensor.dtype, tensor.shape),
                "bytes": tensor.bytes,
                "why": tensor.why,
            }
            for tensor in report.replicated
        ],
        "versions": _versions(),
        "config": config_text,
    }


def _memory(report: CompileReport, programs: StepPrograms) -> dict[str, Any]:
    state = _state_bytes(report, programs)
    limit, peak = report.memory_limit, report.peak_bytes
    # The compiler also counts the gaps between live buffers.
    needed = max(peak, report.allocated_bytes or 0)
    over = report.refusal.refusal.over if report.refusal else max(0, needed - limit)
    return {
        "fits": report.fits,
        "memory_limit": limit,
        "peak_bytes": peak,
        "allocated_bytes": report.allocated_bytes,
        "over_bytes": over,
        "refusal": str(report.refusal or ""),
        "weights_bytes": state["weights"],
        "slots_bytes": state["slots"],
        **_uses(report, programs, state),
        "buffers": _alike(report.allocations)[:_LARGEST],
        "timeline": _timeline(report.memory),
    }


def _uses(
    report: CompileReport, programs: StepPrograms, state: dict[str, int]
) -> dict[str, Any]:
    """The uses of the memory at the peak."""
    if report.memory is None and not report.allocations:
        # The compiler reports the sum alone.
        parts = {"not known": report.peak_bytes}
        arguments = outputs = saved = temporaries = None
    elif report.memory is None:  # The arguments alone do not fit.
        parts = {name: size for name, size in state.items() if size}
        parts[_BATCHES] = report.peak_bytes - sum(state.values())
        arguments, outputs, saved, temporaries = report.peak_bytes, None, None, None
    else:
        uses = breakdown(report.memory, _groups(programs))
        parts = uses.parts()
        arguments = sum(uses.arguments.values())
        outputs, saved = uses.results, uses.saved
        temporaries = uses.gradients + uses.weight_copies + uses.other
    return {
        "argument_bytes": arguments,
        "output_bytes": outputs,
        "saved_bytes": saved,
        "temp_bytes": temporaries,
        "breakdown": [{"part": name, "bytes": size} for name, size in parts.items()],
    }


def _groups(programs: StepPrograms) -> dict[str, list[int]]:
    """The numbers of the training program's arguments, by the part that they hold."""
    arguments = (programs.abstract_state(), programs.abstract_batches())
    groups: dict[str, list[int]] = {}
    for number, (path, _) in enumerate(
        nest.flatten_with_joined_string_paths(arguments, separator=".")
    ):
        argument, part = path.split(".")[:2]
        group = _BATCHES if argument == "1" else _STATE.get(part)
        if group:
            groups.setdefault(group, []).append(number)
    order = [*_STATE.values(), _BATCHES]
    return {group: groups[group] for group in order if group in groups}


def _alike(allocations: Sequence[Allocation]) -> list[dict[str, Any]]:
    """Allocations by size; those alike in type, place and use make one entry."""
    entries: dict[tuple[str, ...], dict[str, Any]] = {}
    for allocation in allocations:
        # The program's arguments are the state and the batches.
        first, _, path = allocation.name.partition(".")
        named = {"0": path, "1": f"batch.{path}"}.get(first, allocation.layer)
        entry = {
            "kind": allocation.what,
            "type": allocation.type,
            "name": named or allocation.name,
            "source": allocation.source,
        }
        merged = entries.setdefault(
            tuple(entry.values()), entry | {"bytes": 0, "count": 0}
        )
        merged["bytes"] += allocation.bytes
        merged["count"] += 1
    return sorted(entries.values(), key=lambda entry: -entry["bytes"])


def _timeline(memory: MemoryTimeline | None) -> list[int] | None:
    """Bytes alive over the run of the program, `_MOMENTS` at most; peaks stay."""
    if memory is None:
        return None
    alive = [point.bytes for point in memory.points]
    ends = [len(alive) * i // _MOMENTS for i in range(_MOMENTS + 1)]
    return [max(alive[a:b]) for a, b in itertools.pairwise(ends) if a < b]


def _time(report: CompileReport) -> dict[str, Any]:
    parts = None
    if report.time is not None:
        steps = report.experiment.steps_per_loop
        parts = {name: took / steps for name, took in report.time.parts().items()}
    return {
        "compile_seconds": report.compile_seconds,
        "model_flops": report.model_flops,
        "peak_flops": report.peak_flops,
        "step_seconds": report.step_seconds,
        "step_error": _step_error(report),
        "seen_error": _seen_error(report),
        "roofline_seconds": report.roofline_seconds,
        "flops_utilization": report.flops_utilization,
        "parts": parts,
        "of_which": report.of_which(),
        "slowest": list(_slowest(report)),
        "slowest_product": _slowest_product(report),
    }


def _slowest(report: CompileReport) -> Iterator[dict[str, Any]]:
    """What takes most of a step: ops of a part and layer, collectives of an axis too.

    Of collectives only the time counts that other ops do not hide.
    """
    groups: dict[tuple[str, str], list[OpTime | CollectiveTime]] = {}
    for timed in report.time.all() if report.time else ():
        if isinstance(timed, CollectiveTime):
            axes = timed.collective.axes
            what = f"{timed.kind} along {'?' if axes is None else '.'.join(axes)}"
        else:
            what = _OPS[timed.part]
        groups.setdefault((what, _layer(report, timed.op_name)), []).append(timed)
    steps = report.experiment.steps_per_loop
    rows = [
        {
            "what": what,
            "layer": layer,
            "count": sum(timed.count for timed in group) / steps,
            "seconds": sum(timed.exposed for timed in group) / steps,
        }
        for (what, layer), group in groups.items()
    ]
    yield from sorted(rows, key=lambda row: -row["seconds"])[:_SLOWEST]


def _slowest_product(report: CompileReport) -> dict[str, Any] | None:
    """The slowest op with a product, of the layer whose products take most of a step.

    None if the program has no products.
    """
    products: dict[str, list[tuple[float, OpTime, list[str]]]] = {}
    for timed in report.time.ops if report.time else ():
        types = _product_types(report.module, report.module.by_name[timed.name])
        if types:
            row = (timed.seconds, timed, types)
            products.setdefault(_layer(report, timed.op_name), []).append(row)
    if not products:
        return None

    def took(layer: str) -> float:
        return sum(seconds for seconds, _, _ in products[layer])

    layer, steps = max(products, key=took), report.experiment.steps_per_loop
    seconds, timed, types = max(products[layer], key=lambda row: row[0])
    return {
        "types": types,
        "layer": layer,
        "op": timed.op_name,
        "count": timed.count / steps,
        "seconds": seconds / steps,
    }


def _layer(report: CompileReport, op_name: str) -> str:
    source = report.program.sources.find(op_name)
    return source.layer if source else ""


def _product_types(module: HloModule, op: Instruction) -> list[str]:
    """The types of the operands of the first product of an op, on a device."""
    if op.opcode in PRODUCTS:
        return [_type(x.dtype, x.shape) for x in module.operands(op)]
    parts = (part for name in op.called for part in module.inside[name])
    return next(filter(None, (_product_types(module, part) for part in parts)), [])


def _pipelines(report: CompileReport) -> Iterator[dict[str, Any]]:
    for pipeline in report.pipelines:
        bubbles = pipeline.bubble_seconds
        yield {
            "path": pipeline.path,
            **dataclasses.asdict(pipeline.schedule),
            "order": pipeline.schedule.order.value,
            "iterations": pipeline.schedule.iterations,
            "bubble_fraction": pipeline.schedule.bubble_fraction,
            "timetable": np.where(
                pipeline.schedule.valid, pipeline.schedule.microbatch, -1
            ).tolist(),
            "seconds_in_bubbles": (
                None if bubbles is None else bubbles / report.experiment.steps_per_loop
            ),
        }


def _step_error(report: CompileReport) -> dict[str, Any] | None:
    """Relative errors of models like this one; None where none was ever measured."""
    if report.time is None or report.pod.kind.name != MEASURED_KIND:
        return None
    kind = model_kind(report.experiment.task)
    error = STEP_ERRORS.get(kind, ALL_STEPS)
    return {
        "kind": None if kind is None else kind.value,
        **dataclasses.asdict(error),
        "worst_of_all": ALL_STEPS.worst,
    }


def _seen_error(report: CompileReport) -> dict[str, Any] | None:
    """Errors of the few steps that were published for other TPUs; None without any."""
    if report.time is None or report.pod.kind.name not in SEEN_ERRORS:
        return None
    tpu = report.pod.kind.name
    return {
        "tpu": tpu,
        "kind": ModelKind.DENSE.value,
        **dataclasses.asdict(SEEN_ERRORS[tpu]),
    }


def _device_order(report: CompileReport) -> dict[str, Any] | None:
    order = report.order
    if order is None:
        return None
    torus, mesh = order.topology, report.experiment.plan.mesh
    return {
        "chips": list(torus.chips),
        "cores": torus.kind.cores,
        "wraps": list(torus.wraps),
        "axes": [
            {
                "axis": axis,
                "size": size,
                "box": None if order.boxes is None else list(order.boxes[number]),
                "load": order.loads[number],
            }
            for number, (axis, size) in enumerate(
                zip(mesh.axis_names, mesh.shape, strict=True)
            )
        ],
    }


def _weight_updates(report: CompileReport) -> dict[str, Any] | None:
    """Decisions; None if none were requested, or the compiler refused the program."""
    updates = report.program and report.program.updates
    if updates is None:
        return None
    return {
        "summary": " ".join(updates.summary().split()),
        "mode": updates.mode,
        "data_axes": list(updates.data_axes),
        "lines": [
            {
                "names": list(line.names),
                "shape": list(line.shape),
                "ops": line.ops,
                "format": line.format,
                "why": line.why,
                "state_saved_bytes": line.state_saved_bytes,
                "traffic_saved_bytes": line.traffic_saved_bytes,
                "gathered_bytes": line.gathered_bytes,
                "gain_seconds": line.gain,
            }
            for line in updates.lines
        ],
    }


def _weights(programs: StepPrograms) -> Iterator[dict[str, Any]]:
    for (path, spec), sharding in zip(
        programs.state_specs.theta.items_by_path(),
        programs.plan_layout.shardings.theta.leaves(),
        strict=True,
    ):
        yield {
            "path": path,
            "type": _type(spec.dtype.name, spec.shape),
            "dims": list(spec.dims),
            "sharding": str(sharding),
            "axes": [list(axes) for axes in sharding.dims],
            "shard_shape": list(sharding.shard_shape(spec.shape)),
            "bytes": spec.shard_bytes(sharding),
        }


def _state_bytes(report: CompileReport, programs: StepPrograms) -> dict[str, int]:
    """Bytes of weights, slots and averages; by the plan alone if it was refused."""
    if report.program is None:
        shapes = [spec.shape for spec in programs.state_specs.leaves()]
        shardings = programs.plan_layout.shardings.leaves()
    else:  # In stored form, which weight-update sharding may have changed.
        shapes = [tuple(spec.shape) for spec in nest.flatten(report.program.inputs[0])]
        shardings = report.program.in_shardings[: len(shapes)]
    specs = programs.state_specs.items_by_path()
    totals = dict.fromkeys(_STATE.values(), 0)
    for (path, spec), shape, sharding in zip(specs, shapes, shardings, strict=True):
        if part := _STATE.get(path.split(".")[0]):
            totals[part] += math.prod(sharding.shard_shape(shape)) * spec.dtype.size
    return totals


def _type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        # The last two are only installed for planning.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
