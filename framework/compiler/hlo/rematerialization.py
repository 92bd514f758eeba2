"""Tensors that the partitioner gathered on every device without an annotation for it.

Where XLA knows no better way it gathers a tensor, and lets each device do all of the op
or take its shard again. A gather that the shardings call for is another thing: of a
weight for a product of which each device does its part, or for an annotation that says
replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from meshwright.framework.compiler.hlo.hlo_text import HloModule, Instruction, elements
from meshwright.framework.compiler.hlo.report import Collective, collectives_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

# What comes between a gather and the slice of it when a dim does not divide evenly.
_BETWEEN = ("pad", "copy", "reshape", "slice", "bitcast")
_MOVES = (*_BETWEEN, "broadcast", "convert", "transpose")
_OF_NUMBERS = ("add", "clamp", "convert", "maximum", "minimum", "multiply", "subtract")
_EXCHANGES = ("collective-permute", "all-to-all")
# Which devices take part in the ops inside these is not known here.
_OPAQUE = ("call", "conditional", "custom-call", "get-tuple-element", "tuple", "while")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """A tensor gathered on every device only to be split again, or for an op that
    every device does alike.

    XLA calls the former involuntary full rematerialization: it knows no better way from
    one sharding to the other. Its warning is logged in C++, where nobody reads it.

    Args:
      tensor: op name of the tensor.
      at: op name of what needs it in another sharding, or is done alike.
      shape: what each device holds: the tensor's full shape, except for dims that the
        two shardings split alike.
      dtype: as HLO names it.
      bytes: the bytes that each device holds.
      alike: whether all devices that have it do the op alike; else it is split again.
    """

    tensor: str
    at: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    alike: bool


def rematerializations(
    mesh: DeviceMesh,
    completed: HloModule,
    partitioned: HloModule,
    read: Callable[[str, int], Sharding | str],
) -> list[Rematerialization]:
    """The tensors that are gathered without an annotation for it.

    Args:
      mesh: the program's.
      completed: the module at logical shapes.
      partitioned: the module of one device.
      read: a sharding from HLO's text and a rank.
    """
    finder = _Finder(mesh, completed, partitioned, read)
    results = {}
    for alike, pairs in ((False, finder.sliced()), (True, finder.done_alike())):
        for gather, at in pairs:
            shard = finder.gathered(gather)
            result = Rematerialization(
                tensor=shard.op_name,
                at=at.op_name,
                shape=gather.shape,
                dtype=gather.dtype,
                bytes=gather.bytes,
                alike=alike,
            )
            results.setdefault((result.tensor, result.at), result)
    return list(results.values())


class _Finder:
    """Looks at the gathers of a partitioned module."""

    def __init__(self, mesh: DeviceMesh, completed, partitioned, read):
        self.mesh = mesh
        self.completed = completed
        self.module = partitioned
        self.read = read
        collectives = collectives_of(partitioned, mesh)
        self.spans = {c.name: self._spanned(c) for c in collectives}
        self.varying: dict[str, frozenset[str]] = {}
        self.made_alike: dict[str, frozenset[str]] = {}
        for op in partitioned.instructions:  # Operands come before users.
            self.varying[op.name] = self._varying(op)

    def sliced(self) -> Iterator[tuple[Instruction, Instruction]]:
        """Gathers with the slices that take each device's shard out of them.

        Cheaper ways slice first, and a tensor that is meant to be replicated is read by
        an op in between. XLA warned of exactly these gathers in 260 random reshards,
        sums and transposes on a (2, 2, 2) mesh.
        """
        for op in self.module.instructions:
            if self._is_own_shard(op):
                gather = self.module.by_name[op.operands[0]]
                while gather.opcode in _BETWEEN:
                    gather = self.module.by_name[gather.operands[0]]
                if gather.opcode == "all-gather":
                    yield gather, op

    def done_alike(self) -> Iterator[tuple[Instruction, Instruction]]:
        """Gathers that are read only by ops that their devices do alike."""
        for gather in self.module.instructions:
            axes = self.made_alike.get(gather.name)
            if not axes:
                continue
            uses = list(self._uses(gather))
            if any(use.opcode == "all-gather" for use in uses):
                continue  # Only the last of several gathers has the full tensor.
            if not all(self._is_alike(use, axes) for use in uses):
                continue
            if uses and not self._is_requested(gather, axes):
                yield gather, uses[0]

    def gathered(self, op: Instruction) -> Instruction:
        """The operand of a chain of gathers."""
        while op.opcode == "all-gather":
            op = self.module.by_name[op.operands[0]]
        return op

    def _uses(self, op: Instruction) -> Iterator[Instruction]:
        """The ops that read a tensor, through ops that only move it."""
        for use in self.module.users.get(op.name, ()):
            if use.opcode in _MOVES and not use.is_root:
                yield from self._uses(use)
            else:
                yield use

    def _is_alike(self, op: Instruction, axes: frozenset[str]) -> bool:
        """Whether devices along `axes` do an op alike, or take their shards."""
        if op.opcode in _OPAQUE or (op.opcode in _MOVES and op.is_root):
            return False
        return self._is_own_shard(op) or not self.varying[op.name] & axes

    def _is_requested(self, op: Instruction, axes: frozenset[str]) -> bool:
        """Whether an annotation, or the program's result, is to be replicated.

        Completion propagates that back through ops that keep a tensor's size.
        """
        if op.is_root:
            return True
        for use in self.module.users.get(op.name, ()):
            if use.opcode == "tuple" and use.is_root:
                return True
            if use.bytes and _count(use) == _count(op):
                alike = not self.varying[use.name] & axes
                # Annotations are copies.
                if alike and (use.opcode == "copy" or self._is_requested(use, axes)):
                    return True
        return False

    def _is_own_shard(self, op: Instruction) -> bool:
        """Whether an instruction is a slice whose start depends on the device's id."""
        if op.opcode != "dynamic-slice":
            return False
        pending, seen = list(op.operands[1:]), set()
        while pending:
            start = self.module.by_name[pending.pop()]
            if start.opcode == "partition-id":
                return True
            # A device's id is looked up in constants; an index of the user's is not.
            known = ("dynamic-slice", "reshape", *_OF_NUMBERS)
            if start.opcode in known and start.name not in seen:
                seen.add(start.name)
                pending += start.operands
        return False

    def _varying(self, op: Instruction) -> frozenset[str]:
        """The mesh axes along which devices may have different values."""
        everything = frozenset(self.mesh.axis_names)
        if op.opcode in ("partition-id", "conditional", "call", "custom-call"):
            return everything
        if op.opcode == "parameter":
            text = op.sharding if op.computation == self.module.entry else ""
            return self._split_along(op, text)
        if op.opcode == "get-tuple-element":
            return self._of_element(op)
        axes = frozenset().union(*(self.varying[name] for name in op.operands))
        if op.opcode == "all-gather":
            self.made_alike[op.name] = self._gathered_along(op)
            return axes - self.spans[op.name] - self.made_alike[op.name]
        if op.name in self.spans:
            spanned = self.spans[op.name]
            return axes - spanned if op.opcode == "all-reduce" else axes | spanned
        return axes

    def _gathered_along(self, op: Instruction) -> frozenset[str]:
        """The axes along which a gather gives devices equal values that differed.

        XLA may let devices exchange parts first, so that others gather: then these are
        the axes that split the tensor, if all of the tensor is gathered.
        """
        base, moved = op, False
        while base.opcode in (*_MOVES, *_EXCHANGES, "all-gather") or (
            moved and self._is_own_shard(base)
        ):
            moved |= base.opcode in _EXCHANGES
            base = self.module.by_name[base.operands[0]]
        if not moved:
            return self.spans[op.name]
        axes = self.varying[base.name]
        parts = self.mesh.axes_size(sorted(axes))
        return axes if _count(op) >= parts * _count(base) else frozenset()

    def _of_element(self, op: Instruction) -> frozenset[str]:
        """The varying axes of an element of a tuple; a loop's by its sharding."""
        packed = self.module.by_name[op.operands[0]]
        if packed.opcode == "while":
            inside = [
                inner
                for name in packed.called
                for inner in self.module.inside.get(name, ())
                if inner.opcode == "parameter"
            ]
            packed = inside[-1] if inside else packed
        if packed.opcode != "parameter":
            return self.varying[packed.name]
        name = packed.computation.removesuffix("_spmd")
        for parameter in self.completed.inside.get(name, ()):
            if parameter.opcode == "parameter" and elements(parameter.sharding):
                return self._split_along(op, elements(parameter.sharding)[op.number])
        return frozenset(self.mesh.axis_names)

    def _split_along(self, op: Instruction, text: str) -> frozenset[str]:
        sharding = self.read(text, len(op.shape)) if text else ""
        if isinstance(sharding, str):
            return frozenset(self.mesh.axis_names)
        used = (axis for axes in sharding.dims for axis in axes)
        return frozenset(self.mesh.part(axis).axis for axis in used)

    def _spanned(self, collective: Collective) -> frozenset[str]:
        """The axes that a collective spans; for sums and gathers, spans in full."""
        names = self.mesh.axis_names
        if collective.kind in ("all-gather", "all-reduce"):
            return frozenset(names) & frozenset(collective.axes or ())
        return frozenset(self.mesh.part(axis).axis for axis in collective.axes or names)


def _count(op: Instruction) -> int:
    count = 1
    for size in op.shape:
        count *= size
    return count
