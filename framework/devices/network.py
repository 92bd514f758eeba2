"""How long collectives take on a network: what its links carry, and their latency.

A collective is a phase, or several one after the other. A phase takes as long as its
busiest link needs for the bytes, or as its longest way needs to be passed, whichever is
more: "How To Scale Your Model" (jax-ml.github.io/scaling-book), part 3. So small
collectives are bound by latency, which grows with the group.

Where a group fills a box of several dims of a torus, libtpu divides the data by the dim
along which it goes first (the text of its all-reduces on v5e says "StrategyND", of 2
colors and 2 phases on 16 x 16 chips), so that the links of all dims are used at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from meshwright.framework.devices.device_order import DeviceOrder
from meshwright.framework.devices.gpu_topology import GpuTopology
from meshwright.framework.devices.hardware import Hardware
from meshwright.framework.devices.torus import (
    all_pairs,
    box_lines,
    link_load,
    longest_way,
    ring_hops,
    ring_load,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.xla_form import axis_groups

LINK_EFFICIENCY = 0.80
"""The share of a link's bandwidth that collectives reach: the only calibrated constant,
the least-squares fit to the 13 step times of GSPMD's Tables 2 and 3
(docs/reference/planning/step_times.md).
"""

Groups = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a collective.

    Args:
      moving: seconds that the busiest link needs for the bytes.
      waiting: seconds that the longest way takes, however little is sent.
    """

    moving: float
    waiting: float

    @property
    def seconds(self) -> float:
        return max(self.moving, self.waiting)

    @property
    def is_waiting(self) -> bool:
        """Whether latency bounds it, not bandwidth."""
        return self.waiting > self.moving

    def times(self, count: float) -> Phase:
        """The phase `count` times, with as many bytes each time."""
        return Phase(moving=count * self.moving, waiting=count * self.waiting)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Network:
    """A network on which any two devices are as near: of GPUs, or of one machine.

    Args:
      hardware: the kind of its devices.
      mesh: the device mesh.
    """

    hardware: Hardware
    mesh: DeviceMesh

    def along(self, axes: Sequence[str], size: float) -> list[Phase]:
        """Reduce-scattering or all-gathering a tensor along mesh axes.

        Args:
          axes: mesh axes, or parts of them, in the order of the phases.
          size: bytes of one group's full tensor.
        """
        if not axes:
            return []
        share = 1 - 1 / self.mesh.axes_size(axes)
        moving = size * share / self.hardware.link_bandwidth
        return [Phase(moving=moving, waiting=self.hardware.latency)]

    def scatters(self, axis: str) -> bool:
        """Whether it reduce-scatters along a mesh axis, or a part of one."""
        return True

    def all_reduce(self, axes: Sequence[str], size: float) -> list[Phase]:
        """All-reducing a tensor along mesh axes: it is sent twice; see `along`."""
        return [
            Phase(moving=2 * phase.moving, waiting=phase.waiting)
            for phase in self.along(axes, size)
        ]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TorusNetwork(Network):
    """The links of a torus of TPUs.

    Args:
      order: where the mesh's devices are.
    """

    order: DeviceOrder

    def along(self, axes: Sequence[str], size: float) -> list[Phase]:
        """In rings along one axis after the other, for the part of it that is left."""
        phases = []
        for axis in axes:
            ways = _axis_ways(self.order, self.mesh, axis)
            phases.append(self._by_ways(ways, size))
            size /= self.mesh.axis_size(axis)
        return phases

    def scatters(self, axis: str) -> bool:
        """Not along one axis that is the whole slice: TPU v3 all-reduces there."""
        return self.mesh.axis_size(axis) < self.order.topology.size

    def all_reduce(self, axes: Sequence[str], size: float) -> list[Phase]:
        """Scattered in these rings, and gathered in them."""
        return [phase.times(2) for phase in self.along(axes, size)]

    def around(self, rings: Groups, size: float) -> Phase:
        """Reduce-scattering or all-gathering `size` bytes in each of these rings."""
        return self._by_ways(_ring_ways(self.order, rings), size)

    def between(self, pairs: Groups, size: float) -> Phase:
        """Sending `size` bytes from the first device of each pair to the second."""
        load, hops = _pairs_cost(self.order, pairs)
        return self._phase(size * load, hops)

    def all_to_all(self, groups: Groups, size: float) -> Phase:
        """Sending `size` bytes from each device of a group, a part to each of it."""
        load, hops = _all_to_all_cost(self.order, groups)
        return self._phase(size / len(groups[0]) * load, hops)

    def collective(
        self, kind: str, groups: Groups, axes: Sequence[str] | None, size: float
    ) -> list[Phase]:
        """The phases of a collective that has the links to itself.

        Over several axes they are rings along the last axis first, then along the next
        for the part of the result that each device has.

        Args:
          kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
            "collective-permute".
          groups: device numbers, by place in the mesh; for permutes the pairs.
          axes: the axes that the groups span, None if no axes make them.
          size: bytes of one group's full tensor; for permutes of what one device sends.
        """
        if kind == "collective-permute":
            return [self.between(groups, size)]
        if kind == "all-to-all":
            return [self.all_to_all(groups, size)]
        if axes and len(axes) > 1 and set(axes) <= set(self.mesh.axis_names):
            phases = self.along(axes[::-1], size)
        else:
            phases = [self.around(groups, size)]
        return [phase.times(2) for phase in phases] if kind == "all-reduce" else phases

    def _by_ways(self, ways: Sequence[_Way], size: float) -> Phase:
        """Along a ring; or, in boxes, a part of the data along each dim first.

        The parts then turn to the next dim, and so on, so that no two share links.
        """
        link_bytes, hops = 0.0, 0
        for turn in range(len(ways)):
            loads = []
            for first in range(len(ways)):
                passed = [ways[(first + n) % len(ways)] for n in range(turn + 1)]
                way = passed.pop()
                left = size / len(ways) / math.prod(other.count for other in passed)
                loads.append(left * (way.count - 1) / way.count / 2 * way.load)
            link_bytes += max(loads)
            hops += max(way.hops for way in ways)
        return self._phase(link_bytes, hops)

    def _phase(self, link_bytes: float, hops: int) -> Phase:
        speed = self.hardware.link_bandwidth * LINK_EFFICIENCY
        return Phase(moving=link_bytes / speed, waiting=hops * self.hardware.latency)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GpuNetwork:
    """Links among the GPUs of a host, and a NIC of each GPU to the other hosts.

    A group's data goes over both at once. Links and NICs are taken to reach what is
    published, and the members of a group to be spread evenly over its hosts.

    Args:
      mesh: the device mesh.
      gpus: the topology; its devices have the mesh's ids.
    """

    mesh: DeviceMesh
    gpus: GpuTopology

    def around(self, groups: Groups, size: float) -> Phase:
        """Reduce-scattering or all-gathering `size` bytes in each of these groups."""
        count, hosts = self._spread(groups)
        # Members of a host share what it gets from others, each by its own NIC.
        across = (hosts - 1) / count / self.gpus.kind.host_bandwidth
        inside = (count - hosts) / count / self.gpus.kind.link_bandwidth
        return self._phase(size * max(inside, across))

    def between(self, pairs: Groups, size: float) -> Phase:
        """Sending `size` bytes from the first device of each pair to the second."""
        _, hosts = self._spread(pairs)
        kind = self.gpus.kind
        return self._phase(
            size / (kind.link_bandwidth if hosts == 1 else kind.host_bandwidth)
        )

    def all_to_all(self, groups: Groups, size: float) -> Phase:
        """Sending `size` bytes from each device of a group, a part to each of it."""
        count, hosts = self._spread(groups)
        inside = (1 / hosts - 1 / count) / self.gpus.kind.link_bandwidth
        across = (1 - 1 / hosts) / self.gpus.kind.host_bandwidth
        return self._phase(size * max(inside, across))

    def collective(
        self, kind: str, groups: Groups, axes: Sequence[str] | None, size: float
    ) -> list[Phase]:
        """The one phase of a collective; see `TorusNetwork.collective`."""
        if kind == "collective-permute":
            return [self.between(groups, size)]
        if kind == "all-to-all":
            return [self.all_to_all(groups, size)]
        # An all-reduce sends its tensor twice.
        return [self.around(groups, size * (2 if kind == "all-reduce" else 1))]

    def _spread(self, groups: Groups) -> tuple[int, int]:
        """The devices of a group, and the most hosts that one of the groups is on."""
        places = np.array(groups).reshape(len(groups), -1)
        on = np.sort(self.mesh.ids.flatten()[places] // self.gpus.per_host, axis=1)
        return on.shape[1], 1 + int((np.diff(on, axis=1) > 0).sum(axis=1).max())

    def _phase(self, moving: float) -> Phase:
        return Phase(moving=moving, waiting=self.gpus.kind.latency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Way:
    """How data goes around: in rings, or along one dim of boxes.

    Args:
      count: devices of a ring.
      load: see `ring_load`.
      hops: see `ring_hops`.
    """

    count: int
    load: int
    hops: int


@functools.lru_cache(maxsize=256)
def _axis_ways(order: DeviceOrder, mesh: DeviceMesh, axis: str) -> tuple[_Way, ...]:
    return _ring_ways(order, axis_groups(mesh, (axis,)))


@functools.lru_cache(maxsize=256)
def _ring_ways(order: DeviceOrder, rings: Groups) -> tuple[_Way, ...]:
    torus, positions = order.topology, order.positions[np.array(rings)]
    # On kinds with two cores on a chip the constant was fitted to rings.
    lines = box_lines(positions) if torus.kind.cores == 1 else None
    return tuple(
        _Way(
            count=around.shape[1],
            load=ring_load(torus, around),
            hops=ring_hops(torus, around),
        )
        for around in lines or [positions]
    )


# Of groups: the load of the busiest link, and the links passed one after the other.


@functools.lru_cache(maxsize=256)
def _all_to_all_cost(order: DeviceOrder, groups: Groups) -> tuple[int, int]:
    ends = all_pairs(order.positions[np.array(groups)])
    return link_load(order.topology, *ends), longest_way(order.topology, *ends)


@functools.lru_cache(maxsize=256)
def _pairs_cost(order: DeviceOrder, pairs: Groups) -> tuple[int, int]:
    ends = order.positions[np.array(pairs)]
    source, target = ends[:, 0], ends[:, 1]
    torus = order.topology
    return link_load(torus, source, target), longest_way(torus, source, target)
