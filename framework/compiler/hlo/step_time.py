"""How long a step of a TPU program takes, without a TPU.

Ops take the cycles that the compiler itself estimated for them, times the trips of the
loops around them, and fused kernels those of libtpu's schedule (`splash.py`). Gathers
and scatters of rows, which have none, take as long as memory needs for what they hold
in VMEM, mostly the table. For collectives there is no estimate: they take the bytes
that the busiest link has to carry (`torus.py`) over the bandwidth that a link reaches,
and no less than the latency of the links on the way (`network.py`). XLA for TPU v3 and
before runs ops one after the other; where a collective has a start and an end, the ops
between them hide it, products that carry it on included.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
import re
from collections.abc import Iterator

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    arrays_of,
    itemsize,
)
from meshwright.framework.compiler.hlo.report import (
    ASYNC_DONE,
    ASYNC_START,
    Collective,
    collectives_of,
)
from meshwright.framework.devices.device_order import DeviceOrder
from meshwright.framework.devices.network import TorusNetwork
from meshwright.framework.sharding.mesh import DeviceMesh

# A kernel that was compiled by itself: what it takes, XLA does not know.
_KERNEL = '"custom_call_config"'
_RAGGED = "ragged-dot"
"""libtpu's own kernel for experts, and the one of what that reads.

The first says its FLOPs, which take this long at the peak, or longer; the second is of
a hundred instructions.
"""
_FLOPS = re.compile(r'"flops":"(?P<flops>\d+)"')
PRODUCTS = frozenset({"convolution", "dot"})
"""Opcodes of matrix products."""
# Their kernels have no cycles. The table, if it fits, is brought to VMEM as a whole.
_ROW_OPS = frozenset({"gather", "scatter"})
_HELD = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+",'
    r'"size":"(?P<bytes>\d+)"'
)
# The own name of a loop whose trips the program computes; loops inside have it before
# theirs.
_EXPECTED = re.compile(r"(?:^|/)expected_(\d+)_trips[^/]*$")
# An op whose operands and results alone take this share of its time waits for memory.
_MEMORY_BOUND = 0.6


class TimePart(enum.Enum):
    """What an op spends its time on."""

    MATRIX = "matrix"
    VECTOR = "vector"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of a program: its HLO name, and its trips each time it runs."""

    name: str
    trips: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpTime:
    """One op, over all trips of the loops around it.

    Args:
      name: HLO name.
      op_name: the TF op it came from.
      part: what it spends its time on.
      loops: the loops around it, outermost first.
      count: trips.
      seconds: the seconds of all trips.
    """

    name: str
    op_name: str
    part: TimePart
    loops: tuple[Loop, ...]
    count: int
    seconds: float

    @property
    def exposed(self) -> float:
        """Equal to `seconds`: ops hide collectives, and nothing hides ops."""
        return self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One collective, over all trips of the loops around it.

    Args:
      name: HLO name of the instruction; for an all-reduce in a fusion the fusion's.
      collective: what is sent in one trip.
      kind: its kind; an all-reduce of which each device keeps its slice is a
        "reduce-scatter", as the compiler fuses the two.
      bytes: the bytes of one group's full tensor, in one trip.
      loops: the loops around it, outermost first.
      count: trips.
      seconds: the seconds of all trips.
      exposed: the part of `seconds` that ops between its start and end do not hide.
      waiting: the part of `seconds` in phases that latency bounds, not bandwidth.
    """

    name: str
    collective: Collective
    kind: str
    bytes: int
    loops: tuple[Loop, ...]
    count: int
    seconds: float
    exposed: float
    waiting: float

    @property
    def op_name(self) -> str:
        """The TF op it came from."""
        return self.collective.op_name


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StepTime:
    """Where the time of one call of a program goes; all devices take the same.

    Its `str` has the total and the parts, in milliseconds.

    Args:
      ops: the ops that compute.
      collectives: the ops that communicate.
    """

    ops: tuple[OpTime, ...]
    collectives: tuple[CollectiveTime, ...]

    @property
    def seconds(self) -> float:
        """The time of one call."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by part: matrix, vector, memory, and each kind of collective."""
        parts: dict[str, float] = {part.value: 0.0 for part in TimePart}
        for op in self.ops:
            parts[op.part.value] += op.seconds
        for c in self.collectives:
            parts[c.kind] = parts.get(c.kind, 0.0) + c.exposed
        return parts

    def __str__(self) -> str:
        parts = sorted(self.parts().items(), key=lambda part: -part[1])
        texts = [f"{name} {_milliseconds(took)}" for name, took in parts if took]
        return f"{_milliseconds(self.seconds)} ms: {', '.join(texts)}"

    def __repr__(self) -> str:
        return f"<StepTime {self}>"

    def all(self) -> Iterator[OpTime | CollectiveTime]:
        """Ops and collectives; their `exposed` times add up to the call's."""
        yield from self.ops
        yield from self.collectives


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def step_time(module: HloModule, mesh: DeviceMesh, order: DeviceOrder) -> StepTime:
    """Estimates one call of an optimized, scheduled TPU program.

    Args:
      module: the program of one device.
      mesh: the device mesh.
      order: where the mesh's devices are.

    Raises:
      ValueError: a loop whose trips cannot be read.
    """
    return _TpuWalk(module, mesh, order).step_time()


class Walk(abc.ABC):
    """Goes through a program as it would run; subclasses say what its ops take."""

    def __init__(self, module: HloModule, mesh: DeviceMesh):
        self.module = module
        self.sent = {c.name: c for c in collectives_of(module, mesh)}
        self.ops: list[OpTime] = []
        self.collectives: list[CollectiveTime] = []
        self.inside = module.inside

    @abc.abstractmethod
    def op(self, op: Instruction, trips: int) -> tuple[float, TimePart] | None:
        """Seconds of one trip, and what they are spent on; None if it takes no time."""

    @abc.abstractmethod
    def sending(
        self, op: Instruction, collective: Collective, kind: str, size: int
    ) -> tuple[float, float]:
        """Seconds of one trip of a collective of `size` bytes, and those of waiting."""

    def step_time(self) -> StepTime:
        """The time of one call."""
        self.computation(self.module.entry, ())
        return StepTime(ops=tuple(self.ops), collectives=tuple(self.collectives))

    def computation(self, name: str, loops: tuple[Loop, ...]) -> float:
        """Walks a computation; the seconds of its ops, which hide collectives."""
        clock, started = 0.0, {}
        trips = math.prod(loop.trips for loop in loops)
        for op in self.inside[name]:
            if op.opcode == "while":
                condition, body = _loop(op)
                loop = Loop(name=op.name, trips=self.trips(op, condition))
                clock += self.computation(body, (*loops, loop))
            elif op.opcode in ("call", "conditional"):
                clock += sum(self.computation(name, loops) for name in op.called)
            elif timed := self.collective(op, loops):
                if op.opcode.endswith("-start") or self.calls(op, ASYNC_START):
                    started[op.name] = (len(self.collectives), clock)
                self.collectives.append(timed)
            elif (begun := self.begun(op)) in started:
                number, since = started.pop(begun)
                timed = self.collectives[number]
                exposed = max(0.0, timed.seconds - (clock - since))
                self.collectives[number] = dataclasses.replace(timed, exposed=exposed)
            elif (took := self.op(op, trips)) is not None:
                clock += took[0] * trips
                self.ops.append(
                    OpTime(
                        name=op.name,
                        op_name=op.op_name,
                        part=took[1],
                        loops=loops,
                        count=trips,
                        seconds=took[0] * trips,
                    )
                )
        return clock

    def trips(self, loop: Instruction, condition: str) -> int:
        """From the bound in the loop's condition: TPU programs do not state trips."""
        if loop.trips is not None:
            return loop.trips
        if expected := _EXPECTED.search(loop.op_name):
            return int(expected[1])
        root = next(i for i in self.inside[condition] if i.is_root)
        trips = [
            -(-(bound - self.first(loop, number)) // self.step(loop, number))
            for number, bound in self.bounds(root)
        ]
        if not trips:
            raise ValueError(
                f"loop {loop.name} ({loop.op_name}) has no bound that can be read, so "
                "its time cannot be estimated; a loop whose trips depend on data is "
                "counted as often as its name expects: "
                'tf.while_loop(..., name="expected_1_trips")'
            )
        return min(trips)

    def bounds(self, condition: Instruction) -> list[tuple[int, int]]:
        """The counters in a condition, by their number in the loop's tuple, and bounds.

        `tf.scan` has two, joined by `and`.
        """
        if condition.opcode == "and":
            parts = self.module.operands(condition)
            return [bound for part in parts for bound in self.bounds(part)]
        if condition.opcode == "fusion":
            (called,) = condition.called
            inner = self.bounds(next(i for i in self.inside[called] if i.is_root))
            operands = self.module.operands(condition)
            return [
                (operands[number].number, bound)
                for number, bound in inner
                if operands[number].opcode == "get-tuple-element"
            ]
        if condition.opcode == "compare":
            counter, bound = self.module.operands(condition)
            counts = counter.opcode in ("get-tuple-element", "parameter")
            known = counts and bound.opcode == "constant" and bound.number is not None
            return [(counter.number, bound.number)] if known else []
        return []

    def first(self, loop: Instruction, number: int) -> int:
        """What an element of a loop's tuple begins with; 0 where that is not known."""
        (state,) = self.module.operands(loop)
        if state.opcode != "tuple":
            return 0
        begins = self.module.by_name[state.operands[number]]
        while begins.opcode == "copy":
            (begins,) = self.module.operands(begins)
        return (begins.number or 0) if begins.opcode == "constant" else 0

    def step(self, loop: Instruction, number: int) -> int:
        """What a trip adds to a counter: 2 where the compiler unrolled a loop."""
        _, body = _loop(loop)
        root = next(i for i in self.inside[body] if i.is_root)
        new, step = self.module.by_name[root.operands[number]], 0
        while new.opcode in ("add", "copy"):
            new, *added = self.module.operands(new)
            for part in added:
                if part.opcode == "constant":
                    step += part.number or 0
                elif part.opcode == "get-tuple-element":
                    step += self.first(loop, part.number)
        return step or 1

    def begun(self, op: Instruction) -> str | None:
        """The name of the start of the collective that an op ends, if it ends one."""
        if op.opcode.endswith("-done"):
            return op.operands[0]
        if not self.calls(op, ASYNC_DONE):
            return None
        # Products carry it on: their fusions return what they take of it.
        part = self.module.by_name[op.operands[0]]
        while part.opcode == "get-tuple-element":
            made = self.module.by_name[part.operands[0]]
            if made.opcode != "fusion" or self.calls(made, ASYNC_START):
                return made.name
            (called,) = made.called
            results = next(i for i in self.inside[called] if i.is_root)
            result = self.module.by_name[results.operands[part.number]]
            if result.opcode != "parameter":
                return None
            part = self.module.by_name[made.operands[result.number]]
        return None

    def calls(self, op: Instruction, target: str) -> bool:
        """Whether an op is a fusion that has this custom call."""
        return op.opcode == "fusion" and any(
            target in part.attributes
            for name in op.called
            for part in self.inside[name]
        )

    def collective(
        self, op: Instruction, loops: tuple[Loop, ...]
    ) -> CollectiveTime | None:
        collective = self.sent.get(op.name)
        kind = collective.kind if collective else ""
        if op.opcode == "fusion" and (inner := self.fused(op)):
            collective = self.sent[inner.name]
            # The compiler fuses an all-reduce with the slice of it that is kept.
            starts = self.calls(op, ASYNC_START)
            kind = collective.kind if starts else "reduce-scatter"
        if collective is None:
            return None
        size = collective.group_bytes
        trips = math.prod(loop.trips for loop in loops)
        seconds, waiting = self.sending(op, collective, kind, size)
        return CollectiveTime(
            name=op.name,
            collective=dataclasses.replace(
                collective, op_name=collective.op_name or op.op_name
            ),
            kind=kind,
            bytes=size,
            loops=loops,
            count=trips,
            seconds=trips * seconds,
            exposed=trips * seconds,
            waiting=trips * waiting,
        )

    def fused(self, fusion: Instruction) -> Instruction | None:
        """A collective that a fusion starts, or an all-reduce in it."""
        starts = self.calls(fusion, ASYNC_START)
        for called in fusion.called:
            for op in self.inside[called]:
                if op.name in self.sent and (starts or op.opcode == "all-reduce"):
                    return op
        return None


class _TpuWalk(Walk):
    def __init__(self, module: HloModule, mesh: DeviceMesh, order: DeviceOrder):
        super().__init__(module, mesh)
        self.kind = order.topology.kind
        self.network = TorusNetwork(hardware=self.kind, mesh=mesh, order=order)

    def op(self, op: Instruction, trips: int) -> tuple[float, TimePart] | None:
        if op.cycles is not None:
            return op.cycles / self.kind.clock, self.part(op, trips)
        if (held := _HELD.search(op.backend_config)) and self.has(op, _ROW_OPS):
            return int(held["bytes"]) / self.kind.memory_bandwidth, TimePart.MEMORY
        if _KERNEL in op.backend_config:
            if op.name.startswith(_RAGGED):
                flops = _FLOPS.search(op.backend_config)
                seconds = int(flops["flops"]) / self.kind.peak_flops if flops else 0.0
                return seconds, TimePart.MATRIX
            raise ValueError(
                f"kernel {op.name} ({op.op_name}) says no cycles for a TPU "
                f"{self.kind.name}, so its time cannot be estimated: set the "
                "kernel of attention layers to Kernel.NONE"
            )
        return None

    def sending(
        self, op: Instruction, collective: Collective, kind: str, size: int
    ) -> tuple[float, float]:
        groups, axes = collective.groups, collective.axes
        phases = self.network.collective(kind, groups, axes, size)
        seconds = sum(phase.seconds for phase in phases)
        return seconds, sum(phase.seconds for phase in phases if phase.is_waiting)

    def part(self, op: Instruction, trips: int) -> TimePart:
        if self.has(op, PRODUCTS) or _KERNEL in op.backend_config:
            return TimePart.MATRIX
        types = [
            op.type,
            *(operand.type for operand in self.module.operands(op)),
        ]
        moved = sum(_moved(type_, trips) for type_ in types)
        waits = moved / self.kind.memory_bandwidth
        bound = waits > _MEMORY_BOUND * op.cycles / self.kind.clock
        return TimePart.MEMORY if bound else TimePart.VECTOR

    def has(self, op: Instruction, opcodes: frozenset[str]) -> bool:
        """Whether an op is of these opcodes, or calls one that is."""
        inner = (part for name in op.called for part in self.inside[name])
        return op.opcode in opcodes or any(self.has(part, opcodes) for part in inner)


def _loop(loop: Instruction) -> tuple[str, str]:
    condition, body = loop.called
    return condition, body


def _moved(type_: str, trips: int) -> int:
    """Bytes of the arrays of a type; of a stack over a loop's trips, one trip's."""
    return sum(
        math.prod(shape) * itemsize(dtype) // (trips if shape[:1] == (trips,) else 1)
        for dtype, shape in arrays_of(type_)
    )
