"""An explanation as text, at 80 columns."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.framework.compiler.explaining.texts.folds import (
    folded,
    other_lines,
    settled_results,
    type_text,
)
from meshwright.framework.compiler.explaining.texts.screen import WIDTH, on_screen
from meshwright.framework.compiler.explaining.why import GSPMD_NOTE
from meshwright.framework.compiler.lowering.sources import PLACEHOLDER, shown_name
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import read_pattern
from meshwright.framework.sizes import bytes_text, counted

if TYPE_CHECKING:
    from meshwright.framework.compiler.explaining.explain import (
        Explanation,
        RematerializedTensor,
        TensorReport,
    )
    from meshwright.framework.compiler.explaining.inserted import InsertedCollective
    from meshwright.framework.compiler.explaining.provenance import Transfer
    from meshwright.framework.compiler.repair.repaired import Repair

_LARGEST = 10
_MOST = 5
"""Collectives that are listed before the tensors."""
# Widths for a tensor's name, type and sharding; the rest says where it comes from.
_COLUMNS = (34, 17, 12)


def explanation_text(
    explanation: Explanation, *, match: str = "", at_least: int = 0, axis: str = ""
) -> str:
    """What `print(explanation)` shows, or a part of it; the summary covers all tensors.

    Args:
      explanation: of a program.
      match: regular expression; all tensors in whose heading, name or source it occurs
        are shown, and no others.
      at_least: bytes; only tensors of at least this size are shown.
      axis: a mesh axis; only tensors that it splits, or that are sent along it, are.

    Raises:
      ValueError: there is no such axis, or `match` is no regular expression.
    """
    pattern = read_pattern(match, f"match={match!r}")
    if axis:
        explanation.mesh.part(axis)

    def is_shown(*names: object, size: int) -> bool:
        matches = any(pattern.search(str(name)) for name in names if name)
        return size >= at_least and (matches or not match)

    is_filtered = bool(match or at_least or axis)
    settled = set() if is_filtered else settled_results(explanation.tensors)
    some = explanation.tensors if match or axis else _interesting(explanation.tensors)
    tensors = [
        t
        for t in some
        if is_shown(_heading(t), t.op_name, t.source, size=t.bytes)
        and (not axis or axis in _axes_of(t))
    ]
    replicated = [
        t
        for t in explanation.replicated(at_least)
        if is_shown(_heading(t), t.op_name, t.source, size=t.bytes)
    ]
    gathered = [
        t
        for t in explanation.rematerialized()
        if is_shown(
            *(t.tensor_name, t.tensor, t.tensor and t.tensor.layer),
            *(t.at_name, t.at, t.at and t.at.layer),
            size=t.bytes,
        )
    ]
    repairs = [
        r
        for r in explanation.repairs
        if is_shown(*(r.op_name, r.source, r.source and r.source.layer), size=r.bytes)
    ]
    lines = [
        *_summary(explanation),
        *_what_is_shown(len(tensors), match, at_least, axis),
        "",
        *([] if is_filtered and not replicated else _replicated(replicated, settled)),
        *([] if is_filtered else _sent_most(explanation.tensors)),
        *_tensors(tensors, settled, explanation.has_reasons, is_filtered=is_filtered),
        *([] if is_filtered else _elsewhere(explanation)),
        *([] if is_filtered and not gathered else _rematerialized(gathered)),
        *_repaired(repairs),
    ]
    return on_screen(lines, explanation.mesh)


def _summary(explanation: Explanation) -> Iterator[str]:
    """At most a screen: how much there is of what the lists below show."""
    tensors, replicated = explanation.tensors, explanation.replicated()
    gathered, kinds = explanation.rematerialized(), _by_kind(explanation)
    yield (
        f"{explanation.name} over {explanation.mesh}, completed by "
        f"{explanation.partitioner}: {_verdict(explanation, kinds)}"
    )
    yield f"Of {len(tensors)} tensors"
    annotated = [tensor for tensor in tensors if tensor.annotated]
    repaired = collections.Counter(r.fault.is_slow for r in explanation.repairs)
    rows = [
        (f"{len(annotated)} annotated", ""),
        (f"{len(replicated)} left replicated", _total(replicated)),
        (f"{len(gathered)} gathered in full without an annotation", _total(gathered)),
    ]
    if explanation.has_reasons:
        of = explanation.known()
        rows.append((f"{of.with_reason} of {of.axes} axes with their reason", ""))
    rows += [
        (f"{count} laid out otherwise, as XLA would be {how}", "")
        for how, is_slow in (("wrong", False), ("slow", True))
        if (count := repaired[is_slow])
    ]
    yield from (f"  {what:<45}{size:>11}".rstrip() for what, size in rows)
    if explanation.has_reasons and explanation.partitioner == Partitioner.GSPMD.value:
        yield GSPMD_NOTE
    yield "Collectives, and what their results take on one device in one run:"
    rows = [
        f"  {name:<38}{bytes_text(_moved(group)):>11}, "
        + ("at least " if any(c.times is None for c in group) else "")
        + _times(sum(c.times or 1 for c in group))
        for name, group in kinds
    ]
    yield from rows or ["  none"]


def _verdict(
    explanation: Explanation, kinds: Sequence[tuple[str, list[InsertedCollective]]]
) -> str:
    """How much of the arguments is split, and what sends most."""
    arguments = [t for t in explanation.tensors if t.kind.value == "argument"]
    whole = [tensor for tensor in arguments if tensor.why_replicated is not None]
    size = bytes_text(sum(tensor.bytes for tensor in arguments))
    replicated = (
        f"replicated are {_total(whole) or 'none'} of the {size} of arguments; "
    )
    text = replicated if arguments else ""
    if not kinds:
        return f"{text}nothing is sent"
    name, most = kinds[0]
    total = sum(_moved(group) for _, group in kinds)
    share = f"{bytes_text(_moved(most))} of {bytes_text(total)}"
    return f"{text}most is sent by {name}, {share}"


def _moved(group: Sequence[InsertedCollective]) -> int:
    """The bytes of a device's results in one run."""
    return sum(c.bytes * (c.times or 1) for c in group)


def _by_kind(explanation: Explanation) -> list[tuple[str, list[InsertedCollective]]]:
    """Collectives by kind and axes, those that move most first."""
    # A collective that XLA combined is at several tensors.
    known = {c.name: c for tensor in explanation.tensors for c in tensor.collectives}
    known |= {c.name: c for c in explanation.elsewhere}
    groups: dict[str, list[InsertedCollective]] = {}
    for c in known.values():
        groups.setdefault(f"{c.kind} {c.where}", []).append(c)
    return sorted(groups.items(), key=lambda item: -_moved(item[1]))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _total(tensors: Sequence[TensorReport | RematerializedTensor]) -> str:
    return bytes_text(sum(tensor.bytes for tensor in tensors)) if tensors else ""


def _axes_of(tensor: TensorReport) -> set[str]:
    """The mesh axes that split a tensor, or along which it is sent."""
    dims = [] if isinstance(tensor.sharding, str) else tensor.sharding.dims
    sent = [one.axes or () for one in tensor.collectives]
    return {axis.partition(":")[0] for axes in (*dims, *sent) for axis in axes}


def _what_is_shown(count: int, match: str, at_least: int, axis: str) -> Iterator[str]:
    yield ""
    if not match and not at_least and not axis:
        yield "Shown are arguments, results, what is annotated, where collectives are,"
        yield f"and the {_LARGEST} largest others. Bytes of a collective are of one"
        yield "device each time it runs."
        return
    parts = [f"match '{match}'"] if match else []
    parts += [f"take at least {bytes_text(at_least)}"] if at_least else []
    parts += [f"are split or sent along {axis}"] if axis else []
    if count:
        yield f"Shown: {counted(count, 'tensor')} that {' and '.join(parts)}."
        return
    yield f"There are no tensors that {' and '.join(parts)}. Leave that out to see"
    yield "the names of layers, tensors and sources that there are."


def tensor_name(tensor: TensorReport) -> str:
    """The tensor's own name in its layer; a gradient's follows the name of its op."""
    if not tensor.layer and tensor.source is None:
        return shown_name(tensor.op_name)
    # What TF has no op for has a scope with its name.
    parts = tensor.op_name.removesuffix(f"/{PLACEHOLDER}").split("/")
    return "/".join(
        parts[-2:] if tensor.source and tensor.source.is_gradient else parts[-1:]
    )


def replicated_line(tensor: TensorReport) -> str:
    """`1.5 MB f32[600,600] argument state.w`."""
    return f"{bytes_text(tensor.bytes)} {type_text(tensor)} {_place(tensor)}"


def _place(tensor: TensorReport) -> str:
    place = ".".join(part for part in (tensor.layer, tensor_name(tensor)) if part)
    line = str(tensor.source or "")
    where = f" ({line})" if line else ""
    kind = "" if tensor.kind.value == "inside" else f"{tensor.kind.value} "
    return f"{kind}{place}{where}"


def _sent_most(tensors: Sequence[TensorReport]) -> Iterator[str]:
    """The ops whose collectives move most, if there are many."""
    sent = [(one, tensor) for tensor in tensors for one in tensor.collectives]
    if len(sent) <= _MOST:
        return
    sent.sort(key=lambda pair: -pair[0].most)
    yield "Collectives that move most at an op:"
    for one, tensor in sent[:_MOST]:
        yield f"  {one.text}: {_place(tensor)}"
    yield ""


def _tensors(
    shown: Sequence[TensorReport],
    settled: Collection[int],
    has_reasons: bool,
    *,
    is_filtered: bool,
) -> Iterator[str]:
    listed = [tensor for tensor in shown if id(tensor) not in settled]
    by_heading: dict[str, list[list[TensorReport]]] = {_heading(t): [] for t in shown}
    for group in [[t] for t in listed] if is_filtered else folded(listed):
        by_heading[_heading(group[0])].append(group)
    counts = collections.Counter(_heading(t) for t in shown if id(t) in settled)
    for heading, groups in by_heading.items():
        if not groups and not counts[heading]:  # All are at what they fold into.
            continue
        yield heading
        for tensor, *others in groups:
            yield from _tensor_lines(tensor, has_reasons=has_reasons)
            yield from other_lines(others)
        if counts[heading]:
            left = counted(counts[heading], "new value")
            yield f"  {left} of arguments of the same names, split as these are"
        yield ""


def _heading(tensor: TensorReport) -> str:
    if tensor.kind.value == "inside":
        return tensor.layer or "in no layer"
    return f"{tensor.kind.value}s"


def _interesting(tensors: Iterable[TensorReport]) -> list[TensorReport]:
    def is_named(t: TensorReport) -> bool:
        return t.kind.value != "inside" or t.annotated or bool(t.collectives)

    others = folded(t for t in tensors if not is_named(t))
    others.sort(key=lambda group: -group[0].bytes)
    largest = {id(tensor) for group in others[:_LARGEST] for tensor in group}
    return [t for t in tensors if is_named(t) or id(t) in largest]


def _tensor_lines(tensor: TensorReport, *, has_reasons: bool) -> Iterator[str]:
    how = "annotated" if tensor.annotated else "inferred"
    how = "kept" if tensor.kept_from else how
    yield from _row(tensor_name(tensor), type_text(tensor), str(tensor.sharding), how)
    line = str(tensor.source or "")
    if tensor.source is not None and tensor.source.is_gradient:
        line = f"gradient of {line}" if line else "of the gradient"
    if line:
        yield f"      {line}"
    if tensor.kept_from:
        yield f"      as {tensor.kept_from} left its variable"
    if tensor.annotated and tensor.note and tensor.why_replicated is None:
        yield f"      by {tensor.note}"
    if tensor.logical_shape is not None:
        padded = len(tensor.logical_shape) == len(tensor.shape)
        how = "padded" if padded else "with dims combined"
        shape = ",".join(map(str, tensor.logical_shape))
        yield f"      stored {how}; its own shape is [{shape}]"
    if tensor.requested is not None:
        yield f"      annotated {tensor.requested}, which completion did not follow"
    if tensor.resharded_from is not None:
        before = tensor.resharded_from
        yield f"      annotated again, differently: resharded from {before}"
    if tensor.propagated is not None:
        yield f"      XLA's: by propagation alone it is {tensor.propagated}"
    for one in tensor.provenances:
        ops = f", in {counted(len(one.way), 'step')}" if one.way else ""
        yield f"      {one.axis} on dim {one.dim} is from {one.origin}{ops}"
    for collective in tensor.collectives:
        yield from _collective_lines(collective, has_reasons=has_reasons)


def _collective_lines(
    collective: InsertedCollective, *, has_reasons: bool
) -> Iterator[str]:
    yield f"      {collective.text}"
    for line in cause_lines(collective) if has_reasons else ():
        yield f"          {line}"
    for one in collective.between:
        yield from _between_lines(one)


def cause_lines(collective: InsertedCollective) -> Iterator[str]:
    """What a collective does that propagation alone does not explain."""
    if collective.gathers is not None:
        one = collective.gathers
        yield f"gathered in full: {_origin(one.tensor, one.tensor_name)}"
        yield from _remedy_lines(one)
    elif not collective.between:
        yield "of no known cause: XLA's partitioner may have made it by itself"


def _between_lines(transfer: Transfer) -> Iterator[str]:
    t = transfer
    yield f"          {shown_name(t.tensor)} {t.before} -> {t.after}"
    for name, origins in ("before", t.before_origins), ("after", t.after_origins):
        for origin in origins:
            yield f"          {name}: {origin}"


def _row(*cells: str) -> Iterator[str]:
    """Cells in columns; after a cell wider than its column a new line begins.

    The last cell stays on the line if there is room for it: it has no column.
    """
    *columns, last = cells
    line, begin = "", 2
    for cell, width in zip(columns, _COLUMNS, strict=True):
        if line and len(line) >= begin:
            yield line
            line = ""
        line = f"{line:<{begin}}{cell}"
        begin += width + 1
    if len(line) >= begin and len(line) + len(last) >= WIDTH:
        yield line
        line = ""
    yield f"{line:<{begin - 1}} {last}"


def _elsewhere(explanation: Explanation) -> Iterator[str]:
    if explanation.elsewhere:
        yield "collectives at no tensor of the program's"
        for collective in explanation.elsewhere:
            yield from _collective_lines(
                collective, has_reasons=explanation.has_reasons
            )
        yield ""


def _replicated(tensors: list[TensorReport], settled: Collection[int]) -> Iterator[str]:
    if not tensors:
        yield from ("No tensor is left replicated.", "")
        return
    total = bytes_text(sum(tensor.bytes for tensor in tensors))
    yield f"Left replicated: {counted(len(tensors), 'tensor')}, {total}; the largest:"
    listed = [tensor for tensor in tensors if id(tensor) not in settled]
    for tensor, *others in folded(listed, by_reason=True)[:_LARGEST]:
        yield f"  {replicated_line(tensor)}"
        yield from other_lines(others)
        yield f"      {tensor.why_text}"
    yield ""


def _rematerialized(tensors: list[RematerializedTensor]) -> Iterator[str]:
    if not tensors:
        yield "No tensor is gathered in full on every device without an annotation."
        return
    yield "Gathered in full on every device, without an annotation that asks for it:"
    for tensor in tensors:
        yield from rematerialized_lines(tensor)


def rematerialized_lines(tensor: RematerializedTensor) -> Iterator[str]:
    """Which tensor, where, and what to do about it."""
    origin = _origin(tensor.tensor, tensor.tensor_name)
    yield f"  {bytes_text(tensor.bytes)} {type_text(tensor)} {origin}"
    yield from (f"      {line}" for line in _remedy_lines(tensor))


def _remedy_lines(tensor: RematerializedTensor) -> Iterator[str]:
    at = _origin(tensor.at, tensor.at_name)
    if tensor.alike:
        yield f"every device does all of {at}"
        yield "split what it reads along other dims, or do it in a manual region"
        return
    yield f"wanted otherwise at {at}"
    yield "annotate it once more between, to move one mesh axis at a time"


def _repaired(repairs: Iterable[Repair]) -> Iterator[str]:
    for slow, would in ((False, "get them wrong"), (True, "be slow at them")):
        of_kind = [repair for repair in repairs if repair.fault.is_slow == slow]
        if of_kind:
            yield ""
            yield f"Ops laid out otherwise, as XLA would {would}:"
        for repair in of_kind:
            origin = _origin(repair.source, repair.op_name)
            yield f"  {bytes_text(repair.bytes)} to each device: {origin}"
            yield f"      {repair.fault.name}; {repair.fault.repair}"
            for name, before, after in repair.changes():
                yield f"      {name}: {before or 'unknown'} -> {after}"


def _origin(source, name: str) -> str:
    if source is None:
        return shown_name(name)
    layer = f"{source.layer}: " if source.layer else ""
    return f"{layer}{name.split('/')[-1]}" + (f" ({source})" if str(source) else "")
