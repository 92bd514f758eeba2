"""What differs between two programs: where tensors lie, and what is sent."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from meshwright.framework.compiler.explaining.provenance import Origin
from meshwright.framework.compiler.explaining.texts.folds import grouped
from meshwright.framework.compiler.explaining.texts.screen import on_screen
from meshwright.framework.compiler.lowering.sources import place_text, shown_name
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sizes import bytes_text

_T = TypeVar("_T")
_LARGEST = 20
"""Tensors, or collectives, that are printed, and at most how many causes."""
_OF_EACH = 4
"""How many are printed of a cause, of more than one."""
_RANDOM = re.compile(r".*?\bstateless_(random|truncated)_[^/]+")
"""The scope of the ops that make random numbers, as for dropout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A tensor of one of two programs.

    Args:
      type: such as "f32[8,16]".
      sharding: its text.
      bytes_per_device: of a device's shard.
      file, line: of the code that made it; "" and 0 if unknown.
      origins: where the axes that split it come from, if it lies otherwise.
    """

    type: str
    sharding: str
    bytes_per_device: int
    file: str
    line: int
    origins: tuple[Origin, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """All that is sent at an op by one kind of collective along the same axes.

    Args:
      bytes: of the results on one device, in one call of the program.
      seconds: what it takes on a topology, None without one.
      origins: the annotations behind the shardings that it brings together.
    """

    bytes: int
    seconds: float | None
    origins: tuple[Origin, ...]


SentKey = tuple[str, str, tuple[str, ...] | None]
"""The op's name, the kind of collective, and its axes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of two programs.

    Args:
      name: for texts.
      mesh: the program's.
      tensors: by what they are to the program, and name.
      sent: collectives.
      is_propagated: whether that is by propagation alone, not of a compiled program.
    """

    name: str
    mesh: DeviceMesh
    tensors: Mapping[str, LaidOut]
    sent: Mapping[SentKey, Sent]
    is_propagated: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that lies otherwise.

    Args:
      name: `argument 0.w`, or the name of the TF op.
      before, after: in each program.
    """

    name: str
    before: LaidOut
    after: LaidOut


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentDifference:
    """A collective that is new or gone, grew or shrank.

    Args:
      at: the name of the TF op.
      kind: "all-gather", ...
      axes: mesh axes; None if no axes make its groups.
      before, after: in each program; None where there is no such collective.
    """

    at: str
    kind: str
    axes: tuple[str, ...] | None
    before: Sent | None
    after: Sent | None

    @property
    def bytes(self) -> int:
        """How much more is sent."""
        return _bytes(self.after) - _bytes(self.before)

    @property
    def what(self) -> str:
        """`new`, `gone`, `grew` or `shrank`."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        return "grew" if self.bytes > 0 else "shrank"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs between two programs; its `str` is to be read.

    Args:
      before, after: the programs.
      notes: what should be known of them.
    """

    before: Side
    after: Side
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[TensorDifference]:
        """The tensors that both have and that lie otherwise, largest first."""
        pairs = (
            TensorDifference(name=name, before=one, after=self.after.tensors[name])
            for name, one in self.before.tensors.items()
            if name in self.after.tensors
        )
        found = [p for p in pairs if p.before.sharding != p.after.sharding]
        return sorted(found, key=lambda p: -_most(p))

    @property
    def collectives(self) -> list[SentDifference]:
        """What is sent otherwise, the largest change first."""
        keys = dict.fromkeys([*self.before.sent, *self.after.sent])
        pairs = (
            SentDifference(
                at=key[0],
                kind=key[1],
                axes=key[2],
                before=self.before.sent.get(key),
                after=self.after.sent.get(key),
            )
            for key in keys
        )
        return sorted((p for p in pairs if p.bytes), key=lambda p: -abs(p.bytes))

    @property
    def only_before(self) -> list[str]:
        """The tensors that only the first program has."""
        return [name for name in self.before.tensors if name not in self.after.tensors]

    @property
    def only_after(self) -> list[str]:
        """The tensors that only the second program has."""
        return [name for name in self.after.tensors if name not in self.before.tensors]

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes of all collectives' results on one device, in one call of each."""
        return _total_bytes(self.before), _total_bytes(self.after)

    @property
    def sent_seconds(self) -> tuple[float, float] | None:
        """Seconds of all collectives, one after the other; None without a topology."""
        each = _total_seconds(self.before), _total_seconds(self.after)
        return None if None in each else each

    @property
    def argument_bytes(self) -> tuple[int, int]:
        """Bytes of the arguments on one device."""
        return _argument_bytes(self.before), _argument_bytes(self.after)

    def __str__(self) -> str:
        return on_screen(self._lines(), self.before.mesh, self.after.mesh)

    def _lines(self) -> Iterator[str]:
        yield f"{self.before.name} -> {self.after.name}"
        sent = "sent in one call"
        if self.after.is_propagated:
            sent += ", by propagation"
        rows = {
            "arguments on one device": _change(*self.argument_bytes),
            sent: _change(*self.sent_bytes),
        }
        if self.sent_seconds is not None:
            rows["which takes, estimated"] = _times(*self.sent_seconds)
        width = max(map(len, rows))
        yield from (f"  {what:<{width}}  {change}" for what, change in rows.items())
        yield from (f"  note: {note}" for note in self.notes)
        tensors, sent = self.tensors, self.collectives
        yield f"Tensors with another sharding: {len(tensors)}" + _of(tensors)
        yield from _by_cause(tensors, _tensor_causes, _tensor_lines, _random_scope)
        yield f"Collectives that differ: {len(sent)}" + _of(sent)
        yield from _by_cause(sent, _sent_causes, _sent_lines)
        for side, names in ("first", self.only_before), ("second", self.only_after):
            if names:
                yield f"Only in the {side}, {len(names)}: {_some(names)}"


def _of(found: list) -> str:
    return "; by cause, the largest first:" if len(found) > 1 else ""


def _by_cause(
    found: Sequence[_T],
    causes: Callable[[_T], Iterator[str]],
    lines: Callable[[_T], Iterator[str]],
    scope: Callable[[_T], tuple] = lambda one: (),
) -> Iterator[str]:
    """The lines of what is found, below those of its causes, which many share.

    What is of one scope is told together, after what is of none.
    """
    # Several causes together are one group, in whichever order they are found.
    groups: dict[frozenset[str], tuple[list[str], list[_T]]] = {}
    for one in found:
        why = [*causes(one)]
        groups.setdefault(frozenset(why), (why, []))[1].append(one)
    most = _LARGEST if len(groups) == 1 else _OF_EACH
    for why, group in [*groups.values()][:_LARGEST]:
        first, *rest = why or ["of no known cause"]
        yield f"  {first}"
        yield from (f"  and {line}" for line in rest)
        in_order = sorted(group, key=lambda one: scope(one) != ())
        rows = grouped(in_order, scope, lambda one: 0)  # The largest is the first.
        for one, *others in rows[:most]:
            yield from (f"    {line}" for line in lines(one))
            if others:
                yield f"        and {len(others)} more of the same random numbers"
        if len(rows) > most:
            yield f"    and {sum(map(len, rows[most:]))} more of this cause"
    if len(groups) > _LARGEST:
        left = sum(len(group) for _, group in [*groups.values()][_LARGEST:])
        yield f"  and {left} more, of other causes"


def _random_scope(tensor: TensorDifference) -> tuple:
    """What tensors have in common that make the same random numbers; () of others."""
    match = _RANDOM.match(tensor.name)
    return (match[0],) if match else ()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(shown_name, names[:4])) + more


def _tensor_lines(tensor: TensorDifference) -> Iterator[str]:
    one, other = tensor.before, tensor.after
    where = f" at {place_text(one.file, one.line)}" if one.file else ""
    lies = f"{one.sharding} -> {other.sharding}"
    yield f"{shown_name(tensor.name)} {other.type} {lies}{where}"
    changed = _change(one.bytes_per_device, other.bytes_per_device)
    yield f"    on one device {changed}"


def _tensor_causes(tensor: TensorDifference) -> Iterator[str]:
    was, now = tensor.before.origins, tensor.after.origins
    lines = [*_by("now by", now, was), *_by("was by", was, now)]
    # The same may split it along another dim.
    yield from lines or _by("by", now, ())


def _sent_lines(one: SentDifference) -> Iterator[str]:
    axes = "groups that no axes make" if one.axes is None else ", ".join(one.axes)
    moved = _change(_bytes(one.before), _bytes(one.after))
    seconds = [
        0.0 if sent is None else sent.seconds for sent in (one.before, one.after)
    ]
    if None not in seconds:
        moved += f", {_times(*seconds)}"
    yield f"{one.what}: {one.kind} along {axes} at {shown_name(one.at)}, {moved}"


def _sent_causes(one: SentDifference) -> Iterator[str]:
    now, was = (sent.origins if sent else () for sent in (one.after, one.before))
    left = {origin.root for origin in was}
    both = [origin for origin in now if origin.root in left]
    yield from _by("by", both, ())
    yield from _by("now by", now, both)
    yield from _by("was by", was, both)


def _by(how: str, origins: Sequence[Origin], others: Sequence[Origin]) -> Iterator[str]:
    """Where axes begin that only these have: what was asked for is the first."""
    left = {origin.root for origin in others}
    roots = [o.root for o in origins if o.root not in left]
    roots.sort(key=lambda root: not root.is_asked)
    yield from dict.fromkeys(f"{how} {root}" for root in roots)


def _change(before: int, after: int) -> str:
    return f"{bytes_text(before)} -> {bytes_text(after)}"


def _times(before: float, after: float) -> str:
    return f"{1e3 * before:.4g} ms -> {1e3 * after:.4g} ms"


def _bytes(sent: Sent | None) -> int:
    return sent.bytes if sent else 0


def _most(pair: TensorDifference) -> int:
    return max(pair.before.bytes_per_device, pair.after.bytes_per_device)


def _total_bytes(side: Side) -> int:
    return sum(one.bytes for one in side.sent.values())


def _total_seconds(side: Side) -> float | None:
    each = [one.seconds for one in side.sent.values()]
    return None if None in each else sum(each)


def _argument_bytes(side: Side) -> int:
    return sum(
        tensor.bytes_per_device
        for name, tensor in side.tensors.items()
        if name.startswith("argument ")
    )
