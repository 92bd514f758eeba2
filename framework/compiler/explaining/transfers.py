"""What a program has to send, by propagation alone: shardings that do not agree.

Shardy writes a reshard wherever an op needs an operand otherwise than it lies, and says
by which collectives each is done. XLA's partitioner comes to its own decisions; these
tell why, and are there without compiling.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.explaining.provenance import Origin, Transfer
from meshwright.framework.compiler.explaining.reasons import Reasons
from meshwright.framework.compiler.hlo.hlo_text import itemsize
from meshwright.framework.compiler.stablehlo.shardy.meetings import meetings, reading
from meshwright.framework.compiler.stablehlo.shardy.op_rules import FactorKind, rule_of
from meshwright.framework.compiler.stablehlo.shardy.propagation import (
    attribute_of,
    manual_axes,
)
from meshwright.framework.compiler.stablehlo.shardy.recorded import (
    CONSTRAINT,
    Place,
    Result,
    finishing_passes,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    NUMBER,
    WHILE,
    dtype_of,
    shape_of,
    tf_name,
    walk,
)
from meshwright.framework.devices.links import Links
from meshwright.framework.sharding.sharding import Sharding

_RESHARD, _SUM = "sdy.reshard", "sdy.all_reduce"
_TO_COLLECTIVES = "builtin.module(func.func(sdy-reshard-to-collectives))"
_KINDS = {
    "sdy.all_gather": "all-gather",
    "sdy.all_to_all": "all-to-all",
    "sdy.collective_permute": "collective-permute",
    "sdy.reduce_scatter": "reduce-scatter",
    _SUM: "all-reduce",
}
_PLACE = "place"
"""The attribute by which an op of the finished module is one of the recorded."""
_MARK = re.compile(r'"reshard (\d+)"')
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')


def transfers(reasons: Reasons, links: Links | None = None) -> tuple[Transfer, ...]:
    """The tensors that have to be sent, in the order of the program.

    Args:
      reasons: of the program.
      links: of the topology on which collectives are timed; None: they are not.
    """
    with reasons.opened():
        return tuple(_Finished(reasons, links).transfers())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sent:
    """A collective: its kind, its axes, and the bytes of its result on one device."""

    kind: str
    axes: tuple[str, ...]
    bytes: int


class _Finished:
    """The module with reshards and sums, beside the recorded one that it is made of."""

    def __init__(self, reasons: Reasons, links: Links | None):
        self.reasons, self.links, self.mesh = reasons, links, reasons.mesh
        self.recorded = reasons.recorded
        self.ops = dict(enumerate(walk(self.recorded.main)))
        integer = ir.IntegerType.get_signless(32)
        for place, op in self.ops.items():
            op.attributes[_PLACE] = ir.IntegerAttr.get(integer, place)
        self.module = self.recorded.module.clone()
        passes = PassManager.parse(finishing_passes())
        passes.enable_verifier(False)  # Until the records are taken away.
        passes.run(self.module)

    def transfers(self) -> Iterator[Transfer]:
        found: list[Transfer] = []
        for op in list(walk(self.module)):
            if op.name == _SUM:
                found.append(self._sum(op))
            elif op.name == _RESHARD:
                found.append(self._reshard(op, len(found)))
        sent = self._sent()
        for number, transfer in enumerate(found):
            collectives = sent.get(number, [])
            if transfer.kinds or collectives:
                yield self._timed(transfer, collectives)

    def _timed(self, transfer: Transfer, sent: Sequence[_Sent]) -> Transfer:
        if not transfer.kinds:
            used = dict.fromkeys(axis for one in sent for axis in one.axes)
            transfer = dataclasses.replace(
                transfer,
                kinds=tuple(one.kind for one in sent),
                axes=tuple(used) or _differing(transfer.before, transfer.after),
                bytes=sum(one.bytes for one in sent),
            )
        else:
            kind, axes = transfer.kinds[0], transfer.axes
            sent = [_Sent(kind=kind, axes=axes, bytes=transfer.bytes)]
        if self.links is None:
            return transfer
        once = sum(
            self.links.seconds(one.kind, one.axes or transfer.axes, one.bytes)
            for one in sent
        )
        return dataclasses.replace(transfer, seconds=once * transfer.times)

    def _sent(self) -> dict[int, list[_Sent]]:
        """By number of the reshard its collectives."""
        PassManager.parse(_TO_COLLECTIVES).run(self.module)
        sent: dict[int, list[_Sent]] = {}
        for op in walk(self.module):
            if op.name in _KINDS and (mark := _MARK.search(str(op.location))):
                name = next((n for n in _AXES_IN if n in op.attributes), None)
                axes = _axes(op.attributes[name]) if name else ()
                one = _Sent(
                    kind=_KINDS[op.name], axes=axes, bytes=self._bytes(op.results[0])
                )
                sent.setdefault(int(mark[1]), []).append(one)
        return sent

    def _sum(self, op) -> Transfer:
        """Of a sum of which each device has a part."""
        value = op.operands[0]
        axes = _axes(op.attributes["reduction_axes"])
        lies = self._sharding(value)
        maker = self._recorded(value.owner)
        # A sharding can name full axes as unreduced, no parts of them.
        full = tuple(axis for axis in axes if self.mesh.part(axis).axis == axis)
        return Transfer(
            at=tf_name(value.owner),
            tensor=tf_name(value.owner),
            before=dataclasses.replace(lies, unreduced=full),
            after=self._sharding(op.results[0]),
            shape=shape_of(value),
            kinds=(_KINDS[op.name],),
            axes=axes,
            bytes=self._bytes(op.results[0]),
            times=self._times(op),
            seconds=None,
            before_origins=self._summed(maker, axes) if maker else (),
            after_origins=(),
        )

    def _summed(self, op, axes: Sequence[str]) -> tuple[Origin, ...]:
        """What splits the dims that an op sums over."""
        rule = rule_of(op)
        places = [*map(self.recorded.place, op.operands)]
        return _distinct(
            self.reasons.provenance(place, axis, dim).origin
            for place, factors in zip(places, rule.operands, strict=True)
            for dim, factor in enumerate(factors)
            if factor is not None and rule.kinds[factor] is FactorKind.REDUCED
            for axis in self.reasons.sharding(place).dims[dim]
            if axis in axes
        )

    def _reshard(self, op, number: int) -> Transfer:
        """Of a reshard, which is replaced by one with a mark of its number."""
        value, is_annotation = op.operands[0], _PLACE in op.attributes
        before, after = self._sharding(value), self._sharding(op.results[0])
        use = next(iter(op.results[0].uses), None)
        transfer = Transfer(
            at=tf_name(op) if is_annotation or use is None else self._reader(use),
            tensor=self._name(value),
            before=before,
            after=after,
            shape=shape_of(value),
            kinds=(),
            axes=(),
            bytes=0,
            times=self._times(op),
            seconds=None,
            before_origins=self._behind(value, before, after),
            after_origins=(
                self._annotation(op, before, after)
                if is_annotation
                else self._wanted(use, before, after)
            ),
        )
        with ir.InsertionPoint(op), ir.Location.name(f"reshard {number}"):
            marked = sdy.ReshardOp(value, op.attributes["sharding"])
        op.results[0].replace_all_uses_with(marked.result)
        op.erase()
        return transfer

    def _behind(self, value, before: Sharding, after: Sharding) -> tuple[Origin, ...]:
        """The origins of the axes that a value has, and is not to have."""
        place = self._place(value)
        if place is None:
            return ()
        return _distinct(
            origin
            for dim, axis in _only_in(before, after)
            for origin in self._having(place, dim, axis)
        )

    def _having(self, place: Place, dim: int, axis: str) -> Iterator[Origin]:
        """Where an axis of a place comes from, or of the tensors that it is made of.

        Shardy sends a tensor only after ops that do not care, such as a maximum.
        """
        if axis in self.reasons.sharding(place).dims[dim]:
            yield self.reasons.provenance(place, axis, dim).origin
            return
        for _, tensors in meetings(self.recorded, place):
            factors = next(f for other, f in tensors if other == place)
            for other, others in tensors:
                if factors[dim] is None or factors[dim] not in others:
                    continue
                at = others.index(factors[dim])
                if axis in self.reasons.sharding(other).dims[at]:
                    yield self.reasons.provenance(other, axis, at).origin

    def _annotation(self, op, before: Sharding, after: Sharding) -> tuple[Origin, ...]:
        """The origins of axes that come at an annotation, and itself if any go."""
        place = self._recorded(op).results[0]
        coming = [
            self.reasons.provenance(place, axis, dim).origin
            for dim, axis in _only_in(after, before)
            if axis in self.reasons.sharding(place).dims[dim]
        ]
        going = [dim for dim, _ in _only_in(before, after)]
        if any(self.reasons.is_fixed(place, dim) for dim in going):
            coming.append(self.reasons.origin_at(place))
        return _distinct(coming)

    def _wanted(self, use, before: Sharding, after: Sharding) -> tuple[Origin, ...]:
        """The origins of the axes that a reader wants, from its other tensors."""
        reader = use and self._recorded(use.owner.operation)
        if reader is None:
            return ()
        if reader.name == CONSTRAINT:  # What it annotates is sent before it.
            return self._annotation(use.owner.operation, before, after)
        meeting = reading(self.recorded, reader, use.operand_number)
        if meeting is None:
            return ()
        own = self.recorded.place(reader.operands[use.operand_number])
        factors = next(f for place, f in meeting[1] if place == own)
        return _distinct(
            self.reasons.provenance(place, axis, others.index(factors[dim])).origin
            for dim, axis in _only_in(after, before)
            for place, others in reversed(meeting[1])
            if factors[dim] is not None and factors[dim] in others
            if axis in self.reasons.sharding(place).dims[others.index(factors[dim])]
        )

    def _reader(self, use) -> str:
        """The name of the op that reads a value; at a region's end its holder's."""
        reader = use.owner.operation
        if reader.name.split(".")[-1] != "return":
            return tf_name(reader)
        if reader.parent.name == "func.func":
            return self.reasons.name_of(Result(use.operand_number))
        return tf_name(reader.parent)

    # Of the finished module.

    def _sharding(self, value: ir.Value) -> Sharding:
        attribute = attribute_of(value)
        owner = value.owner
        if not isinstance(owner, ir.Block) and "out_sharding" in owner.attributes:
            attribute = owner.attributes["out_sharding"]
        holder = owner.owner if isinstance(owner, ir.Block) else owner.parent
        manual = manual_axes(holder.operation)
        if attribute is None:
            return Sharding(self.mesh, ((),) * len(shape_of(value)), manual=manual)
        dims = Sharding.from_sdy(self.mesh, str(attribute)).dims
        left = (tuple(a for a in axes if a not in manual) for axes in dims)
        return Sharding(self.mesh, tuple(left), manual=manual)

    def _bytes(self, value: ir.Value) -> int:
        shard = self._sharding(value).shard_shape(shape_of(value))
        return math.prod(shard) * itemsize(dtype_of(value))

    def _times(self, op) -> int:
        """How often it runs: the trips of the loops around it."""
        count, holder = 1, op.parent
        while holder is not None:
            holder = holder.operation
            if holder.name == WHILE:
                number = ir.IntegerAttr(holder.attributes[NUMBER]).value
                count *= self.reasons.trips[number]
            holder = holder.parent
        return count

    def _recorded(self, op) -> ir.Operation | None:
        """The recorded op that an op is; None for those that are new."""
        if _PLACE not in op.attributes:
            return None
        return self.ops[ir.IntegerAttr(op.attributes[_PLACE]).value]

    def _place(self, value: ir.Value) -> Place | None:
        """The recorded place of a value; None for those that are new."""
        owner = value.owner
        if not isinstance(owner, ir.Block):
            recorded = self._recorded(owner)
            if recorded is None:  # A reshard before this one, or a sum.
                return self._place(owner.operands[0]) if len(owner.operands) else None
            return self.recorded.place(recorded.results[value.result_number])
        holder = owner.owner.operation
        if holder.name == "func.func":
            block = self.recorded.main.regions[0].blocks[0]
            return block.arguments[value.arg_number]
        recorded = self._recorded(holder)
        if recorded is None:
            return None
        region = next(i for i, r in enumerate(holder.regions) if r.blocks[0] == owner)
        block = recorded.regions[region].blocks[0]
        return self.recorded.place(block.arguments[value.arg_number])

    def _name(self, value: ir.Value) -> str:
        place = self._place(value)
        return self.reasons.name_of(place) if place is not None else "?"


_AXES_IN = ("gathering_axes", "reduction_axes", "params", "reduce_scatter_axes")


def _axes(attribute: ir.Attribute) -> tuple[str, ...]:
    found = (name + part for name, part in _AXIS.findall(str(attribute)))
    return tuple(dict.fromkeys(found))


def _only_in(one: Sharding, other: Sharding) -> Iterator[tuple[int, str]]:
    """The dims and axes that one sharding has, and another has not."""
    for dim, axes in enumerate(one.dims):
        for axis in axes:
            if axis not in other.dims[dim]:
                yield dim, axis


def _differing(before: Sharding, after: Sharding) -> tuple[str, ...]:
    found = [*_only_in(before, after), *_only_in(after, before)]
    return tuple(dict.fromkeys(axis for _, axis in found))


def _distinct(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    return tuple(dict.fromkeys(origins))
