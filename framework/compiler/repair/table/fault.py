"""The rows of the table of faults; `faults` has the table."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping

from meshwright.framework.compiler.repair.convolutions import conv_layout
from meshwright.framework.compiler.repair.halos import halos
from meshwright.framework.compiler.repair.op_layout import (
    EvenLayout,
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.rewrites.starts import Clamped

Chosen = EvenLayout | halos.Halos | conv_layout.Layout | Clamped
"""The layout that an operation is to have."""


class Outcome(enum.Enum):
    """What happens to a program that meets a fault and is not repaired."""

    WRONG = "wrong numbers"
    REFUSED = "XLA refuses its own program"
    ABORTED = "the process ends"
    SLOW = "right, at a cost"


@dataclasses.dataclass(frozen=True)
class Smallest:
    """The smallest program known to meet a fault.

    Args:
      outcome: what happens to it.
      program: a TF expression, and the shardings of its tensors at the program's border
        and of its annotations, in the form in which the operator matrix prints a case.
      shardy, gspmd: whether the program meets the fault under that partitioner.
    """

    outcome: Outcome
    program: str
    shardy: bool = True
    gspmd: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table.

    Args:
      name: the name of the fault, in a few words.
      what: the operation and its layout, for messages and docs.
      more: which of these, or why; for docs.
      ops: the operations that can meet it.
      choose: returns the layout that XLA gets right for an operation's completed
        layout; None if the operation does not meet the fault.
      repair: what `choose` does, for docs, and for messages if it changes no sharding.
      smallest: programs that meet it, by name.
      until: the first jaxlib without it; None while there is none.
      links: known upstream reports of it.
    """

    name: str
    what: str
    ops: tuple[str, ...]
    choose: Callable[[OpLayout], Chosen | None]
    repair: str
    smallest: Mapping[str, Smallest]
    more: str = ""
    until: tuple[int, ...] | None = None
    links: tuple[str, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Whether XLA gets the op right without the repair, and only takes longer."""
        return all(
            program.outcome is Outcome.SLOW for program in self.smallest.values()
        )

    def is_in(self, jaxlib: tuple[int, ...]) -> bool:
        """Whether a version of jaxlib has the fault."""
        return self.until is None or jaxlib < self.until


def evenly(
    meets: Callable[[OpLayout], bool], *kept: FactorKind, agreed: bool = False
) -> Callable[[OpLayout], Chosen | None]:
    """Lays an operation that meets a fault out evenly, split by some factors only.

    Factors that its tensors split alike come first, if `agreed`.
    """

    def choose(layout: OpLayout) -> Chosen | None:
        return even_layout(layout, kept, agreed=agreed) if meets(layout) else None

    return choose
