"""What is known of a fault of XLA: its smallest programs, and the jaxlib without it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


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
class KnownFault:
    """A row of a table of faults.

    Args:
      name: the name of the fault, in a few words.
      what: what XLA gets wrong, for docs.
      repair: what is done about it, for docs.
      smallest: programs that meet it, by name.
      until: the first jaxlib without it; None while there is none.
      links: known upstream reports of it.

    Raises:
      ValueError: no program shows it, or one of them does so under no partitioner, or
        has no outcome or text; `until` is no version.
    """

    name: str
    what: str
    repair: str
    smallest: Mapping[str, Smallest]
    until: tuple[int, ...] | None = None
    links: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.smallest:
            raise ValueError(
                f"row {self.name!r} has no program that shows it: give `smallest` one"
            )
        if self.until is not None and not (
            isinstance(self.until, tuple)
            and 1 <= len(self.until) <= 3
            and all(type(number) is int for number in self.until)
        ):
            raise ValueError(
                f"row {self.name!r}: until = {self.until!r} is no version of jaxlib: "
                "write up to three numbers, such as (0, 10, 1)"
            )
        for name, program in self.smallest.items():
            if not isinstance(program.outcome, Outcome) or not program.program.strip():
                raise ValueError(
                    f"program {name!r} of row {self.name!r} is Smallest("
                    f"{program.outcome!r}, {program.program!r}): give it an Outcome, "
                    "and the text of a case"
                )
            if not program.shardy and not program.gspmd:
                raise ValueError(
                    f"program {name!r} of row {self.name!r} meets it under neither "
                    "partitioner: leave out shardy=False or gspmd=False"
                )

    def is_in(self, jaxlib: tuple[int, ...]) -> bool:
        """Whether a version of jaxlib has the fault."""
        return self.until is None or jaxlib < self.until
