"""The device order in which a program runs fastest on a torus.

The trainer's own order asks least of the links if all axes send alike. A program whose
weights go along one axis and hardly anything along the other may do better with that
one's rings on links of their own; what it sends is known once it is compiled, and then
each order costs but another look at it.
"""

from __future__ import annotations

from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.devices.device_order import DeviceOrder, device_orders
from meshwright.trainers.planning.planning import CompileReport


def fastest(report: CompileReport) -> tuple[float, DeviceOrder]:
    """Estimated seconds of a step in the best order, and that order.

    Args:
      report: of a program that fits a TPU topology, whose mesh gives no order.
    """
    mesh, own = report.experiment.plan.mesh, report.order
    best = report.step_seconds, own
    for order in device_orders(mesh.shape, report.torus)[1:]:
        seconds = step_time(report.module, mesh, order).seconds
        seconds /= report.experiment.steps_per_loop
        if seconds < best[0]:
            best = seconds, order
    return best
