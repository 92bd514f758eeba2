"""Reasons in a completion report: where each axis comes from, and each collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.framework.compiler.explaining.provenance import (
    Provenance,
    TensorLayout,
    Transfer,
)
from meshwright.framework.compiler.explaining.reasons import Reasons
from meshwright.framework.compiler.explaining.transfers import transfers
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

if TYPE_CHECKING:
    from meshwright.framework.compiler.explaining.explain import (
        InsertedCollective,
        TensorReport,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """Of how many of the axes that split tensors the reason is known."""

    axes: int
    with_reason: int


def with_reasons(
    reports: Sequence[TensorReport], reasons: Reasons
) -> tuple[TensorReport, ...]:
    """The reports, with the provenance of axes and what collectives bring together.

    Where XLA completed a tensor otherwise than Shardy does in this process, axes that
    only XLA's has are left without.
    """
    layouts = {(one.kind, one.name): one for one in reasons.tensors}
    sent: dict[str, list[Transfer]] = {}
    for one in transfers(reasons):
        sent.setdefault(one.at, []).append(one)
    with reasons.opened():
        return tuple(
            _with_reasons(report, reasons, layouts, sent) for report in reports
        )


def _with_reasons(
    report: TensorReport,
    reasons: Reasons,
    layouts: dict[tuple[Kind, str], TensorLayout],
    sent: dict[str, list[Transfer]],
) -> TensorReport:
    layout = layouts.get((report.kind, report.op_name))
    if layout is None:
        return report
    place = reasons.place(layout)
    here = sent.get(reasons.name_of(place), ())
    return dataclasses.replace(
        report,
        provenances=_provenances(report.sharding, reasons.provenances(place)),
        collectives=tuple(
            _between(collective, here, reasons.mesh)
            for collective in report.collectives
        ),
    )


def _provenances(
    sharding: Sharding | str, found: Sequence[Provenance]
) -> tuple[Provenance, ...]:
    """Those of the axes that a sharding has too."""
    if isinstance(sharding, str):
        return ()
    return tuple(
        one
        for one in found
        if one.dim < sharding.rank and one.axis in sharding.dims[one.dim]
    )


def _between(
    collective: InsertedCollective, here: Sequence[Transfer], mesh: DeviceMesh
) -> InsertedCollective:
    """A collective with the transfers along its axes, of its kind if there are such."""
    axes = mesh.entire(collective.axes or ())
    along = [one for one in here if axes & mesh.entire(one.axes)]
    alike = [one for one in along if collective.kind in one.kinds]
    return dataclasses.replace(collective, between=tuple(alike or along))


def elsewhere_with_reasons(
    collectives: Sequence[InsertedCollective],
    reports: Sequence[TensorReport],
    reasons: Reasons,
) -> tuple[InsertedCollective, ...]:
    """Collectives at no tensor, with the transfers of such that are alike."""
    names = {report.op_name for report in reports}
    left = [one for one in transfers(reasons) if one.at not in names]

    def alike(collective: InsertedCollective) -> tuple[Transfer, ...]:
        how = collective.kind, collective.axes, collective.times
        return tuple(
            one
            for one in left
            for kind in one.kinds
            if (kind, one.axes, one.times) == how
        )

    return tuple(dataclasses.replace(one, between=alike(one)) for one in collectives)


def known(reports: Sequence[TensorReport]) -> Known:
    """Of how many axes the reason is known."""
    shardings = [r.sharding for r in reports if isinstance(r.sharding, Sharding)]
    return Known(
        axes=sum(len(axes) for sharding in shardings for axes in sharding.dims),
        with_reason=sum(len(report.provenances) for report in reports),
    )
