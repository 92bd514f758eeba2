"""Whether a weight update is worth sharding, and how (weight-update sharding 3.2).

The cost model is small: the bytes that a device need not read and write, at the speed
of its memory, against what collectives take in addition on its network (`network.py`).
An all-reduce sends a tensor twice, once to reduce and once to gather; sharded, the
second time gathers the result of the update.

Small shards are bound by latency (5.2). Against that gradients may be scattered along
some of the axes only, partial sharding, and their shards all-reduced along the others:
XLA for TPUs batches small all-reduces and all-gathers, so that many of them wait once.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Container, Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.weight_update_sharding.clusters import (
    Cluster,
    Dims,
    bytes_of,
    gathered_bytes,
    uses_of,
)
from meshwright.framework.compiler.weight_update_sharding.gradient import find_sum
from meshwright.framework.compiler.weight_update_sharding.redundancy import Redundancy
from meshwright.framework.compiler.weight_update_sharding.update_layouts import (
    Tiles,
    UpdateLayout,
    layouts_of,
)
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.hardware import Hardware, TpuKind
from meshwright.framework.devices.network import Network, Phase, TorusNetwork
from meshwright.framework.devices.topology import Topology
from meshwright.framework.sharding.mesh import DeviceMesh, SubAxis


class WeightUpdateSharding(enum.Enum):
    """Which weight updates are sharded: where it pays, none, or all that can be."""

    AUTO = "auto"
    OFF = "off"
    ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the cost model knows about a device.

    Args:
      hardware: the kind of the devices.
      torus: the TPUs' topology, if they fill one.
      tiles: the tiles of their memory's layout.
    """

    hardware: Hardware
    torus: Topology | None = None
    tiles: Tiles = Tiles()

    def network(self, mesh: DeviceMesh) -> Network:
        """What joins the devices, as `mesh` orders them."""
        if self.torus is None or self.torus.size != mesh.size:
            return Network(hardware=self.hardware, mesh=mesh)
        order = order_of(mesh, self.torus)
        return TorusNetwork(hardware=self.hardware, mesh=mesh, order=order)

    @property
    def batches(self) -> bool:
        """Whether its compiler batches small all-reduces and small all-gathers."""
        return isinstance(self.hardware, TpuKind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision on a weight update.

    Args:
      cluster: the update.
      layout: how it is divided, None if it is left alone.
      why: the reason if it is left alone, else "".
      gathered_bytes: the bytes a step that are gathered for ops outside.
      reduced_bytes: the bytes of its gradients' reductions.
      traffic_saved_bytes: the bytes a step that a device need not read or write.
      state_saved_bytes: the bytes of state that a device need not hold.
      gain: estimated seconds a step.
    """

    cluster: Cluster
    layout: UpdateLayout | None = None
    why: str = ""
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    traffic_saved_bytes: int = 0
    state_saved_bytes: int = 0
    gain: float = 0.0


def decide(
    clusters: Sequence[Cluster],
    dims: Dims,
    completed: CompletedModule,
    redundancy: Redundancy,
    *,
    machine: Machine,
    mode: WeightUpdateSharding,
) -> list[Decision]:
    """The best layout for each update, or why it has none."""
    if mode is WeightUpdateSharding.OFF:
        return [Decision(cluster=cluster, why="switched off") for cluster in clusters]
    model = _CostModel(dims, completed, redundancy, machine)
    options = {cluster: model.options(cluster) for cluster in clusters}
    if mode is WeightUpdateSharding.ALL:
        return [_best(*update) for update in options.items()]
    refused: set[tuple[str, ...]] = set()
    while True:
        decisions = [_gainful(*update, refused) for update in options.items()]
        poor = model.poorest(decisions)
        if poor is None:
            return decisions
        refused.add(poor)


def _best(cluster: Cluster, options: Sequence[Decision]) -> Decision:
    """The option with the largest gain, the simplest of equals; else why there is none.

    Args:
      cluster: the update.
      options: all its layouts.
    """
    why = "no dim of it can be split in all that its update computes"
    if options:
        why = "its tensors are too small to be split, or are split already"
    options = [option for option in options if option.traffic_saved_bytes > 0]
    if not options:
        return Decision(cluster=cluster, why=why)
    return max(options, key=lambda option: (option.gain, -option.layout.count))


def _gainful(
    cluster: Cluster, options: Sequence[Decision], refused: Container[tuple[str, ...]]
) -> Decision:
    """The best option along axes that are not refused, if it gains anything."""
    kept = [option for option in options if option.layout.axes not in refused]
    best = _best(cluster, kept or options)
    if best.layout is None or (kept and best.gain > 0):
        return best
    why = f"a step would take {longer(-best.gain)}, by estimate"
    if not kept:
        why = "the few updates that gain by it gain less than a gather waits"
    return dataclasses.replace(best, layout=None, why=why, state_saved_bytes=0)


def longer(seconds: float) -> str:
    """How much longer something takes; "no less time" if by less than 0.05 us."""
    us = seconds * 1e6
    return "no less time" if us < 0.05 else f"{us:.1f} us longer"


# Of a batch of gathers latency is this share at most.
_WAITING = 0.1


def batch_bytes(
    decisions: Sequence[Decision], machine: Machine, mesh: DeviceMesh
) -> int:
    """The bytes up to which results are gathered in one batch (5.2).

    They are as many as make latency short beside their own time; 0 if the compiler
    batches none.
    """
    if not machine.batches:
        return 0
    network, most = machine.network(mesh), 0.0
    for axes in {d.layout.axes for d in decisions if d.layout is not None}:
        of_a_byte = network.along(axes, 1.0)
        waiting = sum(phase.waiting for phase in of_a_byte)
        moving = sum(phase.moving for phase in of_a_byte)
        if moving:  # Between the cores of a chip nothing moves, or waits.
            most = max(most, waiting / _WAITING / moving)
    return round(most)


class _CostModel:
    """What the layouts of an update cost and save on a machine."""

    def __init__(self, dims, completed, redundancy, machine):
        self.dims: Dims = dims
        self.completed: CompletedModule = completed
        self.redundancy: Redundancy = redundancy
        self.machine: Machine = machine
        self.network = machine.network(completed.mesh)

    def options(self, cluster: Cluster) -> list[Decision]:
        """What each layout of an update saves and costs."""
        entries, exits = cluster.entries(), cluster.exits()
        gradients = self.gradients(cluster, entries)
        return [
            self.evaluate(cluster, layout, entries, exits, gradients)
            for axes in self.choices_of_axes(cluster)
            for layout in layouts_of(
                cluster, self.dims, self.completed, axes, self.machine.tiles
            )
        ]

    def poorest(self, decisions: Sequence[Decision]) -> tuple[str, ...] | None:
        """The axes along which all updates gain less than their batch of gathers waits.

        None if there are none.
        """
        if not self.machine.batches:
            return None
        gains: dict[tuple[str, ...], float] = {}
        for decision in decisions:
            if decision.layout is not None:
                axes = decision.layout.axes
                gains[axes] = gains.get(axes, 0.0) + decision.gain
        for axes in gains:
            gains[axes] -= sum(p.waiting for p in self.network.along(axes, 0.0))
        poorest = min(gains, key=gains.get, default=None)
        return poorest if poorest and gains[poorest] <= 0 else None

    def choices_of_axes(self, cluster: Cluster) -> Iterator[tuple[str, ...]]:
        """The data axes along which the update is repeated, and some of them.

        On a torus a single axis is divided, into groups of neighbours.
        """
        alike = frozenset(self.completed.mesh.axis_names)
        for value in cluster.values:
            alike &= self.redundancy.alike.get(value, frozenset())
        # Neighbours along the last axes of a mesh are nearest: they reduce most.
        names = reversed(self.completed.mesh.axis_names)
        axes = [axis for axis in names if axis in alike]
        for count in range(len(axes), 0, -1):
            yield from itertools.combinations(axes, count)
        if len(axes) == 1 and self.machine.torus is not None:
            size = self.completed.mesh.axis_size(*axes)
            for group in range(size // 2, 1, -1):
                if size % group == 0:
                    yield (str(SubAxis(*axes, size // group, group)),)

    def evaluate(
        self, cluster: Cluster, layout: UpdateLayout, entries, exits, gradients
    ) -> Decision:
        """What a layout saves and costs.

        Args:
          cluster: the update.
          layout: how it is divided.
          entries, exits: its tensors of which ops outside make or read some.
          gradients: see `gradients`.
        """
        memory_bandwidth = self.machine.hardware.memory_bandwidth
        links = [link for link in cluster.links if link.argument is not None]
        stored = [link.values[0] for link in links]
        saved = sum(map(layout.spared_bytes, entries))
        saved += 2 * sum(map(layout.spared_bytes, stored))
        gathers = {
            value: gathered_bytes(cluster, value, uses)
            for value, uses in exits.items()
            if layout.first(value) is not None
        }
        sizes = {
            v: gathered_bytes(cluster, v, uses_of(v))
            for v in gradients
            if layout.first(v) is not None
        }
        gain = saved / memory_bandwidth
        gain -= sum(self.gathering(v, size, layout) for v, size in gathers.items())
        gain -= sum(
            self.reducing(v, size, gradients[v], layout) for v, size in sizes.items()
        )
        copied = self.copied([*sizes, *exits], layout)
        gain -= 2 * copied / memory_bandwidth
        return Decision(
            cluster=cluster,
            layout=layout,
            gathered_bytes=int(sum(gathers.values())),
            reduced_bytes=int(sum(sizes.values())),
            traffic_saved_bytes=saved,
            # As the compiler counts arguments; tiles matter for what is moved.
            state_saved_bytes=sum(
                layout.spared_bytes(value, Tiles()) for value in stored
            ),
            gain=gain,
        )

    def gradients(
        self, cluster: Cluster, entries: Sequence[ir.Value]
    ) -> dict[ir.Value, tuple[str, ...]]:
        """Sums over the batch, with the axes along which they may be scattered."""
        gradients = {}
        for value in entries:
            if value in self.redundancy.updates:
                summed = find_sum(self.completed, self.redundancy.reduced, value)
                known = summed and all(map(cluster.inside, uses_of(value)))
                gradients[value] = summed.axes if known else ()
        return gradients

    def is_scattered(self, value, axes: tuple[str, ...], layout: UpdateLayout) -> bool:
        """Whether a gradient is reduced right onto its shards, not in full first."""
        mesh = self.completed.mesh
        known = mesh.entire(layout.axes) <= set(axes)
        known &= all(map(self.network.scatters, layout.axes))
        taken = self.completed.sharding(value).dims[layout.first(value)]
        return known and not taken and layout.can_scatter(value)

    def gathering(self, value, size: float, layout: UpdateLayout) -> float:
        """Seconds a step to gather a tensor of which ops outside read `size` bytes."""
        full = bytes_of(value)
        phases = self.network.along(layout.axes, full * layout.moved_share(value))
        return size / full * self.seconds(phases, batched=True)

    def reducing(
        self, value, size: float, axes: tuple[str, ...], layout: UpdateLayout
    ) -> float:
        """Seconds a step to reduce a gradient onto shards, beyond its all-reduce."""
        if not self.is_scattered(value, axes, layout):
            return 0.0
        full = bytes_of(value)
        in_tiles = full * layout.moved_share(value)
        scattered = self.seconds(self.network.along(layout.axes, in_tiles))
        # Over axes that the layout leaves out its shards are all-reduced.
        left = self.completed.mesh.left_of(axes, layout.axes)
        added, whole = (
            self.seconds(self.network.all_reduce(along, size), batched=True)
            for along, size in ((left, in_tiles / layout.shards), (axes, full))
        )
        return size / full * (scattered + added - whole)

    def seconds(self, phases: Sequence[Phase], *, batched: bool = False) -> float:
        """How long a collective takes; one that is batched shares its latency."""
        batched &= self.machine.batches
        return sum(phase.moving if batched else phase.seconds for phase in phases)

    def copied(self, passing: Sequence[ir.Value], layout: UpdateLayout) -> int:
        """Bytes of full tensors that are copied on the way into shards or back."""
        return sum(
            bytes_of(value)
            for value in passing
            if layout.first(value) is not None and not layout.is_even(value)
        )
