"""Whether a weight update is worth sharding, and how (weight-update sharding 3.2).

The cost model is small: the bytes that a device need not read and write, at the speed
of its memory, against the bytes that it has to send in addition, at the speed of its
links, and the latency of another collective. An all-reduce sends a tensor twice, once
to reduce and once to gather; sharded, the second time gathers the result of the update.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.completed import CompletedModule
from meshwright.framework.compiler.weight_update_sharding.carried_state import Use
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


class WeightUpdateSharding(enum.Enum):
    """Which weight updates are sharded: where it pays, none, or all that can be."""

    AUTO = "auto"
    OFF = "off"
    ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the cost model knows about a device.

    Args:
      memory_bandwidth: bytes a second.
      link_bandwidth: bytes a second that it sends to others.
      latency: the least seconds that a collective takes.
      tiles: the tiles of its memory's layout.
    """

    memory_bandwidth: float
    link_bandwidth: float
    latency: float
    tiles: Tiles = Tiles()


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
    model = _CostModel(dims, completed, redundancy, machine)
    return [model.decide(cluster, mode) for cluster in clusters]


class _CostModel:
    """What the layouts of an update cost and save on a machine."""

    def __init__(self, dims, completed, redundancy, machine):
        self.dims: Dims = dims
        self.completed: CompletedModule = completed
        self.redundancy: Redundancy = redundancy
        self.machine: Machine = machine

    def decide(self, cluster: Cluster, mode: WeightUpdateSharding) -> Decision:
        if mode is WeightUpdateSharding.OFF:
            return Decision(cluster=cluster, why="switched off")
        reach = self.reach(cluster)
        options = [
            self.evaluate(cluster, reach, layout)
            for axes in self.choices_of_axes(cluster)
            for layout in self.layouts(cluster, axes)
        ]
        why = "no dim of it can be split in all that its update computes"
        if options:
            why = "its tensors are too small to be split, or are split already"
        options = [option for option in options if option.traffic_saved_bytes > 0]
        if not options:
            return Decision(cluster=cluster, why=why)
        best = max(options, key=lambda option: (option.gain, -option.layout.count))
        if mode is WeightUpdateSharding.AUTO and best.gain <= 0:
            why = f"it would cost {-best.gain * 1e6:.1f} us a step"
            return dataclasses.replace(best, layout=None, why=why, state_saved_bytes=0)
        return best

    def layouts(
        self, cluster: Cluster, axes: tuple[str, ...]
    ) -> Iterator[UpdateLayout]:
        tiles = self.machine.tiles
        return layouts_of(cluster, self.dims, self.completed, axes, tiles)

    def choices_of_axes(self, cluster: Cluster) -> Iterator[tuple[str, ...]]:
        """The data axes along which the update is repeated, and parts of them."""
        alike = frozenset(self.completed.mesh.axis_names)
        for value in cluster.values:
            alike &= self.redundancy.alike.get(value, frozenset())
        # Neighbours along the last axes of a mesh are nearest: they reduce most.
        names = reversed(self.completed.mesh.axis_names)
        axes = [axis for axis in names if axis in alike]
        for count in range(len(axes), 0, -1):
            yield from itertools.combinations(axes, count)

    def evaluate(
        self, cluster: Cluster, reach: _ClusterInterface, layout: UpdateLayout
    ) -> Decision:
        machine = self.machine
        links = [link for link in cluster.links if link.argument is not None]
        stored = [link.values[0] for link in links]
        saved = sum(map(layout.spared_bytes, reach.entries))
        saved += 2 * sum(map(layout.spared_bytes, stored))
        gathers = {
            value: gathered_bytes(cluster, value, uses)
            for value, uses in reach.exits.items()
            if layout.first(value) is not None
        }
        sizes = {
            v: gathered_bytes(cluster, v, uses_of(v))
            for v in reach.gradients
            if layout.first(v) is not None
        }
        sent = sum(size * layout.moved_share(v) for v, size in gathers.items())
        sent += sum(size * self.reduced(v, reach, layout) for v, size in sizes.items())
        share = (layout.shards - 1) / layout.shards
        gain = saved / machine.memory_bandwidth
        gain -= sent * share / machine.link_bandwidth
        # They replace one all-reduce, and a backend may combine fewer of them.
        started = len(gathers) + len(sizes) - bool(sizes)
        gain -= started * machine.latency
        copied = self.copied([*sizes, *reach.exits], layout)
        gain -= 2 * copied / machine.memory_bandwidth
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

    def reach(self, cluster: Cluster) -> _ClusterInterface:
        entries = cluster.entries()
        gradients = [v for v in entries if v in self.redundancy.updates]
        sums = [find_sum(self.completed, self.redundancy.reduced, v) for v in gradients]
        gradients = {
            value: summed.axes
            if summed and all(map(cluster.inside, uses_of(value)))
            else ()
            for value, summed in zip(gradients, sums, strict=True)
        }
        return _ClusterInterface(entries, cluster.exits(), gradients)

    def is_scattered(
        self, value, reach: _ClusterInterface, layout: UpdateLayout
    ) -> bool:
        """Whether a gradient is reduced right onto its shards, not in full first."""
        known = set(layout.axes) <= set(reach.gradients[value])
        taken = self.completed.sharding(value).dims[layout.first(value)]
        return known and not taken and layout.can_scatter(value)

    def reduced(self, value, reach: _ClusterInterface, layout: UpdateLayout) -> float:
        """The share of a gradient that is sent beyond its all-reduce, which sends 2."""
        if not self.is_scattered(value, reach, layout):
            return 0.0
        # Over axes that the layout leaves out its shards are all-reduced.
        left = set(reach.gradients[value]) - set(layout.axes)
        return layout.moved_share(value) + 2 * bool(left) / layout.shards - 2

    def copied(self, passing: Sequence[ir.Value], layout: UpdateLayout) -> int:
        """Bytes of full tensors that are copied on the way into shards or back."""
        return sum(
            bytes_of(value)
            for value in passing
            if layout.first(value) is not None and not layout.is_even(value)
        )


@dataclasses.dataclass(frozen=True)
class _ClusterInterface:
    """What a cluster exchanges with ops outside.

    Args:
      entries: tensors that it reads from outside.
      exits: its tensors that ops outside read, with these uses.
      gradients: entries that are sums over the batch, with the axes along which they
        may be reduce-scattered.
    """

    entries: Sequence[ir.Value]
    exits: Mapping[ir.Value, Sequence[Use]]
    gradients: Mapping[ir.Value, Sequence[str]]
