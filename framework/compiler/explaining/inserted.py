"""The collectives that the partitioner inserted, by the TF op at which each is."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.framework.compiler.explaining.provenance import Transfer
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.report import collectives_of
from meshwright.framework.compiler.lowering.sources import innermost_name

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
      bytes: of its result on one device, each time it runs.
      times: how often one call of the program runs it: trips of the loops around it
        multiplied; None if a loop's are not known.
      in_loop: whether it is in the body of a loop.
      shared_by: for how many ops XLA combined it; `bytes` is for all of them.
      shapes: of its results on one device.
      between: with reasons, the shardings that it brings together; () if propagation
        has nothing to send of this size, or XLA gathers something else of it in full.
      gathers: with reasons, the tensor that it gathers in full though no annotation
        asks for that; None if it is no such gather.
    """

    name: str
    kind: str
    axes: tuple[str, ...] | None
    bytes: int
    times: int | None
    in_loop: bool
    shared_by: int
    shapes: tuple[tuple[int, ...], ...] = ()
    between: tuple[Transfer, ...] = ()
    gathers: RematerializedTensor | None = None


def inserted_collectives(
    program: Program,
) -> tuple[dict[str, list[InsertedCollective]], list[InsertedCollective]]:
    """The collectives by TF op, and those without one."""
    module = HloModule(program.hlo_text())
    by_op, nameless = collections.defaultdict(list), []
    for collective in collectives_of(module, program.mesh):
        loops = module.loops_around(module.by_name[collective.name].computation)
        names = _combined_names(collective.op_name)
        inserted = InsertedCollective(
            name=collective.name,
            kind=collective.kind,
            axes=collective.axes,
            bytes=collective.bytes,
            times=_product([loop.trips for loop in loops]),
            in_loop=bool(loops),
            shared_by=max(1, len(names)),
            shapes=collective.shapes,
        )
        for name in names:
            by_op[name].append(inserted)
        nameless += [] if names else [inserted]
    return by_op, nameless


def _combined_names(op_name: str) -> list[str]:
    """`a/(b:c)/d` names two ops whose collectives XLA combined into one."""
    if match := re.fullmatch(r"(.*?)\(([^()]*:[^()]*)\)(.*)", op_name):
        names = [match[1] + part + match[3] for part in match[2].split(":")]
    else:
        names = [op_name]
    return list(dict.fromkeys(filter(None, map(innermost_name, names))))


def _product(trips: Sequence[int | None]) -> int | None:
    product = 1
    for count in trips:
        if count is None:
            return None
        product *= count
    return product
