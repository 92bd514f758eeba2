"""How long a step of a TPU program takes, without a TPU.

Ops take the cycles that the compiler itself estimated for them, times the trips of the
loops around them. Collectives, which it gives no estimate for, take the bytes that the
busiest link has to carry (`torus.py`) over what a link is good for. XLA for TPU v3 and
before runs one after the other; where a collective is started and awaited, the
ops between hide it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    arrays_of,
    itemsize,
)
from meshwright.framework.compiler.hlo.report import Collective, collectives_of
from meshwright.framework.devices.device_order import DeviceOrder
from meshwright.framework.devices.torus import (
    all_to_all_load,
    link_load,
    ring_load,
)
from meshwright.framework.sharding.mesh import DeviceMesh

LINK_EFFICIENCY = 0.80
"""What share of a link's bandwidth collectives reach: the one calibrated constant, the
least-squares fit to the 13 step times of GSPMD's Tables 2 and 3 (docs/planning.md)."""
CALIBRATED_KIND = "v3"
"""The kind of TPU that those were measured on, and the only one."""
MEAN_ERROR = 0.045
"""Mean relative error of those 13 estimates, each row left out of the calibration."""
WORST_ERROR = 0.080
"""The largest of the 13."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# An op whose operands and results alone take this share of its time waits for memory.
_MEMORY_BOUND = 0.6


class TimePart(enum.Enum):
    """What an op's time goes to."""

    MATRIX = "matrix"
    VECTOR = "vector"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of a program: its HLO name, and its trips each time that it runs."""

    name: str
    trips: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpTime:
    """One op, over all trips of the loops around it.

    Args:
      name: HLO name.
      op_name: the TF op it came from.
      part: what its time goes to.
      loops: those around it, outermost first.
      count: trips.
      seconds: of all trips.
    """

    name: str
    op_name: str
    part: TimePart
    loops: tuple[Loop, ...]
    count: int
    seconds: float

    @property
    def exposed(self) -> float:
        """The same: ops hide, and are not hidden."""
        return self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One collective, over all trips of the loops around it.

    Args:
      name: HLO name of what sends it; of an all-reduce in a fusion the fusion's.
      collective: what is sent, once.
      kind: its kind; an all-reduce of which each device keeps its slice is a
        "reduce-scatter", as the compiler makes one of the two.
      bytes: of the whole tensor of one group, once.
      loops: those around it, outermost first.
      count: trips.
      seconds: of all trips.
      exposed: what ops between its start and its end do not hide of `seconds`.
    """

    name: str
    collective: Collective
    kind: str
    bytes: int
    loops: tuple[Loop, ...]
    count: int
    seconds: float
    exposed: float

    @property
    def op_name(self) -> str:
        """The TF op it came from."""
        return self.collective.op_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where the time of one call of a program goes, on every device alike.

    Args:
      ops: those that compute.
      collectives: those that communicate.
    """

    ops: tuple[OpTime, ...]
    collectives: tuple[CollectiveTime, ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by part: matrix, vector, memory, and each kind of collective."""
        parts: dict[str, float] = {part.value: 0.0 for part in TimePart}
        for op in self.ops:
            parts[op.part.value] += op.seconds
        for one in self.collectives:
            parts[one.kind] = parts.get(one.kind, 0.0) + one.exposed
        return parts

    def all(self) -> Iterator[OpTime | CollectiveTime]:
        """Ops and collectives; what they take adds up as `exposed`."""
        yield from self.ops
        yield from self.collectives


def step_time(module: HloModule, mesh: DeviceMesh, order: DeviceOrder) -> StepTime:
    """Estimates one call of an optimized, scheduled TPU program.

    Args:
      module: the program of one device.
      mesh: the device mesh.
      order: where the mesh's devices are.

    Raises:
      ValueError: a loop whose trips cannot be read.
    """
    walk = _Walk(module, mesh, order)
    walk.computation(module.entry, ())
    return StepTime(ops=tuple(walk.ops), collectives=tuple(walk.collectives))


class _Walk:
    """Goes through a program as it would run."""

    def __init__(self, module: HloModule, mesh: DeviceMesh, order: DeviceOrder):
        self.module = module
        self.kind = order.topology.kind
        self.price = functools.partial(_seconds, mesh=mesh, order=order)
        self.sent = {one.name: one for one in collectives_of(module, mesh)}
        self.ops: list[OpTime] = []
        self.collectives: list[CollectiveTime] = []
        self.inside = module.inside

    def computation(self, name: str, loops: tuple[Loop, ...]) -> None:
        clock, started = 0.0, {}
        trips = math.prod(loop.trips for loop in loops)
        for one in self.inside[name]:
            if one.opcode == "while":
                condition, body = _loop(one)
                loop = Loop(name=one.name, trips=self.trips(one, condition))
                self.computation(body, (*loops, loop))
            elif one.opcode in ("call", "conditional"):
                for called in one.called:
                    self.computation(called, loops)
            elif found := self.collective(one, loops):
                if one.opcode.endswith("-start"):
                    started[one.name] = (len(self.collectives), clock)
                self.collectives.append(found)
            elif one.opcode.endswith("-done") and one.operands[0] in started:
                number, since = started.pop(one.operands[0])
                found = self.collectives[number]
                exposed = max(0.0, found.seconds - (clock - since))
                self.collectives[number] = dataclasses.replace(found, exposed=exposed)
            elif cycles := _CYCLES.search(one.backend_config):
                seconds = int(cycles[1]) * trips / self.kind.clock
                clock += seconds
                self.ops.append(
                    OpTime(
                        name=one.name,
                        op_name=one.op_name,
                        part=self.part(one, int(cycles[1]), trips),
                        loops=loops,
                        count=trips,
                        seconds=seconds,
                    )
                )

    def trips(self, loop: Instruction, condition: str) -> int:
        """From the bound in the loop's condition; TPU programs do not say it."""
        if loop.trips is not None:
            return loop.trips
        root = next(one for one in self.inside[condition] if one.is_root)
        bounds = self.bounds(root)
        if not bounds:
            raise ValueError(
                f"loop {loop.name} ({loop.op_name}) has no bound that can be read, so "
                "that its time cannot be estimated"
            )
        return min(bounds)

    def bounds(self, condition: Instruction) -> list[int]:
        """Of the counters in a condition; `tf.scan` has two that go together."""
        if condition.opcode == "and":
            parts = self.module.operands(condition)
            return [bound for part in parts for bound in self.bounds(part)]
        if condition.opcode == "fusion":
            (called,) = condition.called
            return self.bounds(next(o for o in self.inside[called] if o.is_root))
        if condition.opcode == "compare":
            counter, bound = self.module.operands(condition)
            counts = counter.opcode in ("get-tuple-element", "parameter")
            return [bound.number] if counts and bound.number is not None else []
        return []

    def collective(
        self, one: Instruction, loops: tuple[Loop, ...]
    ) -> CollectiveTime | None:
        found = self.sent.get(one.name)
        kind = found.kind if found else ""
        if one.opcode == "fusion" and (inner := self.scattered(one)):
            # The compiler fuses an all-reduce with the slice that is kept of it.
            found, kind = self.sent[inner.name], "reduce-scatter"
        if found is None:
            return None
        size = found.bytes
        if found.kind == "reduce-scatter":
            size *= len(found.groups[0])
        trips = math.prod(loop.trips for loop in loops)
        seconds = trips * self.price(found, kind=kind, size=size)
        return CollectiveTime(
            name=one.name,
            collective=dataclasses.replace(found, op_name=found.op_name or one.op_name),
            kind=kind,
            bytes=size,
            loops=loops,
            count=trips,
            seconds=seconds,
            exposed=seconds,
        )

    def scattered(self, fusion: Instruction) -> Instruction | None:
        for called in fusion.called:
            for one in self.inside[called]:
                if one.opcode == "all-reduce":
                    return one
        return None

    def part(self, one: Instruction, cycles: int, trips: int) -> TimePart:
        if self.has_product(one):
            return TimePart.MATRIX
        types = [one.type, *(each.type for each in self.module.operands(one))]
        moved = sum(_moved(type_, trips) for type_ in types)
        waits = moved / self.kind.memory_bandwidth
        bound = waits > _MEMORY_BOUND * cycles / self.kind.clock
        return TimePart.MEMORY if bound else TimePart.VECTOR

    def has_product(self, one: Instruction) -> bool:
        if one.opcode in ("convolution", "dot"):
            return True
        return any(
            self.has_product(each) for name in one.called for each in self.inside[name]
        )


def _loop(loop: Instruction) -> tuple[str, str]:
    condition, body = loop.called
    return condition, body


def _moved(type_: str, trips: int) -> int:
    """Bytes of the arrays of a type; of stacks over a loop's trips, one trip's."""
    return sum(
        math.prod(shape) * itemsize(dtype) // (trips if shape[:1] == (trips,) else 1)
        for dtype, shape in arrays_of(type_)
    )


def _seconds(
    found: Collective, *, kind: str, size: int, mesh: DeviceMesh, order: DeviceOrder
) -> float:
    """How long a collective takes that has the links to itself."""
    torus = order.topology
    speed = torus.kind.link_bandwidth * LINK_EFFICIENCY
    if kind == "collective-permute":
        return size * _permute_load(order, found.groups) / speed
    if kind == "all-to-all":
        sent = size / len(found.groups[0])
        return sent * _all_to_all_load(order, found.groups) / speed
    seconds = 0.0
    for share, load in _rings(found, mesh, order):
        passes = 2 if kind == "all-reduce" else 1
        seconds += passes * size * share / 2 * load / speed
    return seconds


def _rings(
    found: Collective, mesh: DeviceMesh, order: DeviceOrder
) -> Iterator[tuple[float, int]]:
    """What share of the bytes goes through rings, and their load.

    Over several axes: first along the last of them, then what each device has of the
    result along the next.
    """
    axes = found.axes
    if axes and len(axes) > 1 and set(axes) <= set(mesh.axis_names):
        done = 1
        for axis in reversed(axes):
            size = mesh.axis_size(axis)
            yield (size - 1) / size / done, order.loads[mesh.axis_names.index(axis)]
            done *= size
        return
    count = len(found.groups[0])
    yield (count - 1) / count, _ring_load(order, found.groups)


@functools.lru_cache(maxsize=256)
def _ring_load(order: DeviceOrder, groups: Sequence[Sequence[int]]) -> int:
    return ring_load(order.topology, order.positions[np.array(groups)])


@functools.lru_cache(maxsize=256)
def _all_to_all_load(order: DeviceOrder, groups: Sequence[Sequence[int]]) -> int:
    return all_to_all_load(order.topology, order.positions[np.array(groups)])


@functools.lru_cache(maxsize=256)
def _permute_load(order: DeviceOrder, pairs: Sequence[Sequence[int]]) -> int:
    ends = order.positions[np.array(pairs)]
    return link_load(order.topology, ends[:, 0], ends[:, 1])
