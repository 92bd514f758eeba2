"""The smallest programs of the tables of faults and of workarounds, as cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from meshwright.framework.compiler.repair.table.faults import FAULTS
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    KnownFault,
    Smallest,
)
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    Outcome as Expected,
)
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import WORKAROUNDS
from meshwright.framework.compiler.xla.jax_bridge import JAXLIB
from meshwright.framework.compiler.xla.partitioner import Partitioner
from tests.operators.judging.apart import Outcome
from tests.operators.judging.cases import Case
from tests.operators.judging.printed import case_of

OUTCOMES = {
    Expected.WRONG: Outcome.WRONG,
    Expected.REFUSED: Outcome.REFUSED,
    Expected.ABORTED: Outcome.ENDED,
    Expected.SLOW: Outcome.RIGHT,
}


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """A program that meets a fault, under one partitioner.

    Args:
      name: of the program and the partitioner.
      fault: the row of its table.
      smallest: the program.
      partitioner: which.
      without: the rows without which it fails.
    """

    name: str
    fault: KnownFault
    smallest: Smallest
    partitioner: Partitioner
    without: tuple[str, ...]

    @property
    def case(self) -> Case:
        return case_of(self.smallest.program)

    @property
    def outcome(self) -> Outcome:
        """What becomes of it without these rows, with the jaxlib of this machine."""
        mended = not self.fault.is_in(JAXLIB)
        return Outcome.RIGHT if mended else OUTCOMES[self.smallest.outcome]

    @property
    def is_slow(self) -> bool:
        """Whether it is right without these rows, and only takes longer."""
        return self.smallest.outcome is Expected.SLOW and self.fault.is_in(JAXLIB)


def known_failures(
    rows: Iterable[KnownFault], without: tuple[str, ...] = ()
) -> Iterator[KnownFailure]:
    """The programs of rows, each of which fails without some rows or its own."""
    for row in rows:
        for name, smallest in row.smallest.items():
            for partitioner in Partitioner:
                if getattr(smallest, partitioner.value):
                    yield KnownFailure(
                        f"{name}-{partitioner.value}",
                        row,
                        smallest,
                        partitioner,
                        without or (row.name,),
                    )


# A program may meet several faults, of which the first is repaired.
OF_FAULTS = list(known_failures(FAULTS, tuple(fault.name for fault in FAULTS)))
OF_WORKAROUNDS = list(known_failures(WORKAROUNDS))
KNOWN_FAILURES = [*OF_FAULTS, *OF_WORKAROUNDS]
