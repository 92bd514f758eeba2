"""The second sieve: a plan completed by Shardy in process, and priced.

Nothing is compiled. Products take their FLOPs at the rate that XLA's reach, or what
they move if that takes longer; other ops what they move, and Shardy's collectives what
the links need for them. The two rates were set by the compiled estimates of GSPMD's
Tables 2 and 3 (docs/reference/planning/search.md).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

from meshwright.framework.compiler.stablehlo.shardy.device_work import (
    DeviceWork,
    Product,
    Sent,
    work_of,
)
from meshwright.framework.devices.device_order import DeviceOrder, device_orders
from meshwright.framework.devices.hardware import TpuKind
from meshwright.framework.devices.network import Phase, TorusNetwork
from meshwright.framework.devices.topology import Topology
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.xla_form import axis_groups
from meshwright.trainers.planning.search.found.named_step import (
    NamedStep,
    axes_by_name,
)

AXES = ("X", "Y", "Z")
"""Names of the mesh axes of plans that are found."""

# Share of the peak that products reach: ours took 1.10 of their time at the peak.
_PRODUCTS = 0.91
# Bytes of memory's bandwidth that an element of any other op costs, fused as it is.
_PER_ELEMENT = 3.2
# A matrix unit multiplies blocks of so many rows and columns, a smaller one in no less.
_UNIT = 128
_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Priced:
    """What a plan costs, without compiling.

    Args:
      seconds: estimated time of a step, in the device order that is best for it.
      computing: the part of it that is computation.
      memory: bytes alive together on a device, roughly.
    """

    seconds: float
    computing: float
    memory: float

    def same(self, other: Priced) -> bool:
        """Whether both are what one program costs."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def propagated(
    step: NamedStep, shape: tuple[int, ...], masks: Sequence[int], torus: Topology
) -> Priced:
    """Completes and prices a plan.

    Args:
      step: the step.
      shape: the mesh's shape.
      masks: the plan; see `rough_plans`.
      torus: the topology.

    Raises:
      ClashError: two dims of a tensor are split by the same axis.
      CompletionError: Shardy cannot complete it.
    """
    mesh = DeviceMesh(AXES[: len(shape)], shape)
    with step.module.opened():
        module = step.module.complete(mesh, axes_by_name(mesh, step, masks))
        work = work_of(module, mesh)
    return price(work, mesh, torus)


def price(work: DeviceWork, mesh: DeviceMesh, torus: Topology) -> Priced:
    """Prices the work of one device."""
    computing = compute_seconds(work, torus.kind)
    sent: collections.Counter[tuple] = collections.Counter()
    for one in work.sent:
        sent[one.kind, one.axes, one.bytes] += one.count
    sending = min(
        sum(
            count * _seconds(Sent(*key, count), mesh, order)
            for key, count in sent.items()
        )
        for order in device_orders(mesh.shape, torus)
    )
    return Priced(seconds=computing + sending, computing=computing, memory=work.memory)


def compute_seconds(work: DeviceWork, kind: TpuKind) -> float:
    """Seconds of products and of all other ops."""
    products = sum(_product_seconds(product, kind) for product in work.products)
    moved = work.moved + _PER_ELEMENT * work.elements
    return products + moved / kind.memory_bandwidth


def _product_seconds(product: Product, kind: TpuKind) -> float:
    """By its FLOPs, or what it moves where that takes longer: small ones."""
    moving = product.moved * product.count / kind.memory_bandwidth
    return max(_padded_flops(product) / (_PRODUCTS * kind.peak_flops), moving)


def _padded_flops(product: Product) -> float:
    sizes = (
        (product.rows, _ROWS),
        (product.inner, _UNIT),
        (product.columns, _UNIT),
    )
    padded = math.prod(math.ceil(size / unit) * unit for size, unit in sizes)
    # A single row, column or inner dim is no matter for a matrix unit.
    if min(product.rows, product.inner, product.columns) < _ROWS:
        return product.flops
    return 2 * padded * product.count


def _seconds(sent: Sent, mesh: DeviceMesh, order: DeviceOrder) -> float:
    kind = order.topology.kind
    network = TorusNetwork(hardware=kind, mesh=mesh, order=order)
    passing = sum(phase.seconds for phase in _phases(sent, mesh, network))
    # Between the cores of a chip, which no link connects, it is read or written still.
    return max(passing, sent.bytes / kind.memory_bandwidth)


def _phases(sent: Sent, mesh: DeviceMesh, network: TorusNetwork) -> list[Phase]:
    if sent.kind == "all-reduce":
        return network.all_reduce(sent.axes[::-1], sent.bytes)
    if sent.kind == "all-to-all":
        return [network.all_to_all(_groups(mesh, sent.axes), sent.bytes)]
    if sent.kind == "collective-permute":
        # To which device is not known: one round of the ring's.
        pairs = [
            (group[i - 1], group[i])
            for group in _groups(mesh, sent.axes or mesh.axis_names)
            for i in range(len(group))
        ]
        return [network.between(tuple(pairs), sent.bytes)]
    return network.along(sent.axes[::-1], sent.bytes)


@functools.lru_cache(maxsize=256)
def _groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return axis_groups(mesh, axes)
