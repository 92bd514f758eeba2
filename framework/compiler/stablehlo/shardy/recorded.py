"""Shardy's propagation with its records: where each axis of each value comes from.

Shardy can note at every value the origin of each axis, and at every op which tensor
gave an axis to which others, in which step. The passes are those of its bundled
pipeline, in its order, up to the end of propagation; the bundle itself cannot record.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Iterator

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.stablehlo.constraints import SHARDING_ATTRIBUTE
from meshwright.framework.compiler.stablehlo.shardy.propagation import (
    PIPELINE,
    manual_axes,
    run_passes,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    Blame,
    end_of,
    op_name,
    walk,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

CONSTRAINT, REGION = "sdy.sharding_constraint", "sdy.manual_computation"
EDGE = "sdy.data_flow_edge"
_PASSING = (WHILE, "stablehlo.optimization_barrier")
_EDGES, _ORIGINS = "sdy.propagation_edges", "sdy.sharding_origins"
_NAME = "sdy.sharding_origin_name"
SELF = "self"
"""Shardy's name of an origin that is the tensor itself."""
_FIRST = "sdy-apply-sharding-constraints"
_LAST = "sdy-user-priority-propagate"
_QUIET = ("debug-propagation-edge-sharding", "debug-sharding-origins")
_AXIS = r'"?(?P<axis>[\w-]+)"?(?P<part>:\(\d+\)\d+)?"?'
_STEP = re.compile(r"step-(?P<step>\d+) = \[(?P<moves>(?:\{[^}]*\}(?:, )?)*)\]")
_MOVE = re.compile(rf"\{{{_AXIS} = (?P<source>[\w-]+) -> \[(?P<targets>[^\]]*)\]\}}")
_ORIGIN = re.compile(rf'{_AXIS} = "(?P<name>[^"]*)"')


@dataclasses.dataclass(frozen=True)
class Result:
    """The place of a result of the program, which is no value of MLIR's."""

    number: int


Place = ir.Value | Result
"""What has a sharding: of a loop's argument, result and returned value the result."""


class Direction(enum.Enum):
    """How an axis passed an op."""

    FORTH = "forth"  # From an operand to a result.
    BACK = "back"  # From a result to an operand.
    ACROSS = "across"  # From an operand or a result to another.


@dataclasses.dataclass(frozen=True, eq=False)
class Arrival:
    """An axis that came to a tensor.

    Args:
      step: number of the step of propagation, counted over the program.
      op: the operation along which it came: that the tensor is a result or an operand
        of; of a result of the program the function.
      source: the tensor that had the axis before.
      direction: from which side of the op to which.
    """

    step: int
    op: ir.Operation
    source: Place
    direction: Direction


class Recorded:
    """A module as Shardy's propagation leaves it, and what it recorded.

    Args:
      blame: for messages.
      module: the module as an MLIR operation, written for Shardy, its borders too; it
        is changed in place, and is to be used within its context.
      mesh: the program's mesh.

    Raises:
      LoweringError: Shardy cannot complete the module.
    """

    def __init__(self, blame: Blame, module: ir.Operation, mesh: DeviceMesh):
        self.mesh, self.module = mesh, module
        run_passes(blame, module, PassManager.parse(_recording()))
        self.main = ir.SymbolTable(module)["main"].operation
        self._shardings: dict[str, Sharding] = {}
        self._origins: dict[Place, dict[str, str]] = {}
        self._places: dict[ir.Value, Place] = {}

    @property
    def returned(self) -> list[ir.Value]:
        """The values that the program returns."""
        return list(end_of(self.main.regions[0].blocks[0]).operands)

    def place(self, value: ir.Value) -> Place:
        """What has the sharding of a value."""
        if value not in self._places:
            self._places[value] = self._find_place(value)
        return self._places[value]

    def _find_place(self, value: ir.Value) -> Place:
        owner = value.owner
        if isinstance(owner, ir.Block) and owner.owner.operation.name == WHILE:
            value = owner.owner.operation.results[value.arg_number]
        for use in value.uses:
            if use.owner.operation.name == EDGE:
                return use.owner.operation.results[0]
        return value

    def sharding(self, place: Place) -> Sharding | None:
        """The sharding of a place; None: nothing splits it, or it has no tensor."""
        attribute = _sharding_of(place, self.main)
        if attribute is None:
            return None
        text = str(attribute)
        if text not in self._shardings:
            self._shardings[text] = Sharding.from_sdy(self.mesh, text)
        return self._shardings[text]

    def at_region(self, value: ir.Value) -> Sharding:
        """What a manual region says of an argument of its own, or of its result."""
        owner = value.owner
        if isinstance(owner, ir.Block):
            region, name, number = owner.owner, "in_shardings", value.arg_number
        else:
            region, name, number = owner, "out_shardings", value.result_number
        listed = sdy.TensorShardingPerValueAttr(region.attributes[name]).shardings
        return Sharding.from_sdy(self.mesh, str(listed[number]))

    def origins(self, place: Place) -> dict[str, str]:
        """By axis Shardy's name of the origin: `self` where it begins here."""
        if place not in self._origins:
            self._origins[place] = self._read_origins(place)
        return self._origins[place]

    def _read_origins(self, place: Place) -> dict[str, str]:
        text = str(_attribute(place, self.main, _ORIGINS) or "")
        is_op = isinstance(place, ir.Value) and not isinstance(place.owner, ir.Block)
        if is_op and place.owner.name not in (CONSTRAINT, EDGE):
            texts = re.findall(r"\{[^{}]*\}", text)
            text = texts[place.result_number] if texts else ""
        found = _ORIGIN.finditer(text)
        return {m["axis"] + (m["part"] or ""): m["name"] for m in found}

    def sources(self, value: ir.Value) -> tuple[ir.Operation, list[Place]]:
        """The op that makes a value by passing on others, and those others.

        Args:
          value: of a loop, a branch, a barrier or a manual region, what it has an edge
            of data flow for.
        """
        owner = value.owner
        if isinstance(owner, ir.Block):  # Of a region, into which operands flow.
            holder = owner.owner.operation
            values = [holder.operands[value.arg_number]]
            return holder, [*map(self.place, values)]
        number, regions = value.result_number, list(owner.regions)
        values = [owner.operands[number]] if owner.name in _PASSING else []
        if owner.name == WHILE:
            regions = regions[1:]
        values += [end_of(region.blocks[0]).operands[number] for region in regions]
        return owner, [*map(self.place, values)]

    @functools.cached_property
    def makers(self) -> dict[str, ir.Operation]:
        """By Shardy's name of an origin the annotation or manual region."""
        return {
            ir.StringAttr(op.attributes[_NAME]).value: op
            for op in walk(self.main)
            if _NAME in op.attributes
        }

    @functools.cached_property
    def arrivals(self) -> dict[Place, list[tuple[str, Arrival]]]:
        """By place the axes that came to it, earliest first."""
        found: dict[Place, list[tuple[str, Arrival]]] = {}
        for op, text, operands, results in self._records():
            for step in _STEP.finditer(text):
                for move in _MOVE.finditer(step["moves"]):
                    axis = move["axis"] + (move["part"] or "")
                    source = _pick(move["source"], operands, results)
                    for target in move["targets"].split(", "):
                        way = _direction(move["source"], target)
                        arrival = Arrival(int(step["step"]), op, source, way)
                        place = _pick(target, operands, results)
                        found.setdefault(place, []).append((axis, arrival))
        for arrived in found.values():
            arrived.sort(key=lambda pair: pair[1].step)
        return found

    def _records(self) -> Iterator[tuple[ir.Operation, str, list[Place], list[Place]]]:
        """Each op with records, their text, and the places that they number."""
        for op in walk(self.main):
            if _EDGES not in op.attributes:
                continue
            text = str(op.attributes[_EDGES])
            if op.name == EDGE:
                owner, sources = self.sources(op.operands[0])
                yield owner, text, sources, [op.results[0]]
            else:
                yield op, text, [*map(self.place, op.operands)], list(op.results)
        for number, attributes in enumerate(_each(self.main, "res_attrs")):
            if _EDGES in attributes:
                places = [self.place(self.returned[number])], [Result(number)]
                yield self.main, str(attributes[_EDGES]), *places


def finishing_passes() -> str:
    """The passes of Shardy's pipeline after propagation, up to explicit reshards.

    They also put sums behind the ops that leave them to be added up.
    """
    text = _pipeline().replace("enable-full-version=false", "enable-full-version=true")
    rest = text[text.index("}", text.index(_LAST)) + 1 :]
    return f"builtin.module(sdy-remove-propagation-debug-info{rest}"


def _recording() -> str:
    """The passes of Shardy's pipeline up to the end of propagation, recording.

    The first that could record does not: on some programs, such as a step of experts
    without drops, that ends the process (jaxlib 0.10.2).
    """
    passes = _pipeline()
    passes = passes[: passes.index("}", passes.index(_LAST)) + 1] + ")"
    before, first, rest = passes.partition(_FIRST)
    silent, end, rest = rest.partition("}")
    for option in _QUIET:
        rest = rest.replace(f"{option}=false", f"{option}=true")
    return before + first + silent + end + rest


def _pipeline() -> str:
    # Without a folder to write to that pass does nothing, and it has no name to parse.
    return str(PassManager.parse(PIPELINE)).replace(",sdy-save-module", "")


def _pick(name: str, operands: list[Place], results: list[Place]) -> Place:
    """The place that a record calls `operand-1`, or `result-0`."""
    kind, _, number = name.partition("-")
    return (operands if kind == "operand" else results)[int(number)]


def _direction(source: str, target: str) -> Direction:
    sides = source.partition("-")[0], target.partition("-")[0]
    if sides[0] == sides[1]:
        return Direction.ACROSS
    return Direction.FORTH if sides[0] == "operand" else Direction.BACK


def _sharding_of(place: Place, main: ir.Operation) -> sdy.TensorShardingAttr | None:
    is_op = isinstance(place, ir.Value) and not isinstance(place.owner, ir.Block)
    if is_op and place.owner.name in (CONSTRAINT, EDGE):
        return place.owner.attributes.get("sharding")
    attribute = _attribute(place, main, SHARDING_ATTRIBUTE)
    if is_op and attribute is not None:
        return sdy.TensorShardingPerValueAttr(attribute).shardings[place.result_number]
    return attribute


def _attribute(place: Place, main: ir.Operation, name: str) -> ir.Attribute | None:
    if isinstance(place, Result):
        attributes = _each(main, "res_attrs")[place.number]
    elif isinstance(place.owner, ir.Block):
        if place.owner != main.regions[0].blocks[0]:
            return None
        attributes = _each(main, "arg_attrs")[place.arg_number]
    else:
        attributes = place.owner.attributes
    # A `DictAttr` has no `get`.
    return attributes[name] if name in attributes else None  # noqa: SIM401


def _each(main: ir.Operation, name: str) -> list[ir.DictAttr]:
    """The attributes of each argument or result of the program."""
    if name not in main.attributes:
        return []
    return [*map(ir.DictAttr, ir.ArrayAttr(main.attributes[name]))]


def maker_of(place: ir.Value) -> ir.Operation:
    """The op that makes a value, or holds the region that it is an argument of."""
    owner = place.owner
    if owner.name != EDGE:
        return owner
    owner = owner.operands[0].owner
    owner = owner.owner.operation if isinstance(owner, ir.Block) else owner
    if owner.name != REGION:
        return owner
    # A manual region has no name of its own: its first op has.
    named = (op for op in walk(owner) if op_name(op) != "?")
    return next(named, owner)


def manual_of(value: ir.Value) -> tuple[str, ...]:
    """The manual axes of the region that a value is in."""
    owner = value.owner
    return manual_axes(owner.owner if isinstance(owner, ir.Block) else owner.parent)
