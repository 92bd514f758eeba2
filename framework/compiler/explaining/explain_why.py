"""Reasons in a completion report: where each axis comes from, and each collective."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.framework.compiler.explaining.competitions import competitions
from meshwright.framework.compiler.explaining.provenance import (
    Competition,
    Provenance,
    TensorLayout,
    Transfer,
)
from meshwright.framework.compiler.explaining.reasons import Reasons
from meshwright.framework.compiler.explaining.transfers import transfers
from meshwright.framework.compiler.hlo.report import PERMUTE
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.compiler.stablehlo.shardy.recorded import Place
from meshwright.framework.sharding.sharding import Sharding

if TYPE_CHECKING:
    from meshwright.framework.compiler.explaining.explain import (
        RematerializedTensor,
        TensorReport,
    )
    from meshwright.framework.compiler.explaining.inserted import InsertedCollective

# JAX's name of what the program does with an argument before it is read.
_OF_ARGUMENT = re.compile(r"flat\[(?P<number>\d+)\]")
# The kinds by which a sum may be added up, the last in a loop of products.
_SUMS = ("all-reduce", "reduce-scatter", PERMUTE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """Of how many of the axes that split tensors the reason is known."""

    axes: int
    with_reason: int


def with_reasons(
    reports: Sequence[TensorReport],
    elsewhere: Sequence[InsertedCollective],
    reasons: Reasons,
    gathered: Sequence[RematerializedTensor] = (),
) -> tuple[tuple[TensorReport, ...], tuple[InsertedCollective, ...]]:
    """Reports with the provenance of axes, and with what collectives bring together.

    Where XLA completed a tensor otherwise than Shardy does in this process, axes that
    only XLA's has are left without. Of a collective at no tensor, what is alike and at
    no tensor either is told. Collectives that propagation does not explain are left
    without: some of them gather a tensor in full, of `gathered`.

    Returns:
      The reports, and the collectives that are `elsewhere`.
    """
    every = transfers(reasons)
    sent: dict[str, list[Transfer]] = {}
    for transfer in every:
        # XLA's is at the op that needs a tensor, or at the one that makes it.
        for name in dict.fromkeys((transfer.at, transfer.tensor)):
            sent.setdefault(name, []).append(transfer)
    tensors = {(tensor.kind, tensor.name): tensor for tensor in reasons.tensors}
    with reasons.opened():
        explained = tuple(
            dataclasses.replace(
                _with_reasons(report, reasons, sent, gathered),
                competitions=_lost(report, tensor, reasons),
                propagated=_otherwise(report, tensor),
            )
            for report in reports
            for tensor in [tensors.get((report.kind, report.op_name))]
        )
    names = {report.op_name for report in reports}
    left = [t for t in every if t.at not in names]
    return explained, tuple(_alike(collective, left) for collective in elsewhere)


def _with_reasons(
    report: TensorReport,
    reasons: Reasons,
    sent: dict[str, list[Transfer]],
    gathered: Sequence[RematerializedTensor],
) -> TensorReport:
    if match := _OF_ARGUMENT.fullmatch(report.op_name):
        places = [reasons.argument_place(int(match["number"]))]
        name = reasons.name_of(places[0])
    elif report.kind is Kind.INSIDE:
        name, places = report.op_name, reasons.places(report.op_name, report.shape)
    else:
        places = [reasons.border_place(report.kind, report.op_name)]
        name = reasons.name_of(places[0])
    return dataclasses.replace(
        report,
        provenances=_provenances(report.sharding, places, reasons),
        collectives=tuple(
            _caused(collective, name, sent.get(name, ()), gathered)
            for collective in report.collectives
        ),
    )


def _otherwise(report: TensorReport, tensor: TensorLayout | None) -> Sharding | None:
    """The tensor's sharding by propagation if other axes split it than XLA's report."""
    if tensor is None or isinstance(report.sharding, str):
        return None
    if tensor.shape != report.shape:  # Another of the op's tensors.
        return None
    both = report.sharding, tensor.sharding
    ours, theirs = ([s.mesh.entire(axes) for axes in s.dims] for s in both)
    return tensor.sharding if ours != theirs else None


def _lost(
    report: TensorReport, tensor: TensorLayout | None, reasons: Reasons
) -> tuple[Competition, ...]:
    """The axes that a tensor did not get, but for those that XLA gave it after all."""
    if tensor is None or isinstance(report.sharding, str):
        return ()
    dims = report.sharding.dims
    return tuple(
        lost
        for lost in competitions(reasons, reasons.place(tensor))
        if lost.dim < len(dims) and lost.axis not in dims[lost.dim]
    )


def _alike(
    collective: InsertedCollective, left: Sequence[Transfer]
) -> InsertedCollective:
    """A collective at no tensor, with the transfers that are as it is."""
    how = collective.axes, collective.times
    between = [
        t
        for t in left
        if collective.kind in t.kinds
        and (t.axes, t.times) == how
        and _fits(collective, t)
    ]
    return dataclasses.replace(collective, between=tuple(between))


def _provenances(
    sharding: Sharding | str, places: Sequence[Place], reasons: Reasons
) -> tuple[Provenance, ...]:
    """Of the axes of a sharding that one of the places has too."""
    if isinstance(sharding, str):
        return ()
    found: dict[tuple[int, str], Provenance] = {}
    for place in places:
        lies = reasons.sharding(place)
        for dim, axes in enumerate(sharding.dims):
            for axis in axes:
                if (dim, axis) not in found and _has(lies, dim, axis):
                    found[dim, axis] = reasons.provenance(place, axis, dim)
    return tuple(found[key] for key in sorted(found))


def _has(lies: Sharding, dim: int, axis: str) -> bool:
    return dim < lies.rank and axis in lies.dims[dim]


def _caused(
    collective: InsertedCollective,
    name: str,
    sent: Sequence[Transfer],
    gathered: Sequence[RematerializedTensor],
) -> InsertedCollective:
    """A collective with its causes, at the op of a name.

    Where a transfer of one tensor and a gather in full of another have the same size,
    nothing says which of them it is, and it is left without both.
    """
    between = _between(collective, name, sent)
    in_full = [one for one in gathered if _may_gather(collective, name, one)]
    if not in_full:
        return dataclasses.replace(collective, between=between)
    (one, *others) = in_full
    if others or any(t.tensor != one.tensor_name for t in between):
        return collective
    return dataclasses.replace(collective, between=between, gathers=one)


def _between(
    collective: InsertedCollective, name: str, sent: Sequence[Transfer]
) -> tuple[Transfer, ...]:
    """The transfers along a collective's axes that it may do, of its kind if possible.

    Those to the op of a name come before those of what it makes.
    """
    along = [t for t in sent if _fits(collective, t)]
    here = [t for t in along if t.at == name]
    by_kind = [[t for t in of if collective.kind in t.kinds] for of in (here, along)]
    return tuple(by_kind[0] or by_kind[1] or here or along)


def _fits(collective: InsertedCollective, transfer: Transfer) -> bool:
    """Whether a collective's axes and results are such as a transfer needs.

    A transfer by one collective of this kind has a result of exactly its size. XLA may
    do others in several collectives or by other kinds: those make at least a shard of
    the tensor, or parts of it for neighbours, and never more than all of it.
    """
    mesh = transfer.after.mesh
    if not mesh.entire(collective.axes or ()) & mesh.entire(transfer.axes):
        return False
    shards = [s.shard_shape(transfer.shape) for s in (transfer.before, transfer.after)]
    before, after = map(math.prod, shards)
    sizes = _sizes(collective)
    if transfer.before.unreduced and collective.kind not in _SUMS:
        return False
    is_same = set(collective.axes or ()) == set(transfer.axes)
    if transfer.kinds == (collective.kind,) and is_same:
        return after in sizes
    splits = math.prod(transfer.before.splits())
    least = 0 if collective.kind == PERMUTE else min(before, after)
    return any(least <= size <= before * splits for size in sizes)


def _may_gather(
    collective: InsertedCollective, name: str, tensor: RematerializedTensor
) -> bool:
    """Whether a collective at the op of a name may be what gathers a tensor in full."""
    return (
        collective.kind == "all-gather"
        and name in (tensor.tensor_name, tensor.at_name)
        and math.prod(tensor.shape) in _sizes(collective)
    )


def _sizes(collective: InsertedCollective) -> set[int]:
    """The numbers of elements that one tensor may have of a collective's results.

    XLA combines several tensors, and splits what it exchanges by the devices.
    """
    sizes = [math.prod(shape) for shape in collective.shapes]
    return {*sizes, sum(sizes)}


def known(reports: Sequence[TensorReport]) -> Known:
    """Of how many axes the reason is known."""
    shardings = [r.sharding for r in reports if isinstance(r.sharding, Sharding)]
    return Known(
        axes=sum(len(axes) for sharding in shardings for axes in sharding.dims),
        with_reason=sum(len(report.provenances) for report in reports),
    )
