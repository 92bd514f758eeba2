"""Reading HLO text: instructions, their shardings, and who calls whom."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_HEAD = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = ")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_OPCODE = re.compile(r" ?(?P<opcode>[\w-]+)\(")
_OPERAND = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|(?:true|false)_computation)=%(?P<one>[\w.-]+)"
    r"|branch_computations=\{(?P<many>[^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(?P<n>\d+)"')
_CLOSING = {"(": ")", "{": "}"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Args:
      name: in its module.
      opcode: such as "dot".
      computation: name of the computation that it is in.
      dtype: element type, such as "f32"; "" for a tuple.
      shape: of an array; () for a tuple.
      operands: names of its operands; what a parameter or constant has in their place
        is in `number`.
      number: of a parameter, else None.
      sharding: as text; "" if it has none.
      op_name: metadata: what it was lowered from.
      called: names of the computations that it calls.
      trips: of a loop, if the compiler knows.
      is_root: whether it is its computation's result.
    """

    name: str
    opcode: str
    computation: str
    dtype: str
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    number: int | None
    sharding: str
    op_name: str
    called: tuple[str, ...]
    trips: int | None
    is_root: bool

    @property
    def bytes(self) -> int:
        """Size of an array of this type; 0 for tuples and what holds no data."""
        return math.prod(self.shape) * itemsize(self.dtype)


class HloModule:
    """The instructions of a module's text, in textual order."""

    def __init__(self, text: str):
        self.instructions: list[Instruction] = list(_instructions(text))
        self.entry: str = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)[1]
        self.by_name = {one.name: one for one in self.instructions}

    def operands(self, one: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in one.operands]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read an instruction, by its name."""
        users: dict[str, list[Instruction]] = {}
        for one in self.instructions:
            for name in one.operands:
                users.setdefault(name, []).append(one)
        return users

    def root(self) -> Instruction:
        """The module's result."""
        return next(
            one
            for one in self.instructions
            if one.is_root and one.computation == self.entry
        )

    def loops_around(self, computation: str) -> list[Instruction]:
        """The loops whose bodies a computation runs in, innermost first."""
        loops = []
        while caller := self._callers.get(computation):
            loops += [caller] if caller.opcode == "while" else []
            computation = caller.computation
        return loops

    @functools.cached_property
    def _callers(self) -> dict[str, Instruction]:
        return {name: one for one in self.instructions for name in one.called}


def itemsize(dtype: str) -> int:
    """Bytes of an element; 0 for tuples, tokens and opaque types."""
    if dtype == "pred" or dtype.startswith("f8"):
        return 1
    bits = re.fullmatch(r"(?:bf|[sufc])(\d+)", dtype)
    return max(1, int(bits[1]) // 8) if bits else 0


def _instructions(text: str) -> Iterator[Instruction]:
    computation = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = head["name"]
        elif computation and (match := _NAME.match(line)):
            yield _instruction(match, line, computation)


def _instruction(match: re.Match, line: str, computation: str) -> Instruction:
    type_, rest = _split_type(line[match.end() :])
    opcode = _OPCODE.match(rest)
    arguments = _balanced(rest, opcode.end() - 1)
    rest = rest[opcode.end() + len(arguments) - 1 :]
    array = None if type_.startswith("(") else _ARRAY.match(type_)
    op_name, trips = _OP_NAME.search(rest), _TRIPS.search(rest)
    start = rest.find(", sharding={")
    return Instruction(
        name=match["name"],
        opcode=opcode["opcode"],
        computation=computation,
        dtype=array["dtype"] if array else "",
        shape=tuple(int(n) for n in array["dims"].split(",") if n) if array else (),
        operands=tuple(_OPERAND.findall(arguments)),
        number=int(arguments[1:-1]) if opcode["opcode"] == "parameter" else None,
        sharding="" if start < 0 else _balanced(rest, start + len(", sharding=")),
        op_name=op_name["name"] if op_name else "",
        called=tuple(_called(rest)),
        trips=int(trips["n"]) if trips else None,
        is_root=match["root"] is not None,
    )


def _split_type(text: str) -> tuple[str, str]:
    type_ = _balanced(text, 0) if text.startswith("(") else text.split(" ", 1)[0]
    return type_, text[len(type_) :]


def _balanced(text: str, start: int) -> str:
    """The text from a bracket at `start` to the one that closes it."""
    opening = text[start]
    closing, depth = _CLOSING[opening], 0
    for end in range(start, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return text[start : end + 1]
    raise ValueError(f"HLO text without its closing bracket: {text[:200]}")


def _called(rest: str) -> Iterator[str]:
    for match in _CALLED.finditer(rest):
        if match["one"]:
            yield match["one"]
        else:
            yield from _OPERAND.findall(match["many"])


def tuple_shardings(text: str) -> list[str]:
    """The shardings of a tuple's leaves, from `{{replicated}, {devices=...}}`."""
    leaves, start = [], text.find("{", 1)
    while start > 0:
        leaf = _balanced(text, start)
        leaves.append(leaf)
        start = text.find("{", start + len(leaf))
    return leaves
