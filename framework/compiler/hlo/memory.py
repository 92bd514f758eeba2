"""Where one device's memory goes in a compiled program.

XLA reports how much a program needs, not what for: the TPU compiler gives no buffer
assignment. But the text of an optimized program is in the order in which it runs, with
the layouts of its arrays, so it shows which values are alive when.

A loop counts as one pass through its body. Its carried values keep their buffers, which
the body updates in place; the body's temporaries add to the values alive around the
loop.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    arrays_of,
    itemsize,
)
from meshwright.framework.compiler.hlo.liveness import (
    BufferValue,
    Liveness,
    SharedBuffer,
)
from meshwright.framework.compiler.lowering.sources import Source, Sources

_LAYOUT = re.compile(r"\]\{(?P<order>[\d,]*)(?::(?P<rest>[^}]*))?\}")
_TILE = re.compile(r"T\((?P<dims>[\d,]+)\)")
_OTHER_SPACE = re.compile(r"S\([1-9]\d*\)")
# Values that are part of the program, or have no size.
_NO_BUFFER = frozenset({"constant", "partition-id", "replica-id", "after-all"})


class Kind(enum.Enum):
    """What a buffer is for."""

    ARGUMENT = "argument"
    RESULT = "result"
    SAVED = "saved activation"
    TEMPORARY = "temporary"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """Memory of a value, or of several values that use it in turn.

    Args:
      name: the name of the HLO instruction that first writes it.
      bytes: with the padding of its tiles.
      type: as text, with layout and tiling.
      kind: what it is for; a saved activation is a stack that one loop writes and
        another reads.
      argument: number of the argument that it is, else None.
      reads: numbers of the arguments that the instruction reads.
      op_name: the op that it was lowered from; for a stack, of what is written to it.
      source: where that op was made; None if unknown.
    """

    name: str
    bytes: int
    type: str
    kind: Kind
    argument: int | None
    reads: tuple[int, ...]
    op_name: str
    source: Source | None

    @property
    def layer(self) -> str:
        """Dotted path of its layer; "" if unknown."""
        return self.source.layer if self.source else ""

    @property
    def shape(self) -> tuple[int, ...]:
        return arrays_of(self.type)[0][1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """The instruction that runs, by name, and the bytes alive meanwhile."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """The memory alive over time, on one device.

    Args:
      points: for each instruction that runs, in order; the body of a loop comes in its
        place, and the loop itself after it.
      at_peak: the buffers that are alive at the peak, largest first.
    """

    points: tuple[MemoryPoint, ...]
    at_peak: tuple[Buffer, ...]

    @property
    def peak(self) -> int:
        """The most bytes alive at once. An allocator may need more, for gaps."""
        return sum(buffer.bytes for buffer in self.at_peak)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Bytes at the peak, by what they are for.

    Args:
      arguments: by name of their group.
      results: those outside arguments' buffers.
      saved: activations that the forward part saves for the backward part.
      gradients: temporaries of the shape of a weight's shard.
      weight_copies: such temporaries that are made from an argument: weights in
        another dtype or layout.
      other: the other temporaries.
    """

    arguments: Mapping[str, int]
    results: int
    saved: int
    gradients: int
    weight_copies: int
    other: int

    def parts(self) -> dict[str, int]:
        """Bytes by part, for a table; they add up to the peak."""
        return {
            **self.arguments,
            "results": self.results,
            "saved activations": self.saved,
            "gradients": self.gradients,
            "copies of weights": self.weight_copies,
            "other temporaries": self.other,
        }


def padded_bytes(type_: str) -> int:
    """Bytes of an array in a device's main memory.

    Args:
      type_: HLO's text, such as "bf16[1000,100]{1,0:T(8,128)(2,1)}": each tile holds 8
        by 128 elements of the two minor dims, which are padded to full tiles.

    Returns:
      The bytes; 0 for an array in another memory, such as `S(1)`.
    """
    (dtype, shape), layout = arrays_of(type_)[0], _LAYOUT.search(type_)
    rest = (layout and layout["rest"]) or ""
    if _OTHER_SPACE.search(rest):
        return 0
    if tile := _TILE.search(rest):
        order = [int(n) for n in layout["order"].split(",") if n]
        sizes = [int(n) for n in tile["dims"].split(",")]
        shape = [shape[dim] for dim in reversed(order)]
        shape = [1] * (len(sizes) - len(shape)) + shape
        untiled = len(shape) - len(sizes)
        shape[untiled:] = [
            math.ceil(size / by) * by
            for size, by in zip(shape[untiled:], sizes, strict=True)
        ]
    return math.prod(shape) * itemsize(dtype)


def memory_timeline(
    text: str,
    sources: Sources | None = None,
    module: HloModule | None = None,
    *,
    reuses_arguments: bool = True,
) -> MemoryTimeline:
    """The memory alive over time in an optimized program.

    Args:
      text: its HLO, scheduled: that of a compiled program.
      sources: where its ops come from, to name layers.
      module: the text, if read already.
      reuses_arguments: whether a donated argument's buffer is free from its last use
        until a result is made in it; XLA's GPU backend puts nothing else there.

    Raises:
      ValueError: the program is not scheduled, as before the backend's passes.
    """
    header = text.partition("\n")[0]
    if "is_scheduled=true" not in header:
        raise ValueError(
            "HLO text without is_scheduled=true does not tell when its ops run: "
            "pass that of a compiled program (Program.hlo_text)"
        )
    module = module or HloModule(text)
    return _timeline(Liveness(module, header), module, sources, reuses_arguments)


def breakdown(
    timeline: MemoryTimeline,
    groups: Mapping[str, Sequence[int]],
    weights: str = "weights",
) -> Breakdown:
    """What the memory at the peak is for.

    Args:
      timeline: the timeline of the program.
      groups: numbers of its arguments' leaves, by name of the group in which each is
        counted; the rest is "other arguments".
      weights: the group whose shards' shapes gradients have.
    """
    group_of = {number: name for name, numbers in groups.items() for number in numbers}
    arguments = dict.fromkeys(groups, 0)
    sizes: dict[str, int] = collections.defaultdict(int)
    shapes = set()
    for buffer in timeline.at_peak:
        if buffer.kind is Kind.ARGUMENT:
            name = group_of.get(buffer.argument, "other arguments")
            arguments[name] = arguments.get(name, 0) + buffer.bytes
            if name == weights:
                shapes.add(_without_ones(buffer.shape))
    for buffer in timeline.at_peak:
        sizes[_part(buffer, shapes)] += buffer.bytes
    return Breakdown(
        arguments=arguments,
        results=sizes["results"],
        saved=sizes["saved"],
        gradients=sizes["gradients"],
        weight_copies=sizes["weight_copies"],
        other=sizes["other"],
    )


def _part(buffer: Buffer, weights: set[tuple[int, ...]]) -> str:
    if buffer.kind is not Kind.TEMPORARY:
        return {Kind.RESULT: "results", Kind.SAVED: "saved"}.get(
            buffer.kind, "arguments"
        )
    # A scalar or a vector may have the shape of some weight by chance.
    if len(buffer.shape) < 2 or _without_ones(buffer.shape) not in weights:
        return "other"
    return "weight_copies" if buffer.reads else "gradients"


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _timeline(
    liveness: Liveness, module, sources: Sources | None, reuses_arguments: bool
) -> MemoryTimeline:
    end = len(liveness.names)
    change = [0] * (end + 2)
    held: list[tuple[SharedBuffer, int, list[tuple[int, int]]]] = []
    for shared in liveness.buffers():
        size = max(_bytes(value) for value in shared.values)
        if not size:
            continue
        # The caller keeps its arguments; donated ones are free until a result is made.
        kept = shared.argument is not None and (
            not shared.is_result or not reuses_arguments
        )
        spans = [(0, end)] if kept else shared.spans()
        held.append((shared, size, spans))
        for first, last in spans:
            change[first] += size
            change[last + 1] -= size
    alive = list(itertools.accumulate(change))
    peak = max(range(end + 1), key=alive.__getitem__)
    at_peak = [
        _buffer(shared, size, module, sources)
        for shared, size, spans in held
        if any(first <= peak <= last for first, last in spans)
    ]
    return MemoryTimeline(
        points=tuple(
            MemoryPoint(name=name, bytes=bytes_)
            for name, bytes_ in zip(liveness.names, alive, strict=False)
        ),
        at_peak=tuple(sorted(at_peak, key=lambda buffer: -buffer.bytes)),
    )


def _bytes(value: BufferValue) -> int:
    return 0 if value.maker.opcode in _NO_BUFFER else padded_bytes(value.type)


def _buffer(
    shared: SharedBuffer, size: int, module: HloModule, sources: Sources | None
) -> Buffer:
    first = shared.values[0]
    op_names = [
        _meaning(instruction, module)
        for value in shared.values
        if value.written
        for instruction in (value.written, value.maker)
    ]
    op_name = next(filter(None, op_names), _meaning(first.maker, module))
    return Buffer(
        name=first.maker.name,
        bytes=size,
        type=first.type,
        kind=_kind(shared),
        argument=shared.argument,
        reads=shared.reads,
        op_name=op_name,
        source=sources.find(op_name) if sources and op_name else None,
    )


def _kind(shared: SharedBuffer) -> Kind:
    if shared.argument is not None:
        return Kind.ARGUMENT
    if shared.is_result:
        return Kind.RESULT
    return Kind.SAVED if shared.is_saved() else Kind.TEMPORARY


def _meaning(instruction: Instruction, module: HloModule) -> str:
    """The op that an instruction was lowered from; of a copy, that of its operand."""
    while not instruction.op_name and instruction.operands:
        instruction = module.by_name[instruction.operands[0]]
    return instruction.op_name
