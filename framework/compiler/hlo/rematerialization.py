"""Tensors that the partitioner made whole on every device, though nobody asked for it.

Where XLA knows no better way it gathers a tensor, and lets each device do the op whole
or take its shard again. What layouts ask for is another thing: a weight gathered for a
product of which each device does its part, an annotation that says whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from meshwright.framework.compiler.hlo.hlo_text import HloModule, Instruction, elements
from meshwright.framework.compiler.hlo.report import Collective, collectives_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

# What comes between a gather and the slice of it when a dim does not divide.
_BETWEEN = ("pad", "copy", "reshape", "slice", "bitcast")
_MOVES = (*_BETWEEN, "broadcast", "convert", "transpose")
_OF_NUMBERS = ("add", "clamp", "convert", "maximum", "minimum", "multiply", "subtract")
_EXCHANGES = ("collective-permute", "all-to-all")
# Who takes part in what these hold is not known here.
_OPAQUE = ("call", "conditional", "custom-call", "get-tuple-element", "tuple", "while")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """A tensor made whole on every device only to be split again, or for an op that
    every device does alike.

    XLA calls the first involuntary full rematerialization: it knows no better way from
    the one sharding to the other. Its warning is logged in C++, where nobody reads it.

    Args:
      tensor: op name of the tensor.
      at: op name of what wanted it in another sharding, or is done alike.
      shape: that each device holds; the whole tensor's, except for dims that the two
        shardings split alike.
      dtype: as HLO names it.
      bytes: of that.
      alike: whether an op is done alike by all that have it; else it is split again.
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
    """The tensors that are made whole with nobody asking.

    Args:
      mesh: the program's.
      completed: the module at logical shapes.
      partitioned: the module of one device.
      read: a sharding from HLO's text and a rank.
    """
    finder = _Finder(mesh, completed, partitioned, read)
    found = {}
    for alike, pairs in ((False, finder.sliced()), (True, finder.done_alike())):
        for gather, at in pairs:
            shard = finder.gathered(gather)
            one = Rematerialization(
                tensor=shard.op_name,
                at=at.op_name,
                shape=gather.shape,
                dtype=gather.dtype,
                bytes=gather.bytes,
                alike=alike,
            )
            found.setdefault((one.tensor, one.at), one)
    return list(found.values())


class _Finder:
    """Looks at the gathers of a partitioned module."""

    def __init__(self, mesh: DeviceMesh, completed, partitioned, read):
        self.mesh = mesh
        self.completed = completed
        self.module = partitioned
        self.read = read
        found = collectives_of(partitioned, mesh)
        self.spans = {one.name: self._spanned(one) for one in found}
        self.varying: dict[str, frozenset[str]] = {}
        self.made_alike: dict[str, frozenset[str]] = {}
        for one in partitioned.instructions:  # What is read comes before its readers.
            self.varying[one.name] = self._varying(one)

    def sliced(self) -> Iterator[tuple[Instruction, Instruction]]:
        """Gathers with the slices that take each device's shard out of them.

        Cheaper ways slice first, and a tensor that is meant to be whole is read by an
        op in between. XLA warned of the very same ones in 260 random reshards, sums and
        transposes on a (2, 2, 2) mesh.
        """
        for one in self.module.instructions:
            if self._is_own_shard(one):
                gather = self.module.by_name[one.operands[0]]
                while gather.opcode in _BETWEEN:
                    gather = self.module.by_name[gather.operands[0]]
                if gather.opcode == "all-gather":
                    yield gather, one

    def done_alike(self) -> Iterator[tuple[Instruction, Instruction]]:
        """Gathers that are read only by ops that their devices do alike."""
        for gather in self.module.instructions:
            axes = self.made_alike.get(gather.name)
            if not axes:
                continue
            uses = list(self._uses(gather))
            if any(use.opcode == "all-gather" for use in uses):
                continue  # The last of several has the whole tensor.
            if not all(self._is_alike(use, axes) for use in uses):
                continue
            if uses and not self._is_asked_for(gather, axes):
                yield gather, uses[0]

    def gathered(self, one: Instruction) -> Instruction:
        """What gathers in a row were made of."""
        while one.opcode == "all-gather":
            one = self.module.by_name[one.operands[0]]
        return one

    def _uses(self, one: Instruction) -> Iterator[Instruction]:
        """The ops that read a tensor, however it is moved about before."""
        for use in self.module.users.get(one.name, ()):
            if use.opcode in _MOVES and not use.is_root:
                yield from self._uses(use)
            else:
                yield use

    def _is_alike(self, one: Instruction, axes: frozenset[str]) -> bool:
        """Whether devices along `axes` do an op alike, or take their shards."""
        if one.opcode in _OPAQUE or (one.opcode in _MOVES and one.is_root):
            return False
        return self._is_own_shard(one) or not self.varying[one.name] & axes

    def _is_asked_for(self, one: Instruction, axes: frozenset[str]) -> bool:
        """Whether an annotation, or the program's result, is to be whole.

        Completion carries that back through ops that keep a tensor's size.
        """
        if one.is_root:
            return True
        for use in self.module.users.get(one.name, ()):
            if use.opcode == "tuple" and use.is_root:
                return True
            if use.bytes and _count(use) == _count(one):
                alike = not self.varying[use.name] & axes
                # Annotations are copies.
                if alike and (use.opcode == "copy" or self._is_asked_for(use, axes)):
                    return True
        return False

    def _is_own_shard(self, one: Instruction) -> bool:
        """Whether it is a slice that starts where the device's number says."""
        if one.opcode != "dynamic-slice":
            return False
        pending, seen = list(one.operands[1:]), set()
        while pending:
            start = self.module.by_name[pending.pop()]
            if start.opcode == "partition-id":
                return True
            # Its number is looked up in constants; an index of the user's is not.
            known = ("dynamic-slice", "reshape", *_OF_NUMBERS)
            if start.opcode in known and start.name not in seen:
                seen.add(start.name)
                pending += start.operands
        return False

    def _varying(self, one: Instruction) -> frozenset[str]:
        """The mesh axes along which devices may have different values."""
        everything = frozenset(self.mesh.axis_names)
        if one.opcode in ("partition-id", "conditional", "call", "custom-call"):
            return everything
        if one.opcode == "parameter":
            text = one.sharding if one.computation == self.module.entry else ""
            return self._split_along(one, text)
        if one.opcode == "get-tuple-element":
            return self._of_element(one)
        axes = frozenset().union(*(self.varying[name] for name in one.operands))
        if one.opcode == "all-gather":
            self.made_alike[one.name] = self._gathered_along(one)
            return axes - self.spans[one.name] - self.made_alike[one.name]
        if one.name in self.spans:
            spanned = self.spans[one.name]
            return axes - spanned if one.opcode == "all-reduce" else axes | spanned
        return axes

    def _gathered_along(self, one: Instruction) -> frozenset[str]:
        """The axes along which a gather makes alike what differed.

        XLA may let devices exchange parts first, so that others gather: then it is the
        axes that split the tensor, if all of it comes together.
        """
        base, moved = one, False
        while base.opcode in (*_MOVES, *_EXCHANGES, "all-gather") or (
            moved and self._is_own_shard(base)
        ):
            moved |= base.opcode in _EXCHANGES
            base = self.module.by_name[base.operands[0]]
        if not moved:
            return self.spans[one.name]
        axes = self.varying[base.name]
        parts = self.mesh.axes_size(sorted(axes))
        return axes if _count(one) >= parts * _count(base) else frozenset()

    def _of_element(self, one: Instruction) -> frozenset[str]:
        """Of what a loop has, the sharding that completion gave it."""
        packed = self.module.by_name[one.operands[0]]
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
        for other in self.completed.inside.get(name, ()):
            if other.opcode == "parameter" and elements(other.sharding):
                return self._split_along(one, elements(other.sharding)[one.number])
        return frozenset(self.mesh.axis_names)

    def _split_along(self, one: Instruction, text: str) -> frozenset[str]:
        sharding = self.read(text, len(one.shape)) if text else ""
        if isinstance(sharding, str):
            return frozenset(self.mesh.axis_names)
        used = (axis for axes in sharding.dims for axis in axes)
        return frozenset(self.mesh.part(axis).axis for axis in used)

    def _spanned(self, one: Collective) -> frozenset[str]:
        """The axes that a collective spans: what sums or gathers, from end to end."""
        names = self.mesh.axis_names
        if one.kind in ("all-gather", "all-reduce"):
            return frozenset(names) & frozenset(one.axes or ())
        return frozenset(self.mesh.part(axis).axis for axis in one.axes or names)


def _count(one: Instruction) -> int:
    count = 1
    for size in one.shape:
        count *= size
    return count
