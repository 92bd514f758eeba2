"""Which values of a scheduled program share memory, and when that memory is in use.

It is read from the text of optimized HLO. A value that a loop carries has one buffer:
before the loop, in its body and after it. The TPU compiler states in attributes of its
own what is written in place. On other backends these are slices of stacks and scattered
updates, and elementwise ops on operands that no op reads again.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    arrays_of,
    elements,
)

_ALIAS = re.compile(r"\{(?P<result>[\d, ]*)\}: \((?P<argument>\d+), \{[\d, ]*\}")
_ALIASING = '"aliasing_operands":'
_INDICES = re.compile(r'"indices":\[(?P<indices>[^]]*)\]')
# Ops whose result is their operand under another name.
_VIEWS = frozenset({"bitcast", "opt-barrier"})
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Ops that write to their first operand in place, and the operand that they write."""
_ELEMENTWISE_OPS = """
    abs add and atan2 cbrt ceil clamp convert cosine divide erf exponential
    exponential-minus-one floor log log-plus-one logistic maximum minimum multiply
    negate not or power remainder round-nearest-afz round-nearest-even rsqrt select
    sign sine sqrt subtract tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_OPS.split())


@dataclasses.dataclass(eq=False)
class BufferValue:
    """An array that an instruction makes.

    Args:
      maker: the instruction.
      type: as text.
      start: when it is made.
      end: when it is last read.
      written: what is written to it, if it is a stack updated in place; else None.
      passed_by: loops that carry it unchanged.
    """

    maker: Instruction
    type: str
    start: int
    end: int
    written: Instruction | None = None
    passed_by: list[str] = dataclasses.field(default_factory=list)
    same: BufferValue | None = None

    @property
    def root(self) -> BufferValue:
        """The value that stands for all that share its buffer."""
        value = self
        while value.same is not None:
            value = value.same
        if value is not self:
            self.same = value
        return value


Tree = BufferValue | list["Tree"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBuffer:
    """Values that share a buffer, in order of time.

    Args:
      values: the values.
      argument: number of the argument whose buffer it is, else None.
      is_result: whether the program returns it.
      reads: numbers of the arguments that the first value's maker reads.
    """

    values: tuple[BufferValue, ...]
    argument: int | None
    is_result: bool
    reads: tuple[int, ...]

    def spans(self) -> list[tuple[int, int]]:
        """When it is in use, each span with its last moment; spans do not overlap."""
        spans: list[tuple[int, int]] = []
        for value in self.values:
            if spans and value.start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], value.end))
            else:
                spans.append((value.start, value.end))
        return spans

    def is_saved(self) -> bool:
        """Whether one loop writes it slice by slice and another only reads it."""
        loops = {name for value in self.values for name in value.passed_by}
        return bool(loops) and any(value.written is not None for value in self.values)


class Liveness:
    """The run of a program.

    Args:
      module: optimized and scheduled.
      header: the first line of its text.

    Attributes:
      names: the instruction that runs at each moment.
    """

    def __init__(self, module: HloModule, header: str):
        self.names: list[str] = []
        self._module = module
        self._values: list[BufferValue] = []
        self._reads: dict[Instruction, list[BufferValue]] = {}
        self._arguments: dict[int, Tree] = {}
        self._may_reuse: list[tuple[BufferValue, list[BufferValue]]] = []
        self._states_aliasing = any(
            _ALIASING in op.backend_config for op in module.instructions
        )
        result = self._run(module.entry, None)
        results = result if isinstance(result, list) else [result]
        self._read(results)
        aliases = {
            int(alias["result"].split(",")[0] or 0): int(alias["argument"])
            for alias in _ALIAS.finditer(header)
        }
        for number, argument in aliases.items():
            _share(self._arguments[argument], results[number])
        self._reuse()
        self._results = {value.root for value in _leaves(results)}

    def buffers(self) -> list[SharedBuffer]:
        """All buffers of the program."""
        sharing: dict[BufferValue, list[BufferValue]] = {}
        for value in self._values:
            sharing.setdefault(value.root, []).append(value)
        arguments = {
            value.root: number
            for number, tree in self._arguments.items()
            for value in _leaves(tree)
        }
        return [
            SharedBuffer(
                values=tuple(sorted(values, key=lambda value: value.start)),
                argument=arguments.get(root),
                is_result=root in self._results,
                reads=tuple(
                    arguments[read.root]
                    for read in self._reads.get(values[0].maker, ())
                    if read.root in arguments
                ),
            )
            for root, values in sharing.items()
        ]

    @property
    def _now(self) -> int:
        return len(self.names)

    def _run(self, computation: str, given: Sequence[Tree] | None) -> Tree:
        """Runs a computation; `given` are its arguments, None at the entry."""
        known: dict[str, Tree] = {}
        result: Tree = []
        for op in self._module.inside[computation]:
            if op.opcode == "parameter":
                if given is None:
                    self._arguments[op.number] = self._make(op, op.type)
                    known[op.name] = self._arguments[op.number]
                else:
                    known[op.name] = given[op.number]
            else:
                operands = [known[name] for name in op.operands]
                known[op.name] = self._step(op, operands)
            if op.is_root:
                result = known[op.name]
        return result

    def _step(self, op: Instruction, operands: list[Tree]) -> Tree:
        if op.opcode == "get-tuple-element":
            return operands[0][op.number]
        if op.opcode == "tuple":
            return operands
        if op.opcode in _VIEWS:
            return operands[0]
        self._read(operands)
        if op.opcode == "while":
            made = self._loop(op, operands[0])
        elif op.opcode == "conditional":
            made = self._branches(op, operands)
        elif op.opcode == "call":
            made = self._run(op.called[0], operands)
        elif op.opcode.endswith("-done"):
            made = _done(op, operands[0])
        elif op.opcode.endswith("-start"):
            made = self._start(op, operands)
        else:
            made = self._make(op, op.type)
            self._reads[op] = list(_leaves(operands))
            self._in_place(op, operands, made)
        self.names.append(op.name)
        return made

    def _loop(self, loop: Instruction, carried: Tree) -> Tree:
        condition, body = loop.called
        self.names.append(loop.name)
        inside = self._make(loop, loop.type)
        _share(carried, inside)
        self._run(condition, [inside])
        after = self._run(body, [inside])
        self._read(after)
        for before, value in zip(_leaves(inside), _leaves(after), strict=True):
            if before is value:
                before.passed_by.append(loop.name)
        _share(inside, after)
        self.names.append(loop.name)
        made = self._make(loop, loop.type)
        _share(inside, made)
        return made

    def _branches(self, conditional: Instruction, operands: list[Tree]) -> Tree:
        made = self._make(conditional, conditional.type)
        for branch, given in zip(conditional.called, operands[1:], strict=True):
            result = self._run(branch, [given])
            self._read(result)
            _share(made, result)
        for value in _leaves(made):
            value.start = value.end = self._now
        return made

    def _start(self, op: Instruction, operands: list[Tree]) -> Tree:
        """The start of an asynchronous op: a tuple of its operands and its result."""
        if op.opcode == "all-reduce-start":
            return self._make(op, op.type)
        source = 1 if op.opcode == "copy-start" else 0
        parts = elements(op.type)
        given = operands if parts[source].startswith("(") else operands[0]
        return [
            given if number == source else self._make(op, part)
            for number, part in enumerate(parts)
        ]

    def _in_place(self, op: Instruction, operands: list[Tree], made: Tree) -> None:
        """Lets the result have the buffers of operands that it takes over."""
        results = list(_leaves(made))
        for number, (operand, written) in enumerate(self._updates(op)):
            if operand is not None:
                _share(operands[operand], results[number])
                results[number].written = written
        _, _, aliasing = op.backend_config.partition(_ALIASING)
        if "indices" in aliasing:
            places = [*_leaves(operands), *results]
            for match in _INDICES.finditer(aliasing):
                first, *rest = re.findall(r"\d+", match["indices"])
                for place in rest:
                    _share(places[int(first)], places[int(place)])
        elif not self._states_aliasing and isinstance(made, BufferValue):
            given = [operands[number] for number in self._elementwise(op)]
            self._may_reuse.append(
                (made, [v for v in given if isinstance(v, BufferValue)])
            )

    def _reuse(self) -> None:
        """Lets elementwise ops write over operands that no op reads again."""
        end: dict[BufferValue, int] = {}
        for value in self._values:
            end[value.root] = max(end.get(value.root, 0), value.end)
        kept = {v.root for tree in self._arguments.values() for v in _leaves(tree)}
        for made, operands in self._may_reuse:
            if any(
                operand.root not in kept | {made.root}
                and end[operand.root] == made.start
                and _extent(operand) == _extent(made)
                for operand in operands
            ):
                made.start += 1
                made.end = max(made.start, made.end)

    def _elementwise(self, op: Instruction) -> list[int]:
        """The operands that an op reads element by element only."""
        if op.opcode in ELEMENTWISE:
            return list(range(len(op.operands)))
        if op.opcode != "fusion":
            return []
        needs: dict[str, set[int]] = {}  # The operands that each op depends on.
        otherwise: set[int] = set()
        for part in self._module.inside[op.called[0]]:
            on = set().union(*(needs[name] for name in part.operands))
            if part.opcode == "parameter":
                on = {part.number}
            elif part.opcode not in ELEMENTWISE and part.opcode != "bitcast":
                otherwise |= on
            needs[part.name] = on
        return [n for n in range(len(op.operands)) if n not in otherwise]

    def _updates(
        self, op: Instruction
    ) -> Iterator[tuple[int | None, Instruction | None]]:
        """For each result the operand that it updates, by number, and with what."""
        if op.opcode in UPDATES:
            yield 0, self._module.by_name[op.operands[UPDATES[op.opcode]]]
        if op.opcode != "fusion":
            return
        (root,) = (
            inner for inner in self._module.inside[op.called[0]] if inner.is_root
        )
        parts = self._module.operands(root) if root.opcode == "tuple" else [root]
        for part in map(self._viewed, parts):
            updated = written = None
            if part.opcode in UPDATES:
                given = [*map(self._viewed, self._module.operands(part))]
                stack, slice_ = given[0], given[UPDATES[part.opcode]]
                if stack.opcode == "parameter":
                    updated, written = stack.number, slice_
                if slice_.opcode == "parameter":
                    written = self._module.by_name[op.operands[slice_.number]]
            yield updated, written

    def _viewed(self, op: Instruction) -> Instruction:
        """The instruction at the start of a chain of bitcasts."""
        while op.opcode == "bitcast":
            (op,) = self._module.operands(op)
        return op

    def _make(self, maker: Instruction, type_: str) -> Tree:
        if type_.startswith("("):
            return [self._make(maker, part) for part in elements(type_)]
        value = BufferValue(maker=maker, type=type_, start=self._now, end=self._now)
        self._values.append(value)
        return value

    def _read(self, tree: Tree) -> None:
        for value in _leaves(tree):
            value.end = max(value.end, self._now)


def _done(op: Instruction, started: Tree) -> Tree:
    if op.opcode == "all-reduce-done" or not isinstance(started, list):
        return started
    return started[0 if op.opcode == "copy-done" else 1]


def _leaves(tree: Tree) -> Iterator[BufferValue]:
    if isinstance(tree, list):
        yield from itertools.chain.from_iterable(map(_leaves, tree))
    else:
        yield tree


def _extent(value: BufferValue) -> tuple[str, tuple[int, ...]]:
    return arrays_of(value.type)[0]


def _share(first: Tree, second: Tree) -> None:
    for value, sharer in zip(_leaves(first), _leaves(second), strict=True):
        if value.root is not sharer.root:
            sharer.root.same = value.root
