"""Which values of a scheduled program share memory, and when that memory is in use.

Read from the text of optimized HLO. Values that a loop carries have one buffer: before
it, in its body and behind it. What is written in place TPU's compiler says in
attributes of its own. For other backends it is slices of stacks, and elementwise ops on
what nobody reads again.
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
# Other names for what they are given.
_VIEWS = frozenset({"bitcast", "optimization-barrier"})
_UPDATE = "dynamic-update-slice"
_ELEMENTWISE_OPS = """
    abs add and atan2 cbrt ceil clamp convert cosine divide erf exponential
    exponential-minus-one floor log log-plus-one logistic maximum minimum multiply
    negate not or power remainder round-nearest-afz round-nearest-even rsqrt select
    sign sine sqrt subtract tan tanh xor
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_OPS.split())


@dataclasses.dataclass(eq=False)
class BufferValue:
    """An array that an instruction makes.

    Args:
      maker: the instruction.
      type: as text.
      start: when it is made.
      end: when it is last read.
      written: of a stack that is updated in place what is written to it, else None.
      passed_by: loops that carry it and leave it as it is.
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
        """The one value that stands for all that share its buffer."""
        one = self
        while one.same is not None:
            one = one.same
        if one is not self:
            self.same = one
        return one


Tree = BufferValue | list["Tree"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBuffer:
    """Values that have one buffer, in order of time.

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
        """When it is in use, each span with its last moment; they do not overlap."""
        found: list[tuple[int, int]] = []
        for one in self.values:
            if found and one.start <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], one.end))
            else:
                found.append((one.start, one.end))
        return found

    def is_saved(self) -> bool:
        """Whether one loop writes it by slices and another only reads it."""
        loops = {name for one in self.values for name in one.passed_by}
        return bool(loops) and any(one.written is not None for one in self.values)


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
        self._told = any(_ALIASING in one.backend_config for one in module.instructions)
        result = self._run(module.entry, None)
        results = result if isinstance(result, list) else [result]
        self._read(results)
        aliases = {
            int(one["result"].split(",")[0] or 0): int(one["argument"])
            for one in _ALIAS.finditer(header)
        }
        for number, argument in aliases.items():
            _share(self._arguments[argument], results[number])
        self._reuse()
        self._results = {one.root for one in _leaves(results)}

    def buffers(self) -> list[SharedBuffer]:
        """All buffers of the program."""
        sharing: dict[BufferValue, list[BufferValue]] = {}
        for one in self._values:
            sharing.setdefault(one.root, []).append(one)
        arguments = {
            value.root: number
            for number, tree in self._arguments.items()
            for value in _leaves(tree)
        }
        return [
            SharedBuffer(
                values=tuple(sorted(values, key=lambda one: one.start)),
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
        """Runs a computation; `given` are its arguments, None of the entry's own."""
        known: dict[str, Tree] = {}
        result: Tree = []
        for one in self._module.inside[computation]:
            if one.opcode == "parameter":
                if given is None:
                    self._arguments[one.number] = self._make(one, one.type)
                    known[one.name] = self._arguments[one.number]
                else:
                    known[one.name] = given[one.number]
            else:
                operands = [known[name] for name in one.operands]
                known[one.name] = self._step(one, operands)
            if one.is_root:
                result = known[one.name]
        return result

    def _step(self, one: Instruction, operands: list[Tree]) -> Tree:
        if one.opcode == "get-tuple-element":
            return operands[0][one.number]
        if one.opcode == "tuple":
            return operands
        if one.opcode in _VIEWS:
            return operands[0]
        self._read(operands)
        if one.opcode == "while":
            made = self._loop(one, operands[0])
        elif one.opcode == "conditional":
            made = self._branches(one, operands)
        elif one.opcode == "call":
            made = self._run(one.called[0], operands)
        elif one.opcode.endswith("-done"):
            made = _done(one, operands[0])
        elif one.opcode.endswith("-start"):
            made = self._start(one, operands)
        else:
            made = self._make(one, one.type)
            self._reads[one] = list(_leaves(operands))
            self._in_place(one, operands, made)
        self.names.append(one.name)
        return made

    def _loop(self, one: Instruction, carried: Tree) -> Tree:
        condition, body = one.called
        self.names.append(one.name)
        inside = self._make(one, one.type)
        _share(carried, inside)
        self._run(condition, [inside])
        after = self._run(body, [inside])
        self._read(after)
        for before, value in zip(_leaves(inside), _leaves(after), strict=True):
            if before is value:
                before.passed_by.append(one.name)
        _share(inside, after)
        self.names.append(one.name)
        made = self._make(one, one.type)
        _share(inside, made)
        return made

    def _branches(self, one: Instruction, operands: list[Tree]) -> Tree:
        made = self._make(one, one.type)
        for branch, given in zip(one.called, operands[1:], strict=True):
            result = self._run(branch, [given])
            self._read(result)
            _share(made, result)
        for value in _leaves(made):
            value.start = value.end = self._now
        return made

    def _start(self, one: Instruction, operands: list[Tree]) -> Tree:
        """What starts an asynchronous op: a tuple of its operands and its result."""
        if one.opcode == "all-reduce-start":
            return self._make(one, one.type)
        source = 1 if one.opcode == "copy-start" else 0
        parts = elements(one.type)
        given = operands if parts[source].startswith("(") else operands[0]
        return [
            given if number == source else self._make(one, part)
            for number, part in enumerate(parts)
        ]

    def _in_place(self, one: Instruction, operands: list[Tree], made: Tree) -> None:
        """Lets the result have the buffers of operands that it takes over."""
        results = list(_leaves(made))
        for number, (operand, written) in enumerate(self._updates(one)):
            if operand is not None:
                _share(operands[operand], results[number])
                results[number].written = written
        _, _, aliasing = one.backend_config.partition(_ALIASING)
        if "indices" in aliasing:
            places = [*_leaves(operands), *results]
            for match in _INDICES.finditer(aliasing):
                first, *rest = re.findall(r"\d+", match["indices"])
                for other in rest:
                    _share(places[int(first)], places[int(other)])
        elif not self._told and isinstance(made, BufferValue):
            given = [operands[number] for number in self._elementwise(one)]
            self._may_reuse.append(
                (made, [v for v in given if isinstance(v, BufferValue)])
            )

    def _reuse(self) -> None:
        """Lets elementwise ops write over operands that nobody reads again."""
        end: dict[BufferValue, int] = {}
        for one in self._values:
            end[one.root] = max(end.get(one.root, 0), one.end)
        kept = {v.root for tree in self._arguments.values() for v in _leaves(tree)}
        for made, operands in self._may_reuse:
            if any(
                one.root not in kept | {made.root}
                and end[one.root] == made.start
                and _extent(one) == _extent(made)
                for one in operands
            ):
                made.start += 1
                made.end = max(made.start, made.end)

    def _elementwise(self, one: Instruction) -> list[int]:
        """The operands that an op only needs element by element."""
        if one.opcode in _ELEMENTWISE:
            return list(range(len(one.operands)))
        if one.opcode != "fusion":
            return []
        needs: dict[str, set[int]] = {}  # The operands that each op rests on.
        otherwise: set[int] = set()
        for part in self._module.inside[one.called[0]]:
            on = set().union(*(needs[name] for name in part.operands))
            if part.opcode == "parameter":
                on = {part.number}
            elif part.opcode not in _ELEMENTWISE and part.opcode != "bitcast":
                otherwise |= on
            needs[part.name] = on
        return [n for n in range(len(one.operands)) if n not in otherwise]

    def _updates(
        self, one: Instruction
    ) -> Iterator[tuple[int | None, Instruction | None]]:
        """For each result the number of the operand that it updates, and with what."""
        if one.opcode == _UPDATE:
            yield 0, self._module.by_name[one.operands[1]]
        if one.opcode != "fusion":
            return
        (root,) = (x for x in self._module.inside[one.called[0]] if x.is_root)
        parts = self._module.operands(root) if root.opcode == "tuple" else [root]
        for part in map(self._viewed, parts):
            updated = written = None
            if part.opcode == _UPDATE:
                stack, slice_ = map(self._viewed, self._module.operands(part)[:2])
                if stack.opcode == "parameter":
                    updated, written = stack.number, slice_
                if slice_.opcode == "parameter":
                    written = self._module.by_name[one.operands[slice_.number]]
            yield updated, written

    def _viewed(self, one: Instruction) -> Instruction:
        """What a chain of bitcasts is of."""
        while one.opcode == "bitcast":
            (one,) = self._module.operands(one)
        return one

    def _make(self, one: Instruction, type_: str) -> Tree:
        if type_.startswith("("):
            return [self._make(one, part) for part in elements(type_)]
        value = BufferValue(maker=one, type=type_, start=self._now, end=self._now)
        self._values.append(value)
        return value

    def _read(self, tree: Tree) -> None:
        for value in _leaves(tree):
            value.end = max(value.end, self._now)


def _done(one: Instruction, started: Tree) -> Tree:
    if one.opcode == "all-reduce-done" or not isinstance(started, list):
        return started
    return started[0 if one.opcode == "copy-done" else 1]


def _leaves(tree: Tree) -> Iterator[BufferValue]:
    if isinstance(tree, list):
        yield from itertools.chain.from_iterable(map(_leaves, tree))
    else:
        yield tree


def _extent(value: BufferValue) -> tuple[str, tuple[int, ...]]:
    return arrays_of(value.type)[0]


def _share(first: Tree, second: Tree) -> None:
    for one, other in zip(_leaves(first), _leaves(second), strict=True):
        if one.root is not other.root:
            other.root.same = one.root
