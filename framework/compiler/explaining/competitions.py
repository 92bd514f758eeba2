"""The axes that a tensor did not get, though a tensor beside it has them."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.mlir import ir

from meshwright.framework.compiler.explaining.provenance import (
    Competition,
    Decided,
    Provenance,
)
from meshwright.framework.compiler.explaining.reasons import Reasons
from meshwright.framework.compiler.stablehlo.shardy.meetings import meetings
from meshwright.framework.compiler.stablehlo.shardy.op_rules import Factors
from meshwright.framework.compiler.stablehlo.shardy.recorded import CONSTRAINT, Place


def competitions(reasons: Reasons, place: Place) -> tuple[Competition, ...]:
    """The axes that split a tensor beside `place` by its ops, and not `place`.

    Dims that an op's rule relates are compared: the rows of a product with those of its
    first operand. A dim that a reshape merges with another is related to none. To be
    called within `reasons.opened()`.
    """
    found: dict[tuple, Competition] = {}
    for at, tensors in meetings(reasons.recorded, place):
        own = next(factors for other, factors in tensors if other == place)
        for beside, factors in tensors:
            if beside == place:
                continue
            for one in _between(reasons, place, own, beside, factors, at):
                found.setdefault((one.axis, one.dim, one.loser.origin), one)
    return tuple(found.values())


def _between(
    reasons: Reasons,
    place: Place,
    own: Factors,
    beside: Place,
    factors: Factors,
    at: str,
) -> Iterator[Competition]:
    here, there = reasons.sharding(place), reasons.sharding(beside)
    for dim, factor in enumerate(own):
        if factor is None or factor not in factors:
            continue
        for axis in there.dims[(other := factors.index(factor))]:
            if axis in here.dims[dim]:
                continue
            loser = reasons.provenance(beside, axis, other)
            winner = _winner(reasons, place, axis, dim)
            yield Competition(
                axis=axis,
                dim=dim,
                at=at,
                neighbor=reasons.name_of(beside),
                loser=loser,
                winner=winner,
                decided=_decided(reasons, place, axis, dim, winner, loser, at),
            )


def _winner(reasons: Reasons, place: Place, axis: str, dim: int) -> Provenance | None:
    """What splits the tensor by this axis along another dim, or this dim by another."""
    dims = reasons.sharding(place).dims
    for number, axes in enumerate(dims):
        if axis in axes:
            return reasons.provenance(place, axis, number)
    return reasons.provenance(place, dims[dim][0], dim) if dims[dim] else None


def _decided(
    reasons: Reasons,
    place: Place,
    axis: str,
    dim: int,
    winner: Provenance | None,
    loser: Provenance,
    at: str,
) -> Decided:
    is_constraint = isinstance(place, ir.Value) and (
        not isinstance(place.owner, ir.Block) and place.owner.name == CONSTRAINT
    )
    if not is_constraint and reasons.was_left(place):
        return _by_size(reasons, place, axis, dim) or Decided.EARLIER
    if is_constraint or reasons.border(place) is not None:
        return Decided.KEPT if reasons.kept_from(place) else Decided.ANNOTATED
    if winner is not None:
        # What came by another op was there before this op could pass the loser on.
        by_this = winner.way and winner.way[-1].op_name == at
        earlier = not by_this or winner.step < loser.step
        return Decided.EARLIER if earlier else Decided.AT_OP
    if reasons.is_fixed(place, dim):
        return Decided.ANNOTATED
    return _by_size(reasons, place, axis, dim) or Decided.AT_OP


def _by_size(reasons: Reasons, place: Place, axis: str, dim: int) -> Decided | None:
    size, split = reasons.shape(place)[dim], reasons.sharding(place).splits()[dim]
    uneven = size % (split * reasons.mesh.axis_size(axis))
    return Decided.UNEVEN if uneven else None
