"""Why a tensor lies where it lies: an answer for one question."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Sequence

from meshwright.framework.compiler.explaining.competitions import competitions
from meshwright.framework.compiler.explaining.provenance import (
    Competition,
    Hop,
    OriginKind,
    Provenance,
    TensorLayout,
    Transfer,
)
from meshwright.framework.compiler.explaining.reasons import Reasons
from meshwright.framework.compiler.explaining.texts.screen import on_screen
from meshwright.framework.compiler.explaining.transfers import transfers
from meshwright.framework.compiler.lowering.sources import Kind, shown_name
from meshwright.framework.compiler.weight_update_sharding.decisions import UpdateReport
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sizes import bytes_text

_HOPS = 12
"""Of a longer way the first and the last half of so many are printed."""
_ALONE = (
    "no axis reaches it, as no tensor that shares a dim with it is split along that dim"
)
GSPMD_NOTE = (
    "GSPMD keeps no record of its reasons: these are Shardy's, which completes the "
    "same annotations and may differ."
)

COMPILED_NOTE = (
    "This is by propagation alone. XLA simplifies a program first: where it then has "
    "another sharding, mw.explain(program, reasons=True) says so."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReason:
    """Why a tensor lies where it lies.

    Args:
      tensor: the tensor.
      provenances: of each axis that splits it.
      competitions: the axes that split a tensor beside it, and not this one.
      transfers: what is sent where it is made or read.
      given: what gave an argument or a result its sharding, "" if completion did.
      update: what weight-update sharding has to do with it, "" if nothing.
    """

    tensor: TensorLayout
    provenances: tuple[Provenance, ...]
    competitions: tuple[Competition, ...]
    transfers: tuple[Transfer, ...]
    given: str = ""
    update: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to `program.why(target, axis)`; its `str` is to be read.

    Args:
      target: the name, line or layer that was asked for.
      axis: the axis that was asked for; None: all.
      tensors: the tensors of that name, line or layer.
      note: on whose reasons they are, "" if they are the partitioner's own and nothing
        was compiled.
    """

    target: str
    axis: str | None
    tensors: tuple[TensorReason, ...]
    note: str = ""

    def __str__(self) -> str:
        lines = [line for reason in self.tensors for line in self._lines(reason)]
        lines += [self.note] if self.note else []
        return on_screen(lines, self.tensors[0].tensor.sharding.mesh)

    def _lines(self, reason: TensorReason) -> Iterator[str]:
        tensor = reason.tensor
        shape = ",".join(map(str, tensor.shape))
        source = f" at {tensor.source}" if tensor.source else ""
        kind = "" if tensor.kind.value == "inside" else f"{tensor.kind.value} "
        name = f"{kind}{shown_name(tensor.name)}"
        yield f"{name} {tensor.dtype}[{shape}] {tensor.sharding}{source}"
        if reason.update:
            yield f"  {reason.update}"
        is_alone = not reason.provenances and not reason.competitions
        if is_alone and not reason.update:
            along = f" along {self.axis}" if self.axis else ""
            why = f", by {reason.given}" if reason.given else f": {_ALONE}"
            yield f"  is not split{along}{why}"
        is_told = is_alone and reason.given and not reason.update
        if tensor.note and not reason.provenances and not is_told:
            yield f"  {tensor.note}"
        for _, alike in itertools.groupby(
            reason.provenances, lambda one: (one.dim, one.origin, one.way)
        ):
            yield from _provenance_lines(list(alike), tensor)
        for one in reason.competitions:
            yield from _competition_lines(one, tensor)
        for one in reason.transfers:
            yield from _transfer_lines(one)


def why(
    reasons: Reasons,
    target: str,
    axis: str | None = None,
    *,
    partitioner: Partitioner = Partitioner.SHARDY,
    updates: UpdateReport | None = None,
    is_compiled: bool = False,
) -> Answer:
    """Why tensors lie where they lie.

    Args:
      reasons: of the program.
      target: see `find`.
      axis: a mesh axis; None: all.
      partitioner: the program's.
      updates: what was decided on the program's weight updates, if anything was.
      is_compiled: whether XLA has completed it too.

    Raises:
      TypeError: the target or the axis is no name.
      ValueError: there is no such tensor, line or layer, or no such axis.
    """
    tensors = find(reasons, target)
    if not isinstance(axis, (str, type(None))):
        raise TypeError(
            f"{reasons.name}: axis is {axis!r}; pass one of the mesh's axes "
            f"{reasons.mesh.axis_names}, or None"
        )
    if axis is not None:
        reasons.mesh.part(axis)
    sent = transfers(reasons)
    compiled = COMPILED_NOTE if is_compiled else ""
    with reasons.opened():
        found = [_reason(reasons, tensor, axis, sent) for tensor in tensors]
    if updates is not None:
        found = [_with_update(reason, updates) for reason in found]
    return Answer(
        target=target,
        axis=axis,
        tensors=tuple(found),
        note=GSPMD_NOTE if partitioner is Partitioner.GSPMD else compiled,
    )


def find(reasons: Reasons, target: str) -> list[TensorLayout]:
    """The tensors of a name, a line of code or a layer.

    Args:
      reasons: of the program.
      target: the name that `explain` gives a tensor, or its last parts; a line, such as
        "linear.py:12"; or a layer, such as "stack.dense", or of Keras "block/dense",
        whose variables are meant. The name of the Keras model may be before it.

    Raises:
      TypeError: the target is no name.
      ValueError: it is empty, or there are none; the message has the nearest names.
    """
    if not isinstance(target, str) or not target:
        name = shown_name(max(reasons.tensors, key=lambda t: len(t.shape)).name)
        raise (ValueError if target == "" else TypeError)(
            f"{reasons.name}: {target!r} is no name; pass that of a tensor or a layer, "
            f"or a line of code, such as {name!r}"
        )
    exact = [
        t for t in reasons.tensors if target in (t.name, f"{t.kind.value} {t.name}")
    ]
    if exact:  # What prints so too is meant as well.
        return [
            t for t in reasons.tensors if t in exact or shown_name(t.name) == target
        ]
    for matches in (
        lambda t: t.name.endswith((f"/{target}", f".{target}")),
        lambda t: target in _holders(t),
        lambda t: target in (t.layer, f"{t.layer}.{t.name.split('/')[-1]}"),
        lambda t: f"/{t.file}:{t.line}".endswith(f"/{target.lstrip('/')}"),
    ):
        if found := [tensor for tensor in reasons.tensors if matches(tensor)]:
            return found
    model, _, rest = target.partition("/")
    names = [shown_name(t.name) for t in reasons.tensors]
    # Of models that were made apart, variables have a number behind the same path.
    is_one = not any(name.endswith(f"{rest}:1") for name in names)
    if rest and is_one and any(name.startswith(f"{model}/") for name in names):
        with contextlib.suppress(ValueError):
            return find(reasons, rest)
    named = [
        name
        for t in reasons.tensors
        for name in (shown_name(t.name), t.source, t.layer)
        if name
    ]
    # Of long names the last part is what people remember.
    ends = {name.split("/")[-1]: name for name in named} | {n: n for n in named}
    ends |= {holder: holder for t in reasons.tensors for holder in _holders(t)}
    near = difflib.get_close_matches(target, ends, 4, cutoff=0.4)
    names = [*dict.fromkeys(ends[name] for name in near or named)]
    more = ", and others" if len(names) > 4 else ""
    hint = f"{'near it are' if near else 'it has'} {', '.join(map(repr, names[:4]))}"
    raise ValueError(
        f"{reasons.name} has no tensor, line or layer {target!r}; {hint}{more}: "
        "explain prints the names of all"
    )


def _holders(tensor: TensorLayout) -> Iterator[str]:
    """The Keras layers that hold a variable: the ends of each path to one of them.

    `0.net/block/up/kernel` is held by `up`, `block/up`, `net/block/up`, `block`, ...
    """
    if tensor.kind is not Kind.ARGUMENT:
        return
    parts = tensor.name.partition(".")[2].split("/")[:-1]
    for end in range(len(parts), 0, -1):
        yield from ("/".join(parts[begin:end]) for begin in range(end))


def _reason(
    reasons: Reasons, tensor: TensorLayout, axis: str | None, sent: Sequence[Transfer]
) -> TensorReason:
    place = reasons.place(tensor)
    name = reasons.name_of(place)

    def asked(axes: Sequence[str]) -> bool:
        entire = reasons.mesh.entire(axes)
        return axis is None or reasons.mesh.part(axis).axis in entire

    spot = reasons.spot(tensor)
    is_inside = tensor.kind is Kind.INSIDE
    return TensorReason(
        tensor=tensor,
        given="" if is_inside else reasons.written.giver(spot.kind, spot.number),
        provenances=tuple(p for p in reasons.provenances(place) if asked([p.axis])),
        competitions=tuple(c for c in competitions(reasons, place) if asked([c.axis])),
        transfers=tuple(t for t in sent if name in (t.at, t.tensor) and asked(t.axes)),
    )


def _with_update(reason: TensorReason, updates: UpdateReport) -> TensorReason:
    """The reason, with what weight-update sharding has to do with the tensor."""
    tensor, text, along = reason.tensor, "", ", ".join(updates.data_axes)
    if tensor.kind is not Kind.INSIDE:
        path = tensor.name.partition(".")[2]
        split = {axis for axes in tensor.sharding.dims for axis in axes}
        if updates.updates_in_shards(path) and split.isdisjoint(updates.data_axes):
            text = (
                f"weight-update sharding computes its update in shards along {along}, "
                "and gathers the result"
            )
    elif updates.may_gather(tensor.shape) and any(
        transfer.tensor == transfer.at == tensor.name
        and "all-gather" in transfer.kinds
        and any(o.kind is OriginKind.COMPILER for o in transfer.after_origins)
        and set(transfer.axes) & set(updates.data_axes)
        for transfer in reason.transfers
    ):
        text = f"weight-update sharding gathers it along {along}, updated in shards"
    return dataclasses.replace(reason, update=text)


def _provenance_lines(
    alike: Sequence[Provenance], tensor: TensorLayout
) -> Iterator[str]:
    """What axes of a dim come from, and the way they took together."""
    axes, first = ", ".join(one.axis for one in alike), alike[0]
    verb = "is" if len(alike) == 1 else "are"
    yield f"  {axes} on dim {first.dim} {verb} {_begins(first, tensor)}"
    for hop in _shortened(first.way):
        yield f"      {hop}"


def _begins(one: Provenance, tensor: TensorLayout) -> str:
    """Where an axis comes from, or how the tensor itself was given it."""
    origin, kind = one.origin, tensor.kind.value
    is_own = (origin.kind.value, origin.name) == (kind, tensor.name)
    return origin.given if is_own and not origin.is_asked else f"from {origin}"


def _shortened(way: Sequence[Hop]) -> list[Hop | str]:
    if len(way) <= _HOPS:
        return list(way)
    left = len(way) - _HOPS
    return [*way[: _HOPS // 2], f"... {left} more ...", *way[-_HOPS // 2 :]]


def _competition_lines(competition: Competition, tensor: TensorLayout) -> Iterator[str]:
    """Which axis did not come, what came in its place, and what decided."""
    c = competition
    beside = f"{shown_name(c.neighbor)} beside it"
    if c.at != c.neighbor:
        beside += f", at {shown_name(c.at)}"
    yield f"  {c.axis} on dim {c.dim} splits {beside}"
    yield f"      it is from {c.loser.origin}{_step(c.loser)}"
    if c.winner is not None:
        won = f"{c.winner.axis} on dim {c.winner.dim}"
        yield f"      {won} won, {_begins(c.winner, tensor)}{_step(c.winner)}"
    yield f"      decided by {c.decided.value}"


def _step(provenance: Provenance) -> str:
    return f", step {provenance.step}" if provenance.way else ", from the start"


def _transfer_lines(transfer: Transfer) -> Iterator[str]:
    """What is sent, between which shardings, and the annotations behind each."""
    t = transfer
    often = f", {t.times} times in a loop" if t.times > 1 else ""
    kinds = " and ".join(t.kinds)
    along = ", ".join(t.axes)
    at, tensor = map(shown_name, (t.at, t.tensor))
    yield f"  {kinds} along {along} at {at}, {bytes_text(t.bytes)}{often}"
    yield f"      {tensor} {t.before} -> {t.after}"
    for name, origins in ("before", t.before_origins), ("after", t.after_origins):
        for origin in origins:
            yield f"      {name}: {origin}"
