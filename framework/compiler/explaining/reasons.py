"""Why each tensor of a program lies where it lies, by Shardy's records.

The program is completed once more, in this process, as the passes left it before it was
written for a partitioner. GSPMD keeps no records: of a program for GSPMD this is how
Shardy completes the same annotations, which may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from jax.extend.mlir import ir
from tensorflow.python.util import nest

from meshwright.framework.compiler.explaining.provenance import (
    ASKED_FOR,
    Hop,
    Origin,
    OriginKind,
    Provenance,
    Spot,
    TensorLayout,
    made_at,
)
from meshwright.framework.compiler.lowering.sources import PLACEHOLDER, Kind
from meshwright.framework.compiler.stablehlo.shardy.completed import write_for_shardy
from meshwright.framework.compiler.stablehlo.shardy.recorded import (
    CONSTRAINT,
    EDGE,
    SELF,
    Arrival,
    Direction,
    Place,
    Recorded,
    Result,
    maker_of,
    manual_of,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    NUMBER,
    WHILE,
    Blame,
    dtype_of,
    is_annotation,
    shape_of,
    short_name,
    tf_name,
    walk,
    with_sharding,
)
from meshwright.framework.compiler.weight_update_sharding.carried_state import trips
from meshwright.framework.compiler.xla.jax_bridge import ir_context
from meshwright.framework.compiler.xla.mesh_program import Written
from meshwright.framework.sharding.sharding import Sharding

_ASKED = "/asked_for"
"""Ends the name of an annotation that is in no program, see `what_if`."""
_NO_TENSOR = frozenset({"XLA_Args", "XLA_Retvals", "?"})
_NAMELESS = (EDGE, "stablehlo.constant", "sdy.constant", WHILE)


def of_state(given: Mapping[int, Sharding | None]) -> dict[Spot, Sharding | None]:
    """For carried leaves, by number, the same sharding as argument and as result."""
    kinds = (Kind.ARGUMENT, Kind.RESULT)
    return {Spot(kind, number): of for number, of in given.items() for kind in kinds}


class Reasons:
    """A program, completed in this process, with the reason of each axis.

    Args:
      written: the program, written for its partitioner.
      plain: see `PassResults`.
      changes: shardings that tensors get in the place of their own: None takes an
        annotation away, and leaves an argument or a result to completion.
      left: numbers of the carried leaves whose forms, now fixed, completion chose;
        None: those that the program's notes name.

    Raises:
      LoweringError: Shardy cannot complete the program.
      ValueError: the mesh has one device: no tensor is split.
    """

    def __init__(
        self,
        written: Written,
        plain: bytes,
        changes: Mapping[Spot, Sharding | None] | None = None,
        left: frozenset[int] | None = None,
    ):
        if written.mesh.size == 1:
            raise ValueError(
                f"{written.signature.name}: the mesh ({written.mesh}) has one device, "
                "so no tensor is split and there is nothing to explain"
            )
        self.written, self.plain, self.changes = written, plain, changes or {}
        self.left = written.left if left is None else left
        self.mesh, self.sources = written.mesh, written.signature.sources
        self._borders = {
            Kind.ARGUMENT: [form and form.border for form in written.in_forms],
            Kind.RESULT: [form and form.border for form in written.out_forms],
        }
        self._shardings: dict[Place, Sharding] = {}
        self._origins: dict[Place, Origin] = {}
        self._hops: dict[Arrival, Hop] = {}
        self._context = ir_context()
        with self.opened():
            module = ir.Module.parse(plain).operation
            ops = dict(enumerate(op for op in walk(module) if len(op.results)))
            number = ir.IntegerType.get_signless(32)
            for place, op in ops.items():
                op.attributes[NUMBER] = ir.IntegerAttr.get(number, place)
            self.trips = {
                place: trips(op) for place, op in ops.items() if op.name == WHILE
            }
            for spot, sharding in self.changes.items():
                self._change(ops, spot, sharding)
            blame = Blame(written.signature.name, self.sources)
            write_for_shardy(blame, module, self.mesh, *self._borders.values())
            self.recorded = Recorded(blame, module, self.mesh)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Enters the MLIR context of the completed module."""
        with self._context, ir.Location.unknown():
            yield

    def _change(self, ops, spot: Spot, sharding: Sharding | None) -> None:
        if spot.kind is not Kind.INSIDE:
            self._borders[spot.kind][spot.number] = sharding
            return
        op = ops[spot.number]
        value = op.operands[0] if is_annotation(op) else op.results[spot.result]
        if sharding is not None:
            location = op.location
            if not is_annotation(op):
                location = ir.Location.name(tf_name(op) + _ASKED)
            with ir.InsertionPoint.after(op), location:
                annotated = with_sharding(value, sharding)
            if is_annotation(op):
                annotated.owner.attributes[NUMBER] = op.attributes[NUMBER]
            value, before = annotated, op.results[spot.result]
            before.replace_all_uses_except(annotated, annotated.owner.operation)
        elif is_annotation(op):
            op.results[0].replace_all_uses_with(value)
        if is_annotation(op):
            op.erase()

    @property
    def name(self) -> str:
        """The program's name."""
        return self.written.signature.name

    # What tensors there are.

    @functools.cached_property
    def _places(self) -> dict[TensorLayout, tuple[Place, Spot]]:
        with self.opened():
            return {layout: (place, spot) for layout, place, spot in self._layouts()}

    @property
    def tensors(self) -> tuple[TensorLayout, ...]:
        """The tensors: arguments and results, then one of each TF op, in order."""
        return tuple(self._places)

    def spot(self, tensor: TensorLayout) -> Spot:
        """Where a tensor is in the program before it is completed."""
        return self._places[tensor][1]

    def place(self, tensor: TensorLayout) -> Place:
        """Where a tensor is in the completed module."""
        return self._places[tensor][0]

    def _layouts(self) -> Iterator[tuple[TensorLayout, Place, Spot]]:
        main = self.recorded.main
        arguments = main.regions[0].blocks[0].arguments
        for number, value in enumerate(arguments):
            spot = Spot(Kind.ARGUMENT, number)
            yield self._border(spot, value), value, spot
        for number, value in enumerate(self.recorded.returned):
            spot = Spot(Kind.RESULT, number)
            yield self._border(spot, value), Result(number), spot
        for name, values in self._values.items():
            yield self._inside(name, values)

    @functools.cached_property
    def _values(self) -> dict[str, list[ir.Value]]:
        """By name of a TF op the values that it became."""
        by_name: dict[str, list[ir.Value]] = {}
        for op in walk(self.recorded.main):
            name = tf_name(op)
            is_named = name not in _NO_TENSOR and not name.endswith(_ASKED)
            if is_named and NUMBER in op.attributes and op.name not in _NAMELESS:
                values = [
                    v for v in op.results if isinstance(v.type, ir.RankedTensorType)
                ]
                by_name.setdefault(name, []).extend(values)
        return {name: values for name, values in by_name.items() if values}

    def _border(self, spot: Spot, value: ir.Value) -> TensorLayout:
        place = value if spot.kind is Kind.ARGUMENT else Result(spot.number)
        return TensorLayout(
            kind=spot.kind,
            name=self._paths[spot.kind][spot.number],
            layer="",
            file="",
            line=0,
            shape=shape_of(value),
            dtype=dtype_of(value),
            sharding=self.sharding(place),
            note=self.written.notes.text(spot.kind, spot.number),
        )

    def _inside(self, name, values) -> tuple[TensorLayout, Place, Spot]:
        """The tensor of a TF op, as `explain` chooses it among the op's values."""
        value = max(values, key=lambda v: math.prod(shape_of(v)))
        source = self.sources.find(name, shape_of(value))
        own = [v for v in values if source is not None and shape_of(v) in source.shapes]
        value = own[-1] if own else value
        place, op = self.recorded.place(value), value.owner
        number = ir.IntegerAttr(op.attributes[NUMBER]).value
        layout = TensorLayout(
            kind=Kind.INSIDE,
            name=name,
            **made_at(source),
            shape=shape_of(value),
            dtype=dtype_of(value),
            sharding=self.sharding(place),
        )
        return layout, place, Spot(Kind.INSIDE, number, value.result_number)

    @functools.cached_property
    def _paths(self) -> dict[Kind, list[str]]:
        signature, paths = self.written.signature, {}
        nests = {Kind.ARGUMENT: signature.inputs, Kind.RESULT: signature.outputs}
        for kind, specs in nests.items():
            pairs = nest.flatten_with_joined_string_paths(specs, separator=".")
            paths[kind] = [path or kind.value for path, _ in pairs]
        return paths

    def places(self, name: str, shape: tuple[int, ...]) -> list[Place]:
        """Where the tensors of this shape are that a TF op became."""
        values = self._values.get(name, ())
        return [self.recorded.place(v) for v in values if shape_of(v) == shape]

    def border_place(self, kind: Kind, name: str) -> Place:
        """Where the argument or the result is that has this path in its nest."""
        number = self._paths[kind].index(name)
        return Result(number) if kind is Kind.RESULT else self.argument_place(number)

    def argument_place(self, number: int) -> Place:
        """Where the argument of a number is, counted over the leaves of all."""
        return self.recorded.main.regions[0].blocks[0].arguments[number]

    # Where axes come from. The rest is called within `opened`.

    def sharding(self, place: Place) -> Sharding:
        """The sharding of a place of the completed module."""
        if place not in self._shardings:
            self._shardings[place] = self._read(place)
        return self._shardings[place]

    def _read(self, place: Place) -> Sharding:
        completed, is_result = self.recorded.sharding(place), isinstance(place, Result)
        manual = () if is_result else manual_of(place)
        dims = completed.dims if completed else ((),) * len(self.shape(place))
        dims = [tuple(axis for axis in axes if axis not in manual) for axes in dims]
        if self._at(place) is not None and self.border(place) is None:
            # Arrays between programs are split evenly: XLA drops the axes left over.
            dims = map(self.mesh.dividing, dims, self.shape(place))
        return Sharding(self.mesh, tuple(dims), manual=manual)

    def is_fixed(self, place: Place, dim: int) -> bool:
        """Whether a dim is as an annotation of the place, or of its only use, says."""
        completed = self.recorded.sharding(place)
        return completed is not None and dim not in completed.unspecified

    def shape(self, place: Place) -> tuple[int, ...]:
        """The shape of a place's tensor."""
        if isinstance(place, Result):
            return shape_of(self.recorded.returned[place.number])
        return shape_of(place)

    def name_of(self, place: Place) -> str:
        """Names a tensor in texts: `argument 0.w`, `result loss`, `while/MatMul`."""
        if isinstance(place, Result):
            return f"result {self._paths[Kind.RESULT][place.number]}"
        if isinstance(place.owner, ir.Block):
            return f"argument {self._paths[Kind.ARGUMENT][place.arg_number]}"
        return tf_name(maker_of(place))

    def provenances(self, place: Place) -> tuple[Provenance, ...]:
        """Of each axis that splits a place, in the order of the dims."""
        return tuple(
            self.provenance(place, axis, dim)
            for dim, axes in enumerate(self.sharding(place).dims)
            for axis in axes
        )

    def provenance(self, place: Place, axis: str, dim: int) -> Provenance:
        """Of an axis that splits a dim of a place."""
        trail = self.trail(place, axis)
        begin = trail[0].source if trail else place
        name = self._origin_name(begin, axis)
        origin = self.origin_at(begin) if name == SELF else self._origin_of(name)
        before = self._before_settling(origin, axis)
        if before is not None and not trail:
            return dataclasses.replace(before, dim=dim)
        if before is not None:
            origin = dataclasses.replace(origin, inferred_from=before.origin)
        way = tuple(map(self._hop, trail))
        return Provenance(axis=axis, dim=dim, origin=origin, way=way)

    def _before_settling(self, origin: Origin, axis: str) -> Provenance | None:
        """Why state has an axis that completion gave it before its form was fixed.

        None for what is no such state, or was split otherwise in the meantime.
        """
        if origin.kind not in (OriginKind.ARGUMENT, OriginKind.RESULT):
            return None
        kind = Kind(origin.kind.value)
        number = self._paths[kind].index(origin.name)
        if number not in self.left:
            return None
        before = self._unsettled
        with before.opened():
            found = before.provenances(before.border_place(kind, origin.name))
            return next((one for one in found if one.axis == axis), None)

    def was_left(self, place: Place) -> bool:
        """Whether a place is state whose form, now fixed, completion chose."""
        at = self._at(place)
        return at is not None and at[1] in self.left

    @functools.cached_property
    def _unsettled(self) -> Reasons:
        """The program with the state left to completion that was once left to it."""
        changes = {**self.changes, **of_state(dict.fromkeys(self.left))}
        return Reasons(self.written, self.plain, changes, frozenset())

    def trail(self, place: Place, axis: str) -> list[Arrival]:
        """How an axis came to a place, from where it begins."""
        arrivals: list[Arrival] = []
        while self._origin_name(place, axis) != SELF:
            before = arrivals[-1].step if arrivals else None
            arrival = self._arrival(place, axis, before)
            if arrival is None:  # It begins at an annotation that is next to it.
                break
            arrivals.append(arrival)
            place = arrival.source
        return [*self._given(place), *arrivals[::-1]]

    def _asks(self, place: Place, axis: str) -> bool:
        """Whether an argument or a result was given a sharding with this axis.

        Shardy names an annotation next to it that agrees; of equal results no origin.
        """
        border = self.border(place)
        if border is None:
            return False
        return self.mesh.part(axis).axis in self.mesh.entire(
            axis for axes in border.dims for axis in axes
        )

    def border(self, place: Place) -> Sharding | None:
        """The sharding that an argument or a result was given; None for others."""
        at = self._at(place)
        return None if at is None else self._borders[at[0]][at[1]]

    def _at(self, place: Place) -> tuple[Kind, int] | None:
        """An argument's or a result's kind and number; None for others."""
        if isinstance(place, Result):
            return Kind.RESULT, place.number
        is_argument = place.owner == self.recorded.main.regions[0].blocks[0]
        return (Kind.ARGUMENT, place.arg_number) if is_argument else None

    def kept_from(self, place: Place) -> str:
        """The program that gave an argument's variable its sharding, if another did."""
        if isinstance(place, Result) or not isinstance(place.owner, ir.Block):
            return ""
        form = self.written.in_forms[place.arg_number]
        return form.kept_from if form and self.border(place) == form.border else ""

    def _origin_name(self, place: Place, axis: str) -> str:
        if self._asks(place, axis):
            return SELF
        names = self.recorded.origins(place)
        if axis in names:
            return names[axis]
        entire = self.mesh.entire([axis])
        return next(n for a, n in names.items() if self.mesh.entire([a]) == entire)

    def _arrival(self, place: Place, axis: str, before: int | None) -> Arrival | None:
        entire = self.mesh.part(axis).axis
        came = [
            arrival
            for other, arrival in self.recorded.arrivals.get(place, ())
            if (before is None or arrival.step < before)
            and self.mesh.part(other).axis == entire
        ]
        return came[0] if came else None

    def _hop(self, arrival: Arrival) -> Hop:
        if arrival not in self._hops:
            self._hops[arrival] = self._new_hop(arrival)
        return self._hops[arrival]

    def _new_hop(self, arrival: Arrival) -> Hop:
        op = arrival.op
        source = self.sources.find(tf_name(op))
        is_main = op == self.recorded.main
        return Hop(
            step=arrival.step,
            op="return" if is_main else short_name(op),
            op_name="" if is_main else tf_name(op),
            file=source.file if source and not is_main else "",
            line=source.line if source and not is_main else 0,
            direction=arrival.direction,
        )

    def _origin_of(self, name: str) -> Origin:
        """By Shardy's name: "constraint_3", "input: 0" or "mc_0_output: 1"."""
        maker, _, number = name.partition(": ")
        if maker == "input":
            arguments = self.recorded.main.regions[0].blocks[0].arguments
            return self.origin_at(arguments[int(number)])
        if maker == "output":
            return self.origin_at(Result(int(number)))
        region, _, side = maker.rpartition("_")
        if side in ("input", "output") and region in self.recorded.makers:
            op = self.recorded.makers[region]
            block = op.regions[0].blocks[0].arguments
            values = block if side == "input" else op.results
            return self.origin_at(self.recorded.place(values[int(number)]))
        return self.origin_at(self.recorded.makers[name].results[0])

    def origin_at(self, place: Place) -> Origin:
        """The origin that a place itself is."""
        if place not in self._origins:
            self._origins[place] = self._new_origin(place)
        return self._origins[place]

    def _new_origin(self, place: Place) -> Origin:
        if isinstance(place, Result):
            return self._border_origin(Kind.RESULT, place.number, place)
        owner = place.owner
        if isinstance(owner, ir.Block):
            return self._border_origin(Kind.ARGUMENT, place.arg_number, place)
        kind, name = OriginKind.COMPILER, tf_name(maker_of(place))
        source = self.sources.find(name, shape_of(place))
        if owner.name == EDGE:
            kind = OriginKind.REGION
        elif name.endswith(_ASKED):
            kind, name = OriginKind.ASKED, name.removesuffix(_ASKED)
            source = self.sources.find(name, shape_of(place))
        elif source is not None and source.annotation is not None:
            kind = OriginKind.ANNOTATION
        return Origin(
            kind=kind,
            name=name.removesuffix(f"/{PLACEHOLDER}"),
            **made_at(source),
            sharding=self._asked(place),
        )

    def _given(self, place: Place) -> Iterator[Arrival]:
        """How a tensor has the sharding of an annotation of it, before propagation."""
        if isinstance(place, (Result, ir.BlockArgument)):
            return
        asked = self.recorded.sharding(place)
        for use in () if place.owner.name == CONSTRAINT else place.uses:
            op = use.owner.operation
            if op.name == CONSTRAINT and self.recorded.sharding(op.results[0]) == asked:
                yield Arrival(-1, op, op.results[0], Direction.BACK)
                return

    def _border_origin(self, kind: Kind, number: int, place: Place) -> Origin:
        return Origin(
            kind=OriginKind(kind.value),
            name=self._paths[kind][number],
            layer="",
            file="",
            line=0,
            sharding=self._borders[kind][number],
            kept_from=self.kept_from(place),
            note=self._giver(kind, number),
        )

    def _giver(self, kind: Kind, number: int) -> str:
        is_asked = Spot(kind, number) in self.changes and number not in self.left
        return ASKED_FOR if is_asked else self.written.giver(kind, number)

    def _asked(self, place: ir.Value) -> Sharding:
        asked = self.recorded.sharding(place)
        if place.owner.name == EDGE:  # Inside the region manual axes are not seen.
            asked = self.recorded.at_region(place.owner.operands[0])
        return Sharding(self.mesh, asked.dims, asked.unspecified)
