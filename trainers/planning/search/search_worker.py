"""A process that compiles and prices one candidate of a search.

A compiler that ends its process, or takes all its memory, ends this process alone. The
process ends with the search too, however that ends: its standard input is a pipe, which
closes then.

    python -m meshwright.trainers.planning.search.search_worker FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import threading
from typing import Any

import jax

import meshwright.layers
import meshwright.tasks  # noqa: F401 (both register what gin files name)
from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.devices.device_order import DeviceOrder, device_orders
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.experiment.bindings.outside_names import import_modules
from meshwright.trainers.planning.planning import CompileReport, plan
from meshwright.trainers.planning.search.search_result import Result
from meshwright.trainers.planning.search.search_space import built

REQUEST = "request.json"
RESULT = "result.json"


def price(request: dict[str, Any]) -> Result:
    """Compiles and prices the program of a request, which `search.Compile` makes."""
    try:
        import_modules(request["imports"])
        experiment = built(request["gin_files"], request["gin_params"])
        report = plan(experiment, topology=request["topology"])
    # The compiler may refuse a program with any of its errors.
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return Result(refusal=_one_line(error))
    if not report.fits:
        reason = report.refusal or f"{bytes_text(report.peak_bytes)} at its peak"
        return Result(refusal=_one_line(reason), too_large=True)
    seconds, order = fastest(report)
    utilization = report.flops_utilization
    is_default = order is report.order
    return Result(
        seconds=seconds,
        device_ids=None if is_default else tuple(map(int, order.ids.flat)),
        peak=report.peak_bytes,
        utilization=utilization and utilization * report.step_seconds / seconds,
        compile_seconds=report.compile_seconds,
    )


def fastest(report: CompileReport) -> tuple[float, DeviceOrder]:
    """Estimated seconds of a step in the best order, and that order.

    The trainer's order loads the links least if all axes send alike. A program whose
    weights go along one axis, and hardly anything along the rest, may do better if that
    axis's rings share no links. What it sends is known once it is compiled; each order
    then costs no more than another estimate.

    Args:
      report: the report of a program that fits a TPU topology; its mesh gives no order.
    """
    mesh, default = report.experiment.plan.mesh, report.order
    best = report.step_seconds, default
    for order in device_orders(mesh.shape, report.pod)[1:]:
        seconds = step_time(report.module, mesh, order).seconds
        seconds /= report.experiment.steps_per_loop
        if seconds < best[0]:
            best = seconds, order
    return best


def _one_line(reason: Any) -> str:
    lines = str(reason).strip().splitlines()
    return lines[0].strip() if lines else type(reason).__name__


def main(folder: str) -> None:
    """Reads `REQUEST` in a folder, writes `RESULT` beside it."""
    request = json.loads(pathlib.Path(folder, REQUEST).read_text())
    result = json.dumps(dataclasses.asdict(price(request)))
    pathlib.Path(folder, RESULT).write_text(result)


def _end_with_search() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_search, daemon=True).start()
    main(sys.argv[1])
