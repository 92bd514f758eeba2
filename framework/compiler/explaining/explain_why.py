"""Reasons in a completion report: where each axis comes from, and each collective."""

from __future__ import annotations

import dataclasses
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
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.compiler.stablehlo.shardy.recorded import Place
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

if TYPE_CHECKING:
    from meshwright.framework.compiler.explaining.explain import TensorReport
    from meshwright.framework.compiler.explaining.inserted import InsertedCollective

# JAX's name of what the program does with an argument before it is read.
_OF_ARGUMENT = re.compile(r"flat\[(?P<number>\d+)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """Of how many of the axes that split tensors the reason is known."""

    axes: int
    with_reason: int


def with_reasons(
    reports: Sequence[TensorReport],
    elsewhere: Sequence[InsertedCollective],
    reasons: Reasons,
) -> tuple[tuple[TensorReport, ...], tuple[InsertedCollective, ...]]:
    """Reports with the provenance of axes, and with what collectives bring together.

    Where XLA completed a tensor otherwise than Shardy does in this process, axes that
    only XLA's has are left without. Of a collective at no tensor, what is alike and at
    no tensor either is told.

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
                _with_reasons(report, reasons, sent),
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
    report: TensorReport, reasons: Reasons, sent: dict[str, list[Transfer]]
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
            _between(collective, name, sent.get(name, ()), reasons.mesh)
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
        t for t in left if collective.kind in t.kinds and (t.axes, t.times) == how
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


def _between(
    collective: InsertedCollective,
    name: str,
    sent: Sequence[Transfer],
    mesh: DeviceMesh,
) -> InsertedCollective:
    """A collective with the transfers along its axes, of its kind if there are such.

    Those to the op of a name come before those of what it makes.
    """
    axes = mesh.entire(collective.axes or ())
    along = [t for t in sent if axes & mesh.entire(t.axes)]
    here = [t for t in along if t.at == name]
    by_kind = [[t for t in of if collective.kind in t.kinds] for of in (here, along)]
    return dataclasses.replace(
        collective, between=tuple(by_kind[0] or by_kind[1] or here or along)
    )


def known(reports: Sequence[TensorReport]) -> Known:
    """Of how many axes the reason is known."""
    shardings = [r.sharding for r in reports if isinstance(r.sharding, Sharding)]
    return Known(
        axes=sum(len(axes) for sharding in shardings for axes in sharding.dims),
        with_reason=sum(len(report.provenances) for report in reports),
    )
