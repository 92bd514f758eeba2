"""The smallest programs of the table of faults, as cases of the matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.framework.compiler.repair.table.fault import Fault, Smallest
from meshwright.framework.compiler.repair.table.fault import Outcome as Expected
from meshwright.framework.compiler.repair.table.faults import FAULTS
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
      fault: the row of the table.
      smallest: the program.
      partitioner: which.
    """

    name: str
    fault: Fault
    smallest: Smallest
    partitioner: Partitioner

    @property
    def case(self) -> Case:
        return case_of(self.smallest.program)

    @property
    def outcome(self) -> Outcome:
        """What becomes of it without the repair."""
        return OUTCOMES[self.smallest.outcome]


def known_failures() -> Iterator[KnownFailure]:
    for fault in FAULTS:
        for name, smallest in fault.smallest.items():
            for partitioner in Partitioner:
                if getattr(smallest, partitioner.value):
                    label = f"{name}-{partitioner.value}"
                    yield KnownFailure(label, fault, smallest, partitioner)


KNOWN_FAILURES = list(known_failures())
