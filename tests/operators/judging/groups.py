"""Cases that are drawn and judged together, and how a fault is shrunk."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import zlib
from collections.abc import Callable, Mapping, Sequence

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import did_you_mean
from tests.operators.definitions.operators import OPERATORS
from tests.operators.judging.apart import Verdict, judge
from tests.operators.judging.cases import MESHES, Case
from tests.operators.judging.draws import cases, layouts
from tests.operators.judging.layouts import LAYOUTS

# A program costs as much again as a case in it, or as several of a single op.
CASES_IN_A_PROGRAM = 6
_LAYOUTS_IN_A_PROGRAM = 24
# The numbers of meshes of three axes and of two.
_LAYOUT_MESHES = (2, 0)
_SHRINK_TRIES = 100
_LONG = 1200


class _FoundError(Exception):
    """A case fails as asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are drawn, and judged in one program.

    Args:
      operator: its name in `OPERATORS` or `LAYOUTS`.
      partitioner: which.
      mesh: the number of one of `MESHES`.
      count: of the cases, at most.
      seed: other cases for each.
    """

    operator: str
    partitioner: Partitioner
    mesh: int
    count: int
    seed: str

    def __post_init__(self):
        known = [*OPERATORS, *LAYOUTS]
        if self.operator not in known:
            raise ValueError(
                f"no operator is called {self.operator!r}"
                f"{did_you_mean(self.operator, known)}"
            )

    def drawn(self) -> list[Case]:
        """The same each time; fewer than asked for where there are no more."""
        cases: dict[str, Case] = {}
        self.each(lambda case: cases.setdefault(str(case), case), [Phase.generate])
        return list(cases.values())[1 : self.count + 1]

    def each(self, check: Callable[[Case], object], phases: Sequence[Phase]) -> None:
        """Calls a function with each case, after the simplest of all."""
        draw = layouts if self.operator in LAYOUTS else cases

        @settings(
            max_examples=self.count + 1,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )
        @given(draw(self.operator, MESHES[self.mesh]))
        def checked(case):
            check(case)

        text = f"{self.operator} {self.partitioner.value} {self.mesh} {self.seed}"
        seed(zlib.crc32(text.encode()))(checked)()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """A case and what became of it."""

    group: Group
    case: Case
    verdict: Verdict

    def __str__(self) -> str:
        text = self.verdict.text.strip()
        if len(text) > _LONG:
            text = f"{text[: _LONG // 2]} ... {text[-_LONG // 2 :]}"
        return f"{self.case}\n  {self.verdict.outcome.value}: {text}"


def judged(group: Group) -> list[Judged]:
    """All cases of a group."""
    drawn = group.drawn()
    pairs = zip(drawn, judge(drawn, group.partitioner), strict=True)
    return [Judged(group=group, case=case, verdict=verdict) for case, verdict in pairs]


def judged_without(of: Judged, row: str) -> Judged | None:
    """What becomes of a case without a row of the table of faults.

    None if it does not meet the row alone.
    """
    (alone,) = judge([of.case], of.group.partitioner)
    if row not in alone.repairs:
        return None
    (without,) = judge([of.case], of.group.partitioner, without=[row])
    return dataclasses.replace(of, verdict=without)


def shrunk(of: Judged, known: Mapping[str, Verdict]) -> Judged:
    """The simplest case that fails alike, as far as some tries get.

    What is right alone stays as it is.

    Args:
      of: a case that fails.
      known: for each of the group's cases, by its text, what became of it.
    """
    group, kind, known = of.group, of.verdict.kind, dict(known)
    (alone,) = judge([of.case], group.partitioner)
    if alone.kind != kind:
        text = f"{of.verdict.text}\n  but alone it is {alone.kind}"
        return dataclasses.replace(of, verdict=Verdict(of.verdict.outcome, text))
    tries, last = 0, of

    def check(case):
        nonlocal tries, last
        name = str(case)
        if name not in known and last is not of and tries < _SHRINK_TRIES:
            tries += 1
            (known[name],) = judge([case], group.partitioner)
        if name in known and known[name].kind == kind:
            last = dataclasses.replace(of, case=case, verdict=known[name])
            raise _FoundError

    with contextlib.suppress(_FoundError):
        group.each(check, [Phase.generate, Phase.shrink])
    return last


def groups(
    operators: Sequence[str],
    total: int,
    seed: str,
    partitioners: Sequence[Partitioner] = tuple(Partitioner),
) -> list[Group]:
    """So many cases, alike for all operators; partitioners and meshes take turns."""
    turns = {}
    for operator in operators:
        meshes = _LAYOUT_MESHES if operator in LAYOUTS else range(len(MESHES))
        kinds = list(itertools.product(partitioners, meshes))
        turns[operator] = random.Random(f"{operator} {seed}").sample(kinds, len(kinds))
    drawn: list[Group] = []
    for number in itertools.count():
        for operator in operators:
            most = _LAYOUTS_IN_A_PROGRAM if operator in LAYOUTS else CASES_IN_A_PROGRAM
            count = min(total, most)
            if not count:
                return drawn
            total -= count
            turn, again = number % len(turns[operator]), number // len(turns[operator])
            partitioner, mesh = turns[operator][turn]
            group = Group(
                operator=operator,
                partitioner=partitioner,
                mesh=mesh,
                count=count,
                seed=f"{seed}.{again}",
            )
            drawn.append(group)
    return drawn
