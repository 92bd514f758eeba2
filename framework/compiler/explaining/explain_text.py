"""An explanation as text, at 80 columns."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.framework.compiler.lowering.sources import PLACEHOLDER
from meshwright.framework.sizes import bytes_text

if TYPE_CHECKING:
    from meshwright.framework.compiler.explaining.explain import (
        Explanation,
        InsertedCollective,
        RematerializedTensor,
        TensorReport,
    )
    from meshwright.framework.compiler.repair.repaired import Repair

_LARGEST = 10
_WIDTH = 80
# Of a tensor's name, its type and its sharding; what is left is how it came about.
_COLUMNS = (34, 17, 12)


def explanation_text(
    explanation: Explanation, *, match: str = "", at_least: int = 0
) -> str:
    """What `print(explanation)` shows, or a part of it; the summary is of all.

    Args:
      explanation: of a program.
      match: regular expression; only tensors are shown in whose heading, name or source
        it occurs, and all of these.
      at_least: bytes; only tensors of as many are shown.
    """
    pattern = re.compile(match)

    def is_shown(*names: object, size: int) -> bool:
        found = any(pattern.search(str(name)) for name in names if name)
        return size >= at_least and (found or not match)

    tensors = [
        one
        for one in (explanation.tensors if match else _interesting(explanation.tensors))
        if is_shown(_heading(one), one.op_name, one.source, size=one.bytes)
    ]
    replicated = [
        one
        for one in explanation.replicated(at_least)
        if is_shown(_heading(one), one.op_name, one.source, size=one.bytes)
    ]
    whole = [
        one
        for one in explanation.rematerialized()
        if is_shown(
            *(one.tensor_name, one.tensor, one.tensor and one.tensor.layer),
            *(one.at_name, one.at, one.at and one.at.layer),
            size=one.bytes,
        )
    ]
    repairs = [
        one
        for one in explanation.repairs
        if is_shown(
            *(one.op_name, one.source, one.source and one.source.layer), size=one.bytes
        )
    ]
    is_filtered = bool(match or at_least)
    lines = [
        *_summary(explanation),
        *_what_is_shown(len(tensors), match, at_least),
        "",
        *_tensors(tensors),
        *([] if is_filtered else _elsewhere(explanation.elsewhere)),
        *([] if is_filtered and not replicated else _replicated(replicated)),
        *([] if is_filtered and not whole else _rematerialized(whole)),
        *_repaired(repairs),
    ]
    return "\n".join(part for line in lines for part in _wrapped(line))


def _summary(explanation: Explanation) -> Iterator[str]:
    """A screen at most: how much there is of what is told below."""
    tensors, replicated = explanation.tensors, explanation.replicated()
    whole = explanation.rematerialized()
    yield (
        f"{explanation.name} over {explanation.mesh}, completed by "
        f"{explanation.partitioner}: {len(tensors)} tensors, of which"
    )
    annotated = [one for one in tensors if one.annotated]
    repaired = collections.Counter(one.fault.is_slow for one in explanation.repairs)
    rows = [
        (f"{len(annotated)} annotated", ""),
        (f"{len(replicated)} left replicated", _total(replicated)),
        (f"{len(whole)} made whole with nobody asking for it", _total(whole)),
    ]
    rows += [
        (f"{count} laid out otherwise, as XLA would be {how}", "")
        for how, is_slow in (("wrong", False), ("slow", True))
        if (count := repaired[is_slow])
    ]
    yield from (f"  {what:<45}{size:>11}".rstrip() for what, size in rows)
    yield "Collectives, and what their results take on one device in one run:"
    yield from _collective_rows(explanation) or ["  none"]


def _collective_rows(explanation: Explanation) -> list[str]:
    """Collectives by kind and axes, those that move most first."""
    # One that XLA combined is at several tensors.
    known = {id(one): one for t in explanation.tensors for one in t.collectives}
    known |= {id(one): one for one in explanation.elsewhere}
    groups: dict[str, list[InsertedCollective]] = {}
    for one in known.values():
        groups.setdefault(f"{one.kind} {_where(one)}", []).append(one)

    def moved(found: list[InsertedCollective]) -> int:
        return sum(one.bytes * (one.times or 1) for one in found)

    return [
        f"  {name:<38}{bytes_text(moved(found)):>11}, "
        + ("at least " if any(one.times is None for one in found) else "")
        + f"{sum(one.times or 1 for one in found)} times"
        for name, found in sorted(groups.items(), key=lambda item: -moved(item[1]))
    ]


def _total(tensors: Sequence[TensorReport | RematerializedTensor]) -> str:
    return bytes_text(sum(one.bytes for one in tensors)) if tensors else ""


def _what_is_shown(count: int, match: str, at_least: int) -> Iterator[str]:
    yield ""
    if not match and not at_least:
        yield "Shown are arguments, results, what is annotated, where collectives are,"
        yield f"and the {_LARGEST} largest others. Bytes of a collective are of one"
        yield "device each time it runs."
        return
    parts = [f"match {match!r}"] if match else []
    parts += [f"take at least {bytes_text(at_least)}"] if at_least else []
    yield f"Shown are the {count} tensors that {' and '.join(parts)}."


def _wrapped(line: str) -> list[str]:
    """A line as several, indented deeper, where it is longer than the screen."""
    if len(line) <= _WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        _WIDTH,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
    )


def tensor_name(one: TensorReport) -> str:
    """The tensor's own name in its layer; of a gradient's op with the op it is of."""
    if not one.layer and one.source is None:
        return one.op_name
    # What TF has no op for has a scope of its name.
    parts = one.op_name.removesuffix(f"/{PLACEHOLDER}").split("/")
    return "/".join(parts[-2:] if one.source and one.source.is_gradient else parts[-1:])


def replicated_line(one: TensorReport) -> str:
    """`1.5 MB f32[600,600] argument state.w`."""
    place = ".".join(part for part in (one.layer, tensor_name(one)) if part)
    where = f" ({one.source})" if one.source else ""
    kind = "" if one.kind.value == "inside" else f"{one.kind.value} "
    return f"{bytes_text(one.bytes)} {_type(one)} {kind}{place}{where}"


def _tensors(shown: Iterable[TensorReport]) -> Iterator[str]:
    groups: dict[str, list[TensorReport]] = {}
    for one in shown:
        groups.setdefault(_heading(one), []).append(one)
    for heading, tensors in groups.items():
        yield heading
        for one in tensors:
            yield from _tensor_lines(one)
        yield ""


def _heading(one: TensorReport) -> str:
    if one.kind.value == "inside":
        return one.layer or "in no layer"
    return f"{one.kind.value}s"


def _interesting(tensors: Iterable[TensorReport]) -> list[TensorReport]:
    def is_named(one: TensorReport) -> bool:
        return one.kind.value != "inside" or one.annotated or bool(one.collectives)

    others = sorted(
        (one for one in tensors if not is_named(one)), key=lambda one: -one.bytes
    )
    largest = {id(one) for one in others[:_LARGEST]}
    return [one for one in tensors if is_named(one) or id(one) in largest]


def _tensor_lines(one: TensorReport) -> Iterator[str]:
    how = "annotated" if one.annotated else "inferred"
    how = how if one.asked is None else f"asked {one.asked}"
    yield from _row(tensor_name(one), _type(one), str(one.sharding), how)
    if one.source is not None:
        of = "gradient of " if one.source.is_gradient else ""
        yield f"      {of}{one.source}"
    if one.resharded_from is not None:
        yield f"      annotated again, differently: resharded from {one.resharded_from}"
    for collective in one.collectives:
        yield f"      {collective_text(collective)}"


def _row(*cells: str) -> Iterator[str]:
    """Cells in columns; what follows one longer than its column has a new line.

    The last cell stays where there is room for it: nothing stands below it.
    """
    *columns, last = cells
    line, begin = "", 2
    for cell, width in zip(columns, _COLUMNS, strict=True):
        if line and len(line) >= begin:
            yield line
            line = ""
        line = f"{line:<{begin}}{cell}"
        begin += width + 1
    if len(line) >= begin and len(line) + len(last) >= _WIDTH:
        yield line
        line = ""
    yield f"{line:<{begin - 1}} {last}"


def collective_text(one: InsertedCollective) -> str:
    """`all-gather along X, 33 kB, 40 times in a loop`."""
    text = f"{one.kind} {_where(one)}, {bytes_text(one.bytes)}"
    if one.in_loop:
        times = "unknown times" if one.times is None else f"{one.times} times"
        text += f", {times} in a loop"
    if one.shared_by > 1:
        text += f", with {one.shared_by - 1} other ops"
    return text


def _where(one: InsertedCollective) -> str:
    if one.axes is None:
        return "in groups that no axes make"
    return f"along {', '.join(one.axes) or 'no axis'}"


def _elsewhere(collectives: tuple[InsertedCollective, ...]) -> Iterator[str]:
    if collectives:
        yield "collectives at no tensor of the program's"
        for one in collectives:
            yield f"      {collective_text(one)}"
        yield ""


def _replicated(tensors: list[TensorReport]) -> Iterator[str]:
    if not tensors:
        yield from ("No tensor is left replicated.", "")
        return
    total = bytes_text(sum(one.bytes for one in tensors))
    yield f"Left replicated: {len(tensors)} tensors, {total}; the largest:"
    for one in tensors[:_LARGEST]:
        yield f"  {replicated_line(one)}"
        yield f"      {one.why_replicated.value}"
    yield ""


def _rematerialized(found: list[RematerializedTensor]) -> Iterator[str]:
    if not found:
        yield "No tensor is made whole on every device with nobody asking for it."
        return
    yield "Made whole on every device, for which nobody asked:"
    for one in found:
        yield from rematerialized_lines(one)


def rematerialized_lines(one: RematerializedTensor) -> Iterator[str]:
    """What, where and what to do."""
    origin = _origin(one.tensor, one.tensor_name)
    yield f"  {bytes_text(one.bytes)} {_type(one)} {origin}"
    at = _origin(one.at, one.at_name)
    if one.alike:
        yield f"      every device does all of {at}"
        yield "      split what it reads along other dims, or do it in a manual region"
        return
    yield f"      wanted otherwise at {at}"
    yield "      annotate it once more between, to move one mesh axis at a time"


def _repaired(repairs: Iterable[Repair]) -> Iterator[str]:
    for slow, would in ((False, "get them wrong"), (True, "be slow at them")):
        alike = [one for one in repairs if one.fault.is_slow == slow]
        if alike:
            yield ""
            yield f"Ops laid out otherwise, as XLA would {would}:"
        for one in alike:
            origin = _origin(one.source, one.op_name)
            yield f"  {bytes_text(one.bytes)} to each device: {origin}"
            yield f"      {one.fault.name}; {one.fault.repair}"
            for name, before, after in one.changes():
                yield f"      {name}: {before or 'unknown'} -> {after}"


def _origin(source, name: str) -> str:
    if source is None:
        return name
    layer = f"{source.layer}: " if source.layer else ""
    return f"{layer}{name.split('/')[-1]} ({source})"


def _type(one: TensorReport | RematerializedTensor) -> str:
    return f"{one.dtype}[{','.join(map(str, one.shape))}]"
