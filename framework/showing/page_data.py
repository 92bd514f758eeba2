"""What a page of a program shows, as plain values that JSON has.

Tensors, collectives and reasons are those of `explain`, or of propagation alone. What
many tensors share, such as an origin, is kept once and named by its number.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.framework.compiler.explaining.competitions import competitions
from meshwright.framework.compiler.explaining.explain import Explanation, TensorReport
from meshwright.framework.compiler.explaining.inserted import InsertedCollective
from meshwright.framework.compiler.explaining.provenance import (
    Competition,
    Hop,
    Origin,
    Provenance,
    TensorLayout,
    Transfer,
)
from meshwright.framework.compiler.explaining.reasons import Reasons
from meshwright.framework.compiler.explaining.texts.explain_text import (
    cause_lines,
    tensor_name,
)
from meshwright.framework.compiler.explaining.texts.folds import (
    RANDOM_BITS,
    folded_bits,
    grouped,
)
from meshwright.framework.compiler.explaining.transfers import transfers
from meshwright.framework.compiler.explaining.why import GSPMD_NOTE
from meshwright.framework.compiler.hlo.hlo_text import itemsize
from meshwright.framework.compiler.lowering.sources import Kind, Source, place_text
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sizes import counted

_AROUND = 3
"""Lines of code that are shown before and after a tensor's."""
_TRACED = "what propagation says, before XLA compiles"
_SENT_NOTE = (
    "What is sent is what propagation asks for, in all steps of a call: XLA combines, "
    "shares and leaves out some of it. A plan counts what is left, for one step."
)


class Lines:
    """The lines of code that pages show, by file."""

    def __init__(self):
        self._files: dict[str, dict[int, str]] = {}
        self._paths: dict[str, str] = {}
        self._places: dict[tuple[str, int], str] = {}

    def place(self, file: str, line: int) -> str:
        """`folder/file.py:12`, whose lines are kept; "" if unknown.

        Of a second file whose folder and name are the same it is the whole path.
        """
        if not file:
            return ""
        if (file, line) not in self._places:  # A tensor's way has dozens.
            self._places[file, line] = self._keep(file, line)
        return self._places[file, line]

    def _keep(self, file: str, line: int) -> str:
        place = place_text(file, line)
        name = place.rpartition(":")[0]
        if self._paths.setdefault(name, file) != file:
            name, place = file, f"{file}:{line}"
        kept = self._files.setdefault(name, {})
        # Of a notebook's cell linecache has the text, as no file has it.
        for number in range(max(1, line - _AROUND), line + _AROUND + 1):
            if number not in kept and (text := linecache.getline(file, number)):
                kept[number] = text.rstrip()
        return place

    def values(self) -> dict[str, dict[str, str]]:
        """By file and number of the line its text."""
        return {
            file: {str(n): text for n, text in sorted(kept.items())}
            for file, kept in self._files.items()
        }


def of_explanation(
    explanation: Explanation, lines: Lines, *, folds: bool
) -> dict[str, Any]:
    """The values of a compiled program.

    Args:
      explanation: of the program, with reasons.
      lines: takes the lines of code.
      folds: whether one tensor stands for the random bits of a line.
    """
    values = _Values(explanation.mesh, lines)
    dims = _Dims((t.layer, t.source, t.shape) for t in explanation.tensors)
    listed = explanation.tensors
    groups = folded_bits(listed) if folds else [[tensor] for tensor in listed]
    tensors = [
        _noting(values.report(largest, dims), others) for largest, *others in groups
    ]
    elsewhere = [values.inserted(collective) for collective in explanation.elsewhere]
    by = explanation.partitioner
    is_gspmd = by == Partitioner.GSPMD.value
    return values.document(
        name=explanation.name,
        how=f"completed by {by}; collectives of the compiled program",
        note=GSPMD_NOTE if is_gspmd else "",
        tensors=tensors,
        elsewhere=elsewhere,
    )


def of_reasons(
    reasons: Reasons, partitioner: Partitioner, lines: Lines, *, folds: bool
) -> dict[str, Any]:
    """The same of a program that is only traced, by propagation alone."""
    values = _Values(reasons.mesh, lines)
    is_gspmd = partitioner is Partitioner.GSPMD
    sent: dict[str, list[int]] = {}
    for transfer in transfers(reasons):
        sent.setdefault(transfer.at, []).append(values.transfer(transfer))
    sources = {
        t: reasons.sources.find(t.name, t.shape) if t.kind is Kind.INSIDE else None
        for t in reasons.tensors
    }
    dims = _Dims((t.layer, source, t.shape) for t, source in sources.items())
    with reasons.opened():
        groups = [[tensor] for tensor in sources]
        if folds:
            groups = _folded_layouts(reasons, sources, sent)
        tensors = [
            _noting(values.layout(reasons, first, sources[first], dims, sent), others)
            for first, *others in groups
        ]
    return values.document(
        name=reasons.name,
        how=_TRACED,
        note=(f"{GSPMD_NOTE} " if is_gspmd else "") + _SENT_NOTE,
        tensors=tensors,
        elsewhere=[number for left in sent.values() for number in left],
    )


def _folded_layouts(
    reasons: Reasons,
    sources: Mapping[TensorLayout, Source | None],
    sent: Mapping[str, list[int]],
) -> list[list[TensorLayout]]:
    """Tensors, those together that are random bits of one line, the largest first.

    As in the text of `explain`: the generator takes some hundred ops for a mask.
    """

    def key(tensor: TensorLayout) -> tuple:
        source = sources[tensor]
        is_bits = tensor.dtype == RANDOM_BITS and source is not None
        is_alone = not is_bits or source.annotation is not None
        if is_alone or reasons.name_of(reasons.place(tensor)) in sent:
            return ()
        return tensor.layer, str(source), source.is_gradient, tensor.sharding

    return grouped(sources, key, lambda tensor: math.prod(tensor.shape))


def _noting(values: dict[str, Any], others: Sequence[Any]) -> dict[str, Any]:
    """The values of a tensor, with a note on those that it stands for."""
    if others:
        more = counted(len(others), f"more {RANDOM_BITS} tensor")
        values["notes"].append(f"and {more} of this line, split alike: random bits")
    return values


class _Dims:
    """Names of dims: those of annotations by a plan, and of the weights so annotated.

    Args:
      tensors: layer, source and shape of each.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, Source | None, tuple[int, ...]]]
    ) -> None:
        self._of_weights = {
            (layer, shape): list(source.dims)
            for layer, source, shape in tensors
            if source is not None and source.dims
        }

    def of(
        self, kind: Kind, name: str, source: Source | None, shape: tuple[int, ...]
    ) -> list[str]:
        """A name for each dim; [] if they are not known."""
        if source is not None and len(source.dims) == len(shape):
            return list(source.dims)
        if kind is Kind.INSIDE:
            return []
        # `0.slots.stack.w.m` has the dims of weight `stack.w`.
        parts = name.split(".")
        for begin in range(len(parts)):
            for end in range(len(parts), begin, -1):
                key = (".".join(parts[begin:end]), shape)
                if key in self._of_weights:
                    return self._of_weights[key]
        return []


class _Values:
    """Collects the values of one program."""

    def __init__(self, mesh: DeviceMesh, lines: Lines):
        self._mesh, self._lines = mesh, lines
        self._origins, self._shardings = _Numbers(), _Numbers()
        self._hops, self._ways = _Numbers(), _Numbers()
        self._collectives: list[dict[str, Any]] = []
        self._inserted: dict[int, int] = {}

    def document(self, **parts: Any) -> dict[str, Any]:
        """The whole of it, to be called last."""
        mesh = self._mesh
        return {
            **parts,
            "mesh": {
                "axes": list(mesh.axis_names),
                "shape": list(mesh.shape),
                "ids": None if mesh.device_ids is None else list(mesh.device_ids),
            },
            "collectives": self._collectives,
            "hops": list(self._hops),
            "ways": list(self._ways),
            "origins": [self._origin(origin) for origin in list(self._origins)],
            "shardings": [_sharding(sharding) for sharding in self._shardings],
        }

    def report(self, report: TensorReport, dims: _Dims) -> dict[str, Any]:
        """A tensor of a compiled program."""
        source = report.source
        why = report.why_replicated
        return {
            "key": _key(report.kind, report.op_name),
            "kind": report.kind.value,
            "name": tensor_name(report),
            "layer": report.layer,
            "place": self._lines.place(source.file, source.line) if source else "",
            "gradient": bool(source and source.is_gradient),
            "dtype": report.dtype,
            "shape": list(report.shape),
            "dims": dims.of(report.kind, report.op_name, source, report.shape),
            "sharding": self._shardings.of(report.sharding),
            "bytes": report.bytes,
            "held": report.bytes_per_device,
            "annotated": report.annotated,
            "why": why.value if why else "",
            "notes": list(_notes(report)),
            "from": [self._provenance(each) for each in report.provenances],
            "lost": [self._competition(each) for each in report.competitions],
            "sent": [self.inserted(each) for each in report.collectives],
        }

    def layout(
        self,
        reasons: Reasons,
        tensor: TensorLayout,
        source: Source | None,
        dims: _Dims,
        sent: dict[str, list[int]],
    ) -> dict[str, Any]:
        """A tensor of a program that is only traced."""
        place = reasons.place(tensor)
        size, shard = (
            math.prod(shape) * itemsize(tensor.dtype)
            for shape in (tensor.shape, tensor.sharding.shard_shape(tensor.shape))
        )
        is_asked = source is not None and source.annotation is not None
        return {
            "key": _key(tensor.kind, tensor.name),
            "kind": tensor.kind.value,
            "name": _last(tensor.kind, tensor.name),
            "layer": tensor.layer,
            "place": self._lines.place(tensor.file, tensor.line),
            "gradient": bool(source and source.is_gradient),
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "dims": dims.of(tensor.kind, tensor.name, source, tensor.shape),
            "sharding": self._shardings.of(tensor.sharding),
            "bytes": size,
            "held": shard,
            "annotated": is_asked or reasons.border(place) is not None,
            "why": "",
            "notes": [],
            "from": [self._provenance(each) for each in reasons.provenances(place)],
            "lost": [self._competition(each) for each in competitions(reasons, place)],
            "sent": sent.pop(reasons.name_of(place), []),
        }

    def inserted(self, collective: InsertedCollective) -> int:
        """The number of a collective of a compiled program."""
        if id(collective) not in self._inserted:
            self._inserted[id(collective)] = self._add(
                name=collective.name,
                kind=collective.kind,
                axes=None if collective.axes is None else list(collective.axes),
                bytes=collective.bytes,
                own=collective.own_bytes,
                times=collective.times,
                shared=collective.shared_text,
                between=[self._between(each) for each in collective.between],
                cause=list(cause_lines(collective)),
            )
        return self._inserted[id(collective)]

    def transfer(self, transfer: Transfer) -> int:
        """The number of what is sent by propagation."""
        return self._add(
            name="",
            kind=" and ".join(transfer.kinds),
            axes=list(transfer.axes),
            bytes=transfer.bytes,
            own=transfer.bytes,
            times=transfer.times,
            shared="",
            between=[self._between(transfer)],
            cause=[],
        )

    def _add(self, **values: Any) -> int:
        self._collectives.append(values)
        return len(self._collectives) - 1

    def _between(self, transfer: Transfer) -> dict[str, Any]:
        return {
            "tensor": transfer.tensor,
            "at": transfer.at,
            "before": self._shardings.of(transfer.before),
            "after": self._shardings.of(transfer.after),
            "was": [self._origins.of(origin) for origin in transfer.before_origins],
            "now": [self._origins.of(origin) for origin in transfer.after_origins],
        }

    def _provenance(self, provenance: Provenance) -> dict[str, Any]:
        return {
            "axis": provenance.axis,
            "dim": provenance.dim,
            "origin": self._origins.of(provenance.origin),
            "way": self._way(provenance.way),
        }

    def _way(self, way: Sequence[Hop]) -> int:
        """Its number: a way is the number of the one before its last hop, and that."""
        number = -1
        for hop in way:
            place = self._lines.place(hop.file, hop.line)
            text = (hop.direction.value, hop.op_name or hop.op, place, hop.step)
            number = self._ways.of((number, self._hops.of(text)))
        return number

    def _competition(self, competition: Competition) -> dict[str, Any]:
        return {
            "axis": competition.axis,
            "dim": competition.dim,
            "at": competition.at,
            "beside": competition.neighbor,
            "loser": self._provenance(competition.loser),
            "winner": self._provenance(competition.winner)
            if competition.winner
            else None,
            "decided": competition.decided.value,
        }

    def _origin(self, origin: Origin) -> dict[str, Any]:
        is_inside = bool(origin.file)
        return {
            "kind": origin.kind.value,
            "name": origin.name,
            "layer": origin.layer,
            "place": self._lines.place(origin.file, origin.line),
            "sharding": self._shardings.of(origin.sharding),
            "key": origin.name if is_inside else f"{origin.kind.value} {origin.name}",
        }


class _Numbers(dict):
    """Numbers values in the order in which they are first asked for."""

    def of(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def _notes(report: TensorReport) -> Iterator[str]:
    if report.requested is not None:
        yield f"annotated {report.requested}, which completion did not follow"
    if report.resharded_from is not None:
        yield f"annotated again, differently: resharded from {report.resharded_from}"


def _sharding(sharding: Sharding | str) -> dict[str, Any]:
    if isinstance(sharding, str):  # Of XLA, which no mesh axes express.
        return {"text": sharding, "dims": None, "manual": [], "unreduced": []}
    return {
        "text": str(sharding),
        "dims": [list(axes) for axes in sharding.dims],
        "manual": list(sharding.manual),
        "unreduced": list(sharding.unreduced),
    }


def _key(kind: Kind, name: str) -> str:
    return name if kind is Kind.INSIDE else f"{kind.value} {name}"


def _last(kind: Kind, name: str) -> str:
    return name.split("/")[-1] if kind is Kind.INSIDE else name
