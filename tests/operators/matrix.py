"""Draws cases for every operator and judges them; lists what is not right, shrunk.

python -m tests.operators.matrix --cases=10000 --seed=7 --workers=2
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import random
import time
import zlib

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from meshwright.framework.compiler.program import Partitioner
from tests.operators.apart import Outcome, Verdict, judge
from tests.operators.cases import MESHES, Case
from tests.operators.draws import cases
from tests.operators.operators import OPERATORS

_SHRINK_TRIES = 80
_CASES_IN_A_PROGRAM = int(os.environ.get("CIP", 6))


class _Found(Exception):
    """A case fails as asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """A case and what became of it."""

    group: Group
    case: Case
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are judged in one program.

    Args:
      operator: its name.
      partitioner: which.
      mesh: the number of one of `MESHES`.
      count: of the cases.
      seed: of the run.
    """

    operator: str
    partitioner: Partitioner
    mesh: int
    count: int
    seed: str

    def drawn(self) -> list[Case]:
        found: dict[str, Case] = {}
        self._each(lambda case: found.setdefault(str(case), case), [Phase.generate])
        return list(found.values())[1 : self.count + 1]

    def shrunk(self, kind: str, known: dict[str, Verdict]) -> tuple[Case, Verdict]:
        """The simplest case that fails in this way, as far as some tries get."""
        tries, last = 0, None

        def check(case):
            nonlocal tries, last
            name = str(case)
            if name not in known and last is not None and tries < _SHRINK_TRIES:
                tries += 1
                (known[name],) = judge([case], self.partitioner)
            verdict = known.get(name)
            if verdict is not None and verdict.kind == kind:
                last = case, verdict
                raise _Found

        try:
            self._each(check, [Phase.generate, Phase.shrink])
        except _Found:
            pass
        return last

    def _each(self, check, phases) -> None:
        @settings(
            max_examples=self.count + 1,  # The first, the simplest of all, is dropped.
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )
        @given(cases(self.operator, MESHES[self.mesh]))
        def each(case):
            check(case)

        own = f"{self.operator} {self.partitioner.value} {self.mesh} {self.seed}"
        seed(zlib.crc32(own.encode()))(each)()


def judged(group: Group) -> list[Judged]:
    drawn = group.drawn()
    pairs = zip(drawn, judge(drawn, group.partitioner), strict=True)
    return [Judged(group=group, case=case, verdict=one) for case, one in pairs]


def shrunk(of: Judged, known: dict[str, Verdict]) -> Judged:
    """The simplest like it; what is right alone stays as it is."""
    (alone,) = judge([of.case], of.group.partitioner)
    if alone.kind != of.verdict.kind:
        text = f"(alone: {alone.kind}) {of.verdict.text}"
        return dataclasses.replace(of, verdict=Verdict(of.verdict.outcome, text))
    case, verdict = of.group.shrunk(of.verdict.kind, known) or (of.case, of.verdict)
    return dataclasses.replace(of, case=case, verdict=verdict)


def groups(operators, total: int, seed: str) -> list[Group]:
    """So many cases, `_CASES_IN_A_PROGRAM` each, alike for all operators."""
    kinds = list(itertools.product(Partitioner, range(len(MESHES))))
    found, rounds = [], 0
    while total > 0:
        for operator in operators:
            own = random.Random(f"{operator} {seed}")
            partitioner, mesh = own.sample(kinds, len(kinds))[rounds % len(kinds)]
            count = min(total, _CASES_IN_A_PROGRAM)
            total -= count
            if count:
                group = Group(
                    operator=operator,
                    partitioner=partitioner,
                    mesh=mesh,
                    count=count,
                    seed=f"{seed}.{rounds // len(kinds)}",
                )
                found.append(group)
        rounds += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--operators", nargs="*", default=list(OPERATORS))
    parser.add_argument("--no_shrinking", action="store_true")
    args = parser.parse_args()
    print(f"SEED={args.seed}", flush=True)
    start = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(
        args.workers, multiprocessing.get_context("spawn")
    ) as pool:
        found = []
        asked = groups(args.operators, args.cases, args.seed)
        for done in pool.map(judged, asked):
            found += done
        took = time.monotonic() - start
        faults = collections.defaultdict(list)
        for one in found:
            if one.verdict.outcome.is_fault:
                faults[one.group.operator, one.verdict.kind].append(one)
        report(found, faults, took)
        if not args.no_shrinking:
            shrink(pool, found, faults)
    print(f"SEED={args.seed}")
    return 1 if faults else 0


def report(found, faults, took) -> None:
    totals = collections.Counter(one.verdict.outcome for one in found)
    print(f"{len(found)} cases in {took:.0f} s, {len(found) / took:.2f} a second")
    for outcome in Outcome:
        if totals[outcome]:
            print(f"  {totals[outcome]:6} {outcome.value}")
    by = collections.defaultdict(list)
    for one in found:
        by[one.group.operator].append(one)
    print("operator: cases, faults, seconds for a case")
    for operator, of in by.items():
        bad = sum(one.verdict.outcome.is_fault for one in of)
        each = sum(one.verdict.seconds for one in of) / len(of)
        print(f"  {operator}: {len(of)}, {bad}, {each:.2f}")
    for (operator, kind), of in faults.items():
        which = sorted({one.group.partitioner.value for one in of})
        print(f"  {len(of):5} {operator} ({', '.join(which)}): {kind}", flush=True)


def shrink(pool, found, faults) -> None:
    known = collections.defaultdict(dict)
    for one in found:
        known[one.group][str(one.case)] = one.verdict
    tasks = {
        pool.submit(shrunk, of[0], known[of[0].group]): key
        for key, of in faults.items()
    }
    for done in concurrent.futures.as_completed(tasks):
        operator, kind = tasks[done]
        one, of = done.result(), faults[tasks[done]]
        which = sorted({other.group.partitioner.value for other in of})
        print(f"\n{len(of)} of {operator} ({', '.join(which)}): {kind}")
        print(
            f"{one.group.partitioner.value}: {one.case}\n  {one.verdict.text[-1500:]}",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
