"""A plan as a document: plain values that the text, the page and JSON are made of.

Top-level keys are stable; new ones may come. Bytes are of one device, seconds of one
step, None what is not known: times on cpu, needs of a program that does not fit.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Iterator
from typing import Any

from meshwright.trainers.planning import PlanReport, refused_bytes
from meshwright.trainers.programs import Programs

_PACKAGES = ("meshwright", "jax", "jaxlib", "tensorflow", "libtpu")
_STATE = {"theta": "weights", "slots": "slots", "ema": "ema"}


def document(report: PlanReport, *, config_text: str = "") -> dict[str, Any]:
    """What a plan says, as values that JSON has.

    Args:
      report: of `plan`.
      config_text: the configuration in effect, to be kept with it.

    Returns:
      The document: docs/planning.md has a table of its keys.
    """
    mesh = report.experiment.plan.mesh
    programs = Programs(report.experiment)
    return {
        "topology": report.topology,
        "devices": mesh.size,
        "mesh": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "partitioner": report.experiment.partitioner.value,
        **_memory(report, programs),
        **_time(report),
        "collectives": [
            {
                "kind": one.kind,
                "axis": one.axis,
                "layer": one.layer,
                "count": one.count,
                "bytes": one.bytes,
                "seconds": one.seconds,
            }
            for one in report.collectives
        ],
        "device_order": _device_order(report),
        "weights": list(_weights(programs)),
        "replicated": [
            {
                "name": one.name,
                "type": _type(one.dtype, one.shape),
                "bytes": one.bytes,
                "why": one.why,
            }
            for one in report.replicated
        ],
        "versions": _versions(),
        "config": config_text,
    }


def _memory(report: PlanReport, programs: Programs) -> dict[str, Any]:
    needs = report.program and report.program.memory()
    state = _state_bytes(programs)
    parts = {name: size for name, size in state.items() if size or name != "ema"}
    if needs:
        parts["batches and padding"] = needs.arguments - sum(state.values())
        parts["results"] = needs.outputs - needs.aliased
        parts["temporaries"] = needs.temporaries
    elif refused := refused_bytes(report.refusal):
        parts["what the compiler would need"] = refused
    peak = needs.peak if needs else refused_bytes(report.refusal)
    return {
        "fits": bool(needs) and peak <= report.memory_limit,
        "memory_limit": report.memory_limit,
        "peak_bytes": peak,
        "over_bytes": peak and max(0, peak - report.memory_limit),
        "refusal": report.refusal,
        "argument_bytes": needs and needs.arguments,
        "output_bytes": needs and needs.outputs - needs.aliased,
        "temp_bytes": needs and needs.temporaries,
        "weights_bytes": state["weights"],
        "slots_bytes": state["slots"],
        "breakdown": [{"part": name, "bytes": size} for name, size in parts.items()],
    }


def _time(report: PlanReport) -> dict[str, Any]:
    torus, parts = report.torus, None
    if report.time is not None:
        steps = report.experiment.steps_per_loop
        parts = {name: took / steps for name, took in report.time.parts().items()}
    return {
        "compile_seconds": report.compile_seconds,
        "model_flops": report.model_flops,
        "peak_flops": torus and torus.kind.peak_flops * torus.size,
        "step_seconds": report.step_seconds,
        "flops_utilization": report.flops_utilization,
        "parts": parts,
    }


def _device_order(report: PlanReport) -> dict[str, Any] | None:
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


def _weights(programs: Programs) -> Iterator[dict[str, Any]]:
    for (path, spec), sharding in zip(
        programs.state_specs.theta.items_by_path(),
        programs.state_shardings().theta.leaves(),
        strict=True,
    ):
        shard = sharding.shard_shape(spec.shape)
        yield {
            "path": path,
            "type": _type(spec.dtype.name, spec.shape),
            "dims": list(spec.dims),
            "sharding": str(sharding),
            "shard_shape": list(shard),
            "bytes": math.prod(shard) * spec.dtype.size,
        }


def _state_bytes(programs: Programs) -> dict[str, int]:
    """Of weights, slots and moving averages, by the plan alone."""
    found = dict.fromkeys(_STATE.values(), 0)
    for (path, spec), sharding in zip(
        programs.state_specs.items_by_path(),
        programs.state_shardings().leaves(),
        strict=True,
    ):
        if what := _STATE.get(path.split(".")[0]):
            shard = sharding.shard_shape(spec.shape)
            found[what] += math.prod(shard) * spec.dtype.size
    return found


def _type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        # libtpu is only there for planning.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
