"""The smallest programs of the tables of faults and of workarounds, as cases."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from meshwright.framework.compiler.repair import table
from meshwright.framework.compiler.repair.table.faults import FAULTS
from meshwright.framework.compiler.stablehlo.rewrites import workarounds
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
        try:
            return case_of(self.smallest.program)
        except ValueError as error:
            row = f"program {self.name!r} of row {self.fault.name!r}"
            raise ValueError(f"{row}: {error}") from error

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


def refuse_twice(sources: Mapping[str, str]) -> None:
    """Refuses sources by their names if two rows, or two programs, have one name.

    Of two programs in one row Python keeps the last without a word.

    Raises:
      ValueError: the message has both places.
    """
    places: dict[tuple[str, str], str] = {}
    for file, text in sources.items():
        for what, name, line in _named(ast.parse(text)):
            place = f"{file}:{line}"
            if (what, name) in places:
                raise ValueError(
                    f"{places[what, name]} and {place} both have a {what} named "
                    f"{name!r}: give one of them another name"
                )
            places[what, name] = place


def _named(module: ast.Module) -> Iterator[tuple[str, str, int]]:
    """What is named, its name and its line, of each row and program of a module."""
    for node in ast.walk(module):
        fields = {k.arg: k.value for k in getattr(node, "keywords", ())}
        if not isinstance(node, ast.Call) or "smallest" not in fields:
            continue
        keys = getattr(fields["smallest"], "keys", ())
        for what, value in ("row", fields.get("name")), *(("program", k) for k in keys):
            if isinstance(value, ast.Constant):
                yield what, value.value, value.lineno


_FILES = (*pathlib.Path(table.__path__[0]).glob("*.py"), workarounds.__file__)
refuse_twice({pathlib.Path(f).name: pathlib.Path(f).read_text() for f in _FILES})
# A program may meet several faults, of which the first is repaired.
OF_FAULTS = list(known_failures(FAULTS, tuple(fault.name for fault in FAULTS)))
OF_WORKAROUNDS = list(known_failures(WORKAROUNDS))
KNOWN_FAILURES = [*OF_FAULTS, *OF_WORKAROUNDS]
