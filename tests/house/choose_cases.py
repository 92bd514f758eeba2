"""Chooses the cases that `make test` runs; run, it rewrites tests/some_cases.txt.

`make cases` runs all tests but the slow ones, which takes an hour on two cores. As a
plugin of pytest this file notes what each of them costs.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Iterable, Mapping

import coverage
import pytest
from coverage.numbits import numbits_to_nums

from tests.house import in_turn
from tests.house.some_cases import SOME_CASES, mark_of

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / ".pytest_cache" / "cases"
LEAST = 0.97  # Of the lines that all tests run; some differ from run to run.
# Of all cores. Fixtures that other cases have paid for come on top.
MOST_SECONDS = 600.0
_HEAD = """\
# What `make test` runs of tests that have many cases: the test, then the cases, split
# by tabs, and last a mark of each case that is left to `make test-all`. What is not
# here is new, and runs; so do cases marked `always`. Written by `make cases`, by cost
# and lines of cases.
"""
Lines = set[tuple[int, int]]
"""Numbers of a file and of a line in it."""


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Notes the CPU seconds of a test, with those of processes that it starts."""
    start = _cpu_seconds()
    yield
    cost = {
        "case": item.nodeid,
        "seconds": _cpu_seconds() - start,
        "always": item.get_closest_marker("always") is not None,
    }
    with (FOLDER / f"costs.{os.getpid()}").open("a") as file:
        file.write(json.dumps(cost) + "\n")


def chosen(
    seconds: Mapping[str, float],
    lines: Mapping[str, Lines],
    always: Iterable[str] = (),
) -> set[str]:
    """Cases that run nearly all lines, and of every test a case while time is left.

    Args:
      seconds: of each case.
      lines: that each case runs.
      always: cases to keep whatever they cost.
    """
    total = len(set().union(*lines.values()))
    kept = set(always)
    covered = set().union(*(lines[case] for case in kept))
    left = {
        case: rest
        for case, run in lines.items()
        if case not in kept and (rest := run - covered)
    }
    while len(covered) < LEAST * total:
        best = max(left, key=lambda c: len(left[c] - covered) / (seconds[c] + 0.05))
        covered |= left.pop(best)
        kept.add(best)
        left = {case: rest for case in left if (rest := left[case] - covered)}
    spent = sum(seconds[case] for case in kept)
    for case in _in_turns(seconds, kept):
        if spent + seconds[case] <= MOST_SECONDS:
            spent += seconds[case]
            kept.add(case)
    return kept


def _in_turns(seconds: Mapping[str, float], kept: Iterable[str]) -> list[str]:
    """All other cases: first the cheapest of tests without any, then second ones."""
    count = collections.Counter(_test(case) for case in kept)
    turns = {}
    for case in sorted(seconds, key=seconds.get):
        if case not in kept:
            turns[case] = count[_test(case)]
            count[_test(case)] += 1
    return sorted(turns, key=lambda case: (turns[case], seconds[case]))


def text(cases: Iterable[str], kept: Iterable[str]) -> str:
    """The file: of each test that does not run in all of its cases those it runs in."""
    by_test = collections.defaultdict(list)
    for case in cases:
        by_test[_test(case)].append(case)
    listed = []
    for test, of in sorted(by_test.items()):
        names = {case: case[len(test) + 1 : -1] for case in of}
        if left := [mark_of(name) for case, name in names.items() if case not in kept]:
            runs = [name for case, name in names.items() if case in kept]
            listed.append("\t".join([test, *runs, " ".join(sorted(left))]))
    return _HEAD + "\n".join(listed) + "\n"


def _test(case: str) -> str:
    return case.partition("[")[0]


def _measured() -> tuple[dict[str, float], dict[str, Lines], set[str]]:
    """Of each case the seconds and the lines, and those marked `always`."""
    costs = [json.loads(n) for file in FOLDER.glob("costs.*") for n in file.open()]
    seconds = {cost["case"]: cost["seconds"] for cost in costs}
    always = {cost["case"] for cost in costs if cost["always"]}
    data = coverage.CoverageData(str(FOLDER / "coverage"))
    data.read()
    lines: dict[str, Lines] = {case: set() for case in seconds}
    query = (
        "select context, file_id, numbits from line_bits "
        "join context on context.id = context_id"
    )
    with data._connect() as database, database.execute(query) as cursor:
        for context, file, numbits in cursor:
            if (case := context.rpartition("|")[0]) in lines:
                lines[case] |= {(file, line) for line in numbits_to_nums(numbits)}
    return seconds, lines, always


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in FOLDER.iterdir():
        file.unlink()
    (FOLDER / "settings").write_text(
        "[run]\nsource = framework, layers, tasks, trainers\n"
        f"data_file = {FOLDER / 'coverage'}\nparallel = true\n"
    )
    arguments = [
        *("-n2", "-mnot slow", "-p", __spec__.name),
        *("--cov", f"--cov-config={FOLDER / 'settings'}", "--cov-context=test"),
        *("--cov-report=", "--cov-append"),
    ]
    if status := in_turn.run(arguments):
        return status
    seconds, lines, always = _measured()
    kept = chosen(seconds, lines, always)
    SOME_CASES.write_text(text(seconds, kept))
    spent = sum(seconds[case] for case in kept)
    print(f"{len(kept)} of {len(seconds)} cases, {spent:.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
