"""Which tensors meet at an op, and which of their dims it relates."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.shardy.op_rules import Factors, rule_of
from meshwright.framework.compiler.stablehlo.shardy.recorded import (
    CONSTRAINT,
    EDGE,
    REGION,
    Place,
    Recorded,
    Result,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    end_of,
    shape_of,
    tf_name,
)

_BARRIER = "stablehlo.optimization_barrier"
_RETURNS = ("stablehlo.return", "sdy.return")
Meeting = tuple[str, list[tuple[Place, Factors]]]
"""The name of a TF op, and its tensors with the factors of their dims."""


def meetings(recorded: Recorded, place: Place) -> Iterator[Meeting]:
    """The ops that make or read a tensor, with all of their tensors."""
    if isinstance(place, Result):
        yield _alike("return", [place, recorded.place(recorded.returned[place.number])])
        return
    owner = place.owner
    values = [place]
    if not isinstance(owner, ir.Block):
        if owner.name == EDGE:
            yield _flowing(recorded, owner.operands[0])
            values += _inside(owner.operands[0])
        elif owner.name == CONSTRAINT:
            source = recorded.place(owner.operands[0])
            yield _alike(tf_name(owner), [place, source])
        else:
            yield _by_rule(recorded, owner)
    for value in values:
        for use in value.uses:
            meeting = reading(recorded, use.owner.operation, use.operand_number)
            # A value within a loop stands for what the loop carries.
            if meeting is not None and any(other == place for other, _ in meeting[1]):
                yield meeting


def reading(recorded: Recorded, op, number: int) -> Meeting | None:
    """The tensors that meet where an op reads its operand of a number.

    None: the op relates the operand to no other tensor.
    """
    place = recorded.place(op.operands[number])
    if op == end_of(recorded.main.regions[0].blocks[0]):
        return _alike("return", [place, Result(number)])
    if op.name in (CONSTRAINT, _BARRIER):
        return _alike(tf_name(op), [place, recorded.place(op.results[number])])
    if op.name == REGION:
        return _flowing(recorded, op.regions[0].blocks[0].arguments[number])
    holder = op.parent if op.name in _RETURNS else op
    if holder != op or op.name == WHILE:
        # The condition of a loop and a reduction return what nothing carries.
        is_carried = number < len(holder.results)
        return _flowing(recorded, holder.results[number]) if is_carried else None
    return _by_rule(recorded, op)


def _flowing(recorded: Recorded, value: ir.Value) -> Meeting | None:
    """What flows to a value of a loop, a branch or a manual region."""
    edge = recorded.place(value)
    if isinstance(edge.owner, ir.Block) or edge.owner.name != EDGE:
        return None
    holder, sources = recorded.sources(edge.owner.operands[0])
    return _alike(tf_name(holder), [edge, *sources])


def _inside(value: ir.Value) -> list[ir.Value]:
    """The values within a loop that stand for what is carried by it."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return []
    number = value.result_number
    blocks = [region.blocks[0] for region in owner.regions]
    return [b.arguments[number] for b in blocks if number < len(b.arguments)]


def _by_rule(recorded: Recorded, op) -> Meeting:
    rule = rule_of(op)
    places = [*map(recorded.place, op.operands), *map(recorded.place, op.results)]
    factors = [*rule.operands, *rule.results]
    return tf_name(op), list(zip(places, factors, strict=True))


def _alike(name: str, places: list[Place]) -> Meeting:
    """Of an op that passes tensors on as they are."""
    value = next(place for place in places if isinstance(place, ir.Value))
    factors = tuple(range(len(shape_of(value))))
    return name, [(place, factors) for place in places]
