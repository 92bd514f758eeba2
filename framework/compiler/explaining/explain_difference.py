"""What differs between two compiled programs, or between two that are only traced."""

from __future__ import annotations

from meshwright.framework.compiler.explaining.difference import (
    Difference,
    LaidOut,
    Sent,
    SentKey,
    Side,
)
from meshwright.framework.compiler.explaining.explain import (
    Explanation,
    TensorReport,
    explain,
)
from meshwright.framework.compiler.explaining.inserted import InsertedCollective
from meshwright.framework.compiler.explaining.what_if import compare
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.compiler.program import Program, TracedProgram
from meshwright.framework.devices.links import Links

_SEVERAL = "ops whose collectives XLA combined"


def explain_difference(
    a: Program | TracedProgram | Explanation,
    b: Program | TracedProgram | Explanation,
    *,
    topology: str | None = None,
) -> Difference:
    """Which tensors of two programs lie differently, what each sends, and by whom.

    Programs of two plans, partitioners or meshes; tensors and collectives are compared
    by name. Of compiled programs it is what XLA did, for which each is compiled once
    more; where one is only traced, what propagation says of both, in a second.

    Args:
      a, b: programs, or explanations of them, with reasons if the annotations behind a
        difference are to be told.
      topology: of the meshes' size, such as "v3:8x16", for estimated times of
        collectives.

    Raises:
      ValueError: an explanation and a program that is only traced; no such topology.
      LoweringError: see `explain`.
    """
    if isinstance(a, TracedProgram) or isinstance(b, TracedProgram):
        return _of_traced(a, b, topology)
    explained = [
        one if isinstance(one, Explanation) else explain(one, reasons=True)
        for one in (a, b)
    ]
    sides = [_side(one, topology) for one in explained]
    return Difference(before=sides[0], after=sides[1])


def _of_traced(a, b, topology: str | None) -> Difference:
    if isinstance(a, Explanation) or isinstance(b, Explanation):
        raise ValueError(
            "an explanation is of a compiled program: compile the other program too, "
            "or give both programs"
        )
    links = None if topology is None else Links(a.reasons.mesh, topology)
    names = [f"{one.reasons.name} over {one.reasons.mesh}" for one in (a, b)]
    return compare((names[0], a.reasons), (names[1], b.reasons), links)


def _side(explanation: Explanation, topology: str | None) -> Side:
    links = None if topology is None else Links(explanation.mesh, topology)
    sent: dict[SentKey, dict[str, InsertedCollective]] = {}
    places = [(t.op_name, one) for t in explanation.tensors for one in t.collectives]
    places += [("no tensor", one) for one in explanation.elsewhere]
    for number, (place, one) in enumerate(places):
        # One whose parts are not known is told once, of all of its ops.
        is_whole = one.own_bytes is None
        key = (_SEVERAL if is_whole else place, one.kind, one.axes)
        sent.setdefault(key, {})[one.name if is_whole else str(number)] = one
    by = explanation.partitioner
    return Side(
        name=f"{explanation.name} over {explanation.mesh}, completed by {by}",
        mesh=explanation.mesh,
        tensors={_key(tensor): _laid_out(tensor) for tensor in explanation.tensors},
        sent={key: _sum([*of.values()], links) for key, of in sent.items()},
    )


def _key(tensor: TensorReport) -> str:
    is_inside = tensor.kind is Kind.INSIDE
    return tensor.op_name if is_inside else f"{tensor.kind.value} {tensor.op_name}"


def _laid_out(tensor: TensorReport) -> LaidOut:
    return LaidOut(
        type=f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]",
        sharding=str(tensor.sharding),
        bytes_per_device=tensor.bytes_per_device,
        file=tensor.source.file if tensor.source else "",
        line=tensor.source.line if tensor.source else 0,
        origins=tuple(dict.fromkeys(one.origin for one in tensor.provenances)),
    )


def _sum(of: list[InsertedCollective], links: Links | None) -> Sent:
    seconds = 0.0 if links and all(one.axes for one in of) else None
    total, origins = 0, {}
    for one in of:
        # XLA combines small collectives; each op has its part of such a one.
        share = one.at_most
        times = one.times or 1
        total += share * times
        if seconds is not None:
            seconds += links.seconds(one.kind, one.axes, share) * times
        for transfer in one.between:
            origins |= dict.fromkeys(transfer.before_origins + transfer.after_origins)
    return Sent(bytes=total, seconds=seconds, origins=tuple(origins))
