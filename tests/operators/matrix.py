"""Draws cases for every operator and judges them; lists what is not right, shrunk.

`make matrix`, or python -m tests.operators.matrix --cases=10000 --seed=7 --workers=2
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence

# TF's own kernels are the measure; see `tests/conftest.py` for why not by oneDNN.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from meshwright.framework.compiler.repair.table.faults import FAULTS  # noqa: E402
from meshwright.framework.sharding.mesh import did_you_mean  # noqa: E402
from tests.operators.definitions.operators import OPERATORS  # noqa: E402
from tests.operators.judging.apart import Outcome  # noqa: E402
from tests.operators.judging.groups import (  # noqa: E402
    Group,
    Judged,
    groups,
    judged,
    judged_without,
    shrunk,
)
from tests.operators.judging.layouts import LAYOUTS  # noqa: E402

Kind = tuple[str, str]
"""An operator, and what becomes of it: faults that probably have one cause."""
_RIGHT_TOO = 3
"""How many cases are printed that are right without a row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layouts", action="store_true", help="of single operators")
    parser.add_argument("--operators", nargs="*", help="all, if not named")
    parser.add_argument("--row", help="of the table of faults: what it is needed for")
    parser.add_argument("--no_shrinking", action="store_true")
    args = parser.parse_args()
    _check_name(parser, "operator", args.operators or [], [*OPERATORS, *LAYOUTS])
    rows = [row.name for row in FAULTS]
    _check_name(parser, "row of the table of faults", filter(None, [args.row]), rows)
    print(f"SEED={args.seed}", flush=True)
    operators = args.operators or list(LAYOUTS if args.layouts else OPERATORS)
    requested = groups(operators, args.cases, args.seed)
    spawn = multiprocessing.get_context("spawn")  # A fork lacks TF's threads.
    with concurrent.futures.ProcessPoolExecutor(args.workers, spawn) as pool:
        start = time.monotonic()
        judged = list(_all_judged(pool, requested))
        _print_totals(judged, time.monotonic() - start)
        faults = _by_kind(judged)
        if not args.no_shrinking:
            _print_shrunk(pool, judged, faults)
        if args.row:
            _print_row(pool, judged, args.row)
    print(f"SEED={args.seed}")
    return 1 if faults or len(judged) < sum(group.count for group in requested) else 0


def _check_name(
    parser: argparse.ArgumentParser,
    what: str,
    names: Iterable[str],
    known: Sequence[str],
) -> None:
    """Ends the process if `known` lacks one of `names`."""
    for name in names:
        if name not in known:
            parser.error(f"no {what} is named {name!r}{did_you_mean(name, known)}")


def _all_judged(pool, requested: Sequence[Group]) -> Iterable[Judged]:
    """All cases; a fault of a new kind is printed as it comes."""
    known = set()
    outcomes = collections.Counter()
    tasks = {pool.submit(judged, group): group for group in requested}
    for number, done in enumerate(concurrent.futures.as_completed(tasks)):
        if number and number % 100 == 0:
            sofar = ", ".join(f"{n} {outcome.value}" for outcome, n in outcomes.items())
            print(f"{number} of {len(tasks)} programs: {sofar}", flush=True)
        if done.exception():  # The matrix's own, such as an expression that TF refuses.
            print(f"{tasks[done]} is not drawn:", flush=True)
            traceback.print_exception(done.exception(), file=sys.stdout)
            continue
        for case in done.result():
            outcomes[case.verdict.outcome] += 1
            kind = case.group.operator, case.verdict.kind
            if case.verdict.outcome.is_fault and kind not in known:
                known.add(kind)
                print(f"{case.group.partitioner.value}: {case}\n", flush=True)
            yield case


def _by_kind(judged: Iterable[Judged]) -> dict[Kind, list[Judged]]:
    faults = collections.defaultdict(list)
    for case in judged:
        if case.verdict.outcome.is_fault:
            faults[case.group.operator, case.verdict.kind].append(case)
    return dict(faults)


def _print_totals(judged: Sequence[Judged], took: float) -> None:
    totals = collections.Counter(case.verdict.outcome for case in judged)
    print(f"{len(judged)} cases in {took:.0f} s, {len(judged) / took:.2f} a second")
    for outcome in Outcome:
        print(f"{totals[outcome]:7} {outcome.value}")
    repairs = collections.Counter(n for case in judged for n in case.verdict.repairs)
    for name, count in repairs.most_common():
        print(f"{count:7} repaired: {name}")
    by = collections.defaultdict(list)
    for case in judged:
        by[case.group.operator].append(case.verdict)
    print("  cases  faults  CPU seconds a case  operator")
    for operator, of in by.items():
        faults = sum(verdict.outcome.is_fault for verdict in of)
        each = sum(verdict.seconds for verdict in of) / len(of)
        print(f"{len(of):7}{faults:8}{each:20.2f}  {operator}")


def _print_shrunk(
    pool, judged: Iterable[Judged], faults: Mapping[Kind, Sequence[Judged]]
) -> None:
    known = collections.defaultdict(dict)
    for case in judged:
        known[case.group][str(case.case)] = case.verdict
    tasks = {
        pool.submit(shrunk, of[0], known[of[0].group]): (kind, of)
        for kind, of in faults.items()
    }
    for done in concurrent.futures.as_completed(tasks):
        (operator, kind), of = tasks[done]
        which = sorted({case.group.partitioner.value for case in of})
        print(f"\n{len(of)} of {operator} ({', '.join(which)}): {kind}")
        case = done.result()
        print(f"{case.group.partitioner.value}: {case}", flush=True)


def _print_row(pool, judged: Iterable[Judged], row: str) -> None:
    """How many cases that meet a row are right without it, and some of them.

    Only the first case of a program has what was repaired, for all of them.
    """
    met = {case.group for case in judged if row in case.verdict.repairs}
    cases = [case for case in judged if case.group in met]
    answers = pool.map(judged_without, cases, [row] * len(cases))
    without = [case for case in answers if case is not None]
    right = [case for case in without if not case.verdict.outcome.is_fault]
    print(f"\ncases that meet {row!r}: {len(without)}; right without it: {len(right)}")
    for case in sorted(right, key=lambda case: len(str(case.case)))[:_RIGHT_TOO]:
        print(f"{case.group.partitioner.value}: {case.case}\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
