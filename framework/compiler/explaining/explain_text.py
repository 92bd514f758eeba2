"""An explanation as text, at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def explanation_text(explanation: Explanation) -> str:
    """What `print(explanation)` shows."""
    lines = [
        f"{explanation.name} over {explanation.mesh}, completed by "
        f"{explanation.partitioner}: {len(explanation.tensors)} tensors.",
        "Shown are arguments, results, what is annotated, where collectives are, and",
        f"the {_LARGEST} largest others. Bytes of a collective: one device, one run.",
        "",
        *_tensors(explanation),
        *_elsewhere(explanation.elsewhere),
        *_replicated(explanation.replicated()),
        *_rematerialized(explanation.rematerialized()),
        *_repaired(explanation.repairs),
    ]
    return "\n".join(lines)


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


def _tensors(explanation: Explanation) -> Iterator[str]:
    shown = _interesting(explanation.tensors)
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
    columns = [
        f"  {tensor_name(one):<31}",
        f"{_type(one):<19}",
        f"{one.sharding!s:<12}",
    ]
    line = " ".join(columns) + " " + how
    yield line if len(line) <= 80 else " ".join(c.rstrip() for c in (*columns, how))
    if one.source is not None:
        of = "gradient of " if one.source.is_gradient else ""
        yield f"      {of}{one.source}"
    if one.resharded_from is not None:
        yield f"      annotated again, differently: resharded from {one.resharded_from}"
    for collective in one.collectives:
        yield f"      {collective_text(collective)}"


def collective_text(one: InsertedCollective) -> str:
    """`all-gather along X, 33 kB, 40 times in a loop`."""
    if one.axes is None:
        where = "in groups that no axes make"
    else:
        where = f"along {', '.join(one.axes) or 'no axis'}"
    text = f"{one.kind} {where}, {bytes_text(one.bytes)}"
    if one.in_loop:
        times = "unknown times" if one.times is None else f"{one.times} times"
        text += f", {times} in a loop"
    if one.shared_by > 1:
        text += f", together with {one.shared_by - 1} other ops"
    return text


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
