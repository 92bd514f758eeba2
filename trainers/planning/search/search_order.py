"""The device order in which a program runs fastest on a torus.

The trainer's order loads the links least if all axes send alike. A program whose
weights go along one axis, and hardly anything along the rest, may do better if that
axis's rings share no links. What it sends is known once it is compiled; each order then
costs no more than another estimate.
"""

from __future__ import annotations

from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.devices.device_order import DeviceOrder, device_orders
from meshwright.trainers.planning.planning import CompileReport


def fastest(report: CompileReport) -> tuple[float, DeviceOrder]:
    """Estimated seconds of a step in the best order, and that order.

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
