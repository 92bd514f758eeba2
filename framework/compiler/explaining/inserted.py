"""The collectives that the partitioner inserted, by the TF op at which each is."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.framework.compiler.explaining.provenance import Transfer
from meshwright.framework.compiler.hlo.hlo_text import HloModule, itemsize
from meshwright.framework.compiler.hlo.report import Collective, collectives_of
from meshwright.framework.compiler.lowering.sources import innermost_name
from meshwright.framework.sizes import bytes_text, counted

if TYPE_CHECKING:
    from meshwright.framework.compiler.explaining.explain import RematerializedTensor
    from meshwright.framework.compiler.program import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class InsertedCollective:
    """A collective that the partitioner inserted at a tensor.

    Args:
      name: of its HLO instruction, which is one for all tensors that share it.
      kind: "all-reduce", "all-gather", ...
      axes: mesh axes, or parts, that it spans; None if no axes make its groups.
      bytes: of its results on one device, each time it runs: those of all ops for
        which XLA combined it.
      own_bytes: of the results that are the op's own; None if nothing says which are.
      times: how often one call of the program runs it: trips of the loops around it
        multiplied; None if a loop's are not known.
      in_loop: whether it is in the body of a loop.
      shared_by: for how many ops XLA combined it.
      shapes: of the op's own results on one device; of all if `own_bytes` is None.
      between: with reasons, the shardings that it brings together; () if propagation
        has nothing to send of this size, or XLA gathers something else of it in full.
      gathers: with reasons, the tensor that it gathers in full though no annotation
        asks for that; None if it is no such gather.
    """

    name: str
    kind: str
    axes: tuple[str, ...] | None
    bytes: int
    own_bytes: int | None
    times: int | None
    in_loop: bool
    shared_by: int
    shapes: tuple[tuple[int, ...], ...] = ()
    between: tuple[Transfer, ...] = ()
    gathers: RematerializedTensor | None = None

    @property
    def most(self) -> int:
        """Bytes that it may move at the op in a call; in an unknown loop once."""
        return self.at_most * (self.times or 1)

    @property
    def at_most(self) -> int:
        """Bytes that may be the op's own each time it runs: all, if none are known."""
        return self.bytes if self.own_bytes is None else self.own_bytes

    @property
    def where(self) -> str:
        """`along X`."""
        if self.axes is None:
            return "in groups that no axes make"
        return f"along {', '.join(self.axes) or 'no axis'}"

    @property
    def text(self) -> str:
        """`all-gather along X, 33 kB, 40 times in a loop`."""
        text = f"{self.kind} {self.where}"
        if self.own_bytes is not None:
            text += f", {bytes_text(self.own_bytes)}"
        if self.in_loop:
            times = "unknown times" if self.times is None else f"{self.times} times"
            text += f", {times} in a loop"
        return ", ".join(filter(None, (text, self.shared_text)))

    @property
    def shared_text(self) -> str:
        """`of 145 KiB for 13 ops`; "" of a collective that is the op's alone."""
        if self.shared_by == 1 and self.own_bytes is not None:
            return ""
        every = f"of {bytes_text(self.bytes)}"
        if self.own_bytes is not None:
            return f"{every} for {self.shared_by} ops"
        if self.shared_by == 1:
            return f"{every} for {counted(len(self.shapes), 'tensor')}"
        return f"{every} shared by {self.shared_by} ops"


def inserted_collectives(
    program: Program,
) -> tuple[dict[str, list[InsertedCollective]], list[InsertedCollective]]:
    """The collectives by TF op, and those without one."""
    module = HloModule(program.hlo_text())
    by_op, nameless = collections.defaultdict(list), []
    for collective in collectives_of(module, program.mesh):
        loops = module.loops_around(module.by_name[collective.name].computation)
        names = _combined_names(collective.op_name)
        for name, own in _shared(names, collective):
            inserted = InsertedCollective(
                name=collective.name,
                kind=collective.kind,
                axes=collective.axes,
                bytes=collective.bytes,
                own_bytes=None if own is None else _bytes(collective, own),
                times=_product([loop.trips for loop in loops]),
                in_loop=bool(loops),
                shared_by=len(set(names)),
                shapes=tuple(collective.shapes[n] for n in own or _all(collective)),
            )
            (by_op[name] if name else nameless).append(inserted)
    return by_op, nameless


def _combined_names(op_name: str) -> list[str]:
    """`a/(b:c)/d` names two ops whose collectives XLA combined into one.

    The names are in the order of its results; "" is that of no TF op.
    """
    names = [op_name]
    if match := re.fullmatch(r"(.*?)\(([^()]*:[^()]*)\)(.*)", op_name):
        names = [match[1] + part + match[3] for part in match[2].split(":")]
    return list(map(innermost_name, names))


def _shared(
    names: Sequence[str], collective: Collective
) -> Iterator[tuple[str, list[int] | None]]:
    """Each op of a collective, and the numbers of the results that are its own.

    What is of no TF op has the name "". The numbers are None if there are not as many
    names as results: libtpu keeps the first name alone. What an all-to-all has several
    results of is a single tensor.
    """
    every = _all(collective)
    if len(names) == len(every):
        for name in dict.fromkeys(names):
            yield name, [n for n in every if names[n] == name]
        return
    is_single = len(names) == 1 and collective.kind == "all-to-all"
    for name in dict.fromkeys(filter(None, names)) or [""]:
        yield name, every if is_single else None


def _all(collective: Collective) -> list[int]:
    return list(range(len(collective.shapes)))


def _bytes(collective: Collective, results: Sequence[int]) -> int:
    return sum(
        math.prod(collective.shapes[n]) * itemsize(collective.dtypes[n])
        for n in results
    )


def _product(trips: Sequence[int | None]) -> int | None:
    product = 1
    for count in trips:
        if count is None:
            return None
        product *= count
    return product
