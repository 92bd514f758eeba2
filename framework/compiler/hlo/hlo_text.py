"""Reads HLO text: instructions, their shardings, and the computations they call.

The text of a program for a full pod can take hundreds of MB, nearly all of it device
groups written out. They are cut out by `str.find`, unparsed, before anything else reads
a line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterator

_HEAD = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = ")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_OPCODE = re.compile(r" ?(?P<opcode>[\w-]+)\(")
_OPERAND = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|select|scatter|(?:true|false)_computation)"
    r"=%(?P<one>[\w.-]+)|(?:branch|called)_computations=\{(?P<many>[^}]*)\}"
)
_WITH_ATTRIBUTES = frozenset({"dot", "convolution", "custom-call"})
_ORDERED = 'custom_call_target="LayoutConstraint"'
_TAG = re.compile(r'meshwright_op="(?P<tag>\d+)"')
_ESTIMATED = re.compile(r'"estimated_cycles":"(?P<cycles>\d+)"')
_GIVEN = re.compile(r'meshwright_cycles="(?P<cycles>\d+)"')
_INDEX = re.compile(r"index=(?P<index>\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(?P<n>\d+)"')
_ITEM = re.compile(r"(?:bf|[sufc])(?P<bits>\d+)(?:e\w+)?")
_BRACKETS = {"(": re.compile(r"[()]"), "{": re.compile(r"[{}]")}
_MARK = re.compile(r"[][(){},]")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Args:
      name: its name in the module.
      opcode: such as "dot".
      computation: name of the computation that it is in.
      type: the type of its result: "f32[8,16]{1,0}", "(f32[8]{0}, s32[])".
      operands: names of its operands; a parameter or constant has `number` instead.
      number: of a parameter, or of the tuple's element that a get-tuple-element takes;
        the value of a scalar constant that is an integer from 0 up; else None.
      groups: of a collective, the devices that take part together: the text of its
        replica_groups or source_target_pairs; else "".
      sharding: as text; "" if it has none.
      op_name: metadata: the op that it was lowered from.
      called: names of the computations that it calls: a loop's condition and body, a
        conditional's branches, what a fusion calls or a reduction applies.
      trips: of a loop, if the compiler states it; the TPU compiler does not.
      backend_config: the backend's own text; "" if there is none.
      is_root: whether it is its computation's result.
      cycles: those that the TPU compiler estimated, or that a kernel's call was given;
        else None.
      tag: the number that `repair.inspection` gave the operation, else None.
      attributes: of a product, a convolution or a custom call, its other attributes as
        text, such as which dims are contracted; else "".
    """

    name: str
    opcode: str
    computation: str
    type: str
    operands: tuple[str, ...]
    number: int | None
    groups: str
    sharding: str
    op_name: str
    called: tuple[str, ...]
    trips: int | None
    backend_config: str
    is_root: bool
    cycles: int | None = None
    tag: int | None = None
    attributes: str = ""

    @property
    def dtype(self) -> str:
        """Element type of an array, such as "f32"; "" of a tuple."""
        return self._array[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an array; () of a tuple."""
        return self._array[1]

    @property
    def bytes(self) -> int:
        """Size of an array of this type; 0 for tuples and types without data."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @functools.cached_property
    def _array(self) -> tuple[str, tuple[int, ...]]:
        return ("", ()) if self.type.startswith("(") else arrays_of(self.type)[0]


class HloModule:
    """The instructions of a module's text, in textual order."""

    def __init__(self, text: str):
        self.instructions: list[Instruction] = list(_instructions(text))
        self.entry: str = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)[1]
        self.by_name = {i.name: i for i in self.instructions}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in instruction.operands]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read an instruction, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
        return users

    @functools.cached_property
    def inside(self) -> dict[str, list[Instruction]]:
        """The instructions of each computation, in textual order."""
        inside: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            inside.setdefault(instruction.computation, []).append(instruction)
        return inside

    def root(self) -> Instruction:
        """The module's result."""
        return next(i for i in self.inside[self.entry] if i.is_root)

    def loops_around(self, computation: str) -> list[Instruction]:
        """The loops whose bodies a computation runs in, innermost first."""
        loops = []
        while caller := self._callers.get(computation):
            loops += [caller] if caller.opcode == "while" else []
            computation = caller.computation
        return loops

    @functools.cached_property
    def _callers(self) -> dict[str, Instruction]:
        return {name: i for i in self.instructions for name in i.called}


def itemsize(dtype: str) -> int:
    """Bytes of an element; 0 for tuples, tokens and opaque types."""
    if dtype == "pred":
        return 1
    item = _ITEM.fullmatch(dtype)
    return max(1, int(item["bits"]) // 8) if item else 0


def arrays_of(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and shape of each array in the text of a type."""
    return [
        (array["dtype"], tuple(int(n) for n in array["dims"].split(",") if n))
        for array in _ARRAY.finditer(type_)
    ]


@functools.lru_cache(maxsize=4096)
def type_bytes(type_: str) -> int:
    """Bytes of all arrays in the text of a type."""
    return sum(math.prod(shape) * itemsize(dtype) for dtype, shape in arrays_of(type_))


def elements(text: str) -> list[str]:
    """The elements of a tuple's type or sharding; none of a text that is no tuple's.

    Such texts are `(f32[2]{0}, s32[])` and `{{manual}, {...}}`.
    """
    if not text.startswith(("(", "{{")):
        return []
    texts, depth, start = [], 0, 1
    for mark in _MARK.finditer(text):
        depth += (mark[0] in "([{") - (mark[0] in "}])")
        if depth == (mark[0] == ","):  # Between two elements, or after the last one.
            texts.append(text[start : mark.start()])
            start = mark.end()
    plain = (_COMMENT.sub("", element).strip() for element in texts)
    return [element for element in plain if element]


def _instructions(text: str) -> Iterator[Instruction]:
    computation = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = head["name"]
        elif computation and (match := _NAME.match(line)):
            yield _instruction(match, line, computation)


def _instruction(match: re.Match, line: str, computation: str) -> Instruction:
    start = match.end()
    end = _close(line, start) if line[start] == "(" else line.index(" ", start)
    head = _OPCODE.match(line, end)
    opcode, type_ = head["opcode"], line[start:end]
    end = _close(line, head.end() - 1)
    arguments = line[head.end() : end - 1]
    groups, rest = _without_groups(line[end:])
    sharding, rest = _without_sharding(rest)
    attributes, _, backend_config = rest.partition(", backend_config=")
    if _ORDERED in attributes:  # It changes only the order of elements in memory.
        opcode = "bitcast"
    op_name = _OP_NAME.search(attributes)
    trips = _TRIPS.search(backend_config) if opcode == "while" else None
    cycles = _ESTIMATED.search(backend_config)
    if opcode == "custom-call":  # What takes the elements of its result says so too.
        cycles = cycles or _GIVEN.search(attributes)
    tag = _TAG.search(attributes)
    return Instruction(
        name=match["name"],
        opcode=opcode,
        computation=computation,
        type=type_,
        operands=tuple(_OPERAND.findall(arguments)),
        number=_number(opcode, arguments, attributes),
        groups=groups,
        sharding=sharding,
        op_name=op_name["name"] if op_name else "",
        called=tuple(_called(attributes)),
        trips=int(trips["n"]) if trips else None,
        backend_config=backend_config,
        is_root=match["root"] is not None,
        cycles=int(cycles["cycles"]) if cycles else None,
        tag=int(tag["tag"]) if tag else None,
        attributes=attributes if opcode in _WITH_ATTRIBUTES else "",
    )


def _number(opcode: str, arguments: str, attributes: str) -> int | None:
    if opcode == "parameter":
        return int(arguments)
    if opcode == "get-tuple-element":
        return int(_INDEX.search(attributes)["index"])
    if opcode == "constant" and arguments.isdecimal():
        return int(arguments)
    return None


def _without_groups(text: str) -> tuple[str, str]:
    """The device groups among attributes, and the other attributes."""
    for name in (", replica_groups=", ", source_target_pairs="):
        if (at := text.find(name)) < 0:
            continue
        start = at + len(name)
        if text.startswith("{{", start):
            closing = "}}"
        elif text[start : start + 1] == "[":  # [4,2]<=[2,4]T(1,0)
            closing = ""
        else:  # {}, or mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}
            closing = "}"
        end = text.find(closing or ", ", start)
        end = len(text) if end < 0 else end + len(closing)
        # A program has few different groups.
        return sys.intern(text[start:end]), text[:at] + text[end:]
    return "", text


def _without_sharding(text: str) -> tuple[str, str]:
    """The sharding among attributes, and the other attributes."""
    name = ", sharding="
    if (at := text.find(name + "{")) < 0:
        return "", text
    end = _close(text, at + len(name))
    return text[at + len(name) : end], text[:at] + text[end:]


def _close(text: str, start: int) -> int:
    """The index just after the bracket that closes the one at `start`."""
    opening, depth = text[start], 0
    for bracket in _BRACKETS[opening].finditer(text, start):
        depth += 1 if bracket[0] == opening else -1
        if depth == 0:
            return bracket.end()
    raise ValueError(f"HLO text without its closing bracket: {text[:200]}")


def _called(attributes: str) -> Iterator[str]:
    for match in _CALLED.finditer(attributes):
        if match["one"]:
            yield match["one"]
        else:
            yield from _OPERAND.findall(match["many"])
