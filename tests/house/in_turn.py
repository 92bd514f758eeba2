"""Runs pytest for one group of folders after another, and counts all.

    python -m tests.house.in_turn [arguments of pytest]

TF keeps what its XLA has compiled as long as a process lives: of a small function of 12
products 1.5 MB where it is lowered, 3.5 MB where it is compiled (TF 2.21). Two workers
that ran all tests held 21 GB before two thirds were done, those that ran the tests of
attention alone 15 GB at their end.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

TESTS = pathlib.Path(__file__).parents[1]
# The first groups; what they leave of each room is one more group.
_FIRST = (
    ("framework/functions/fit",),
    ("framework/compiler", "framework/repair", "framework/updates"),
    ("layers/attention/blocks",),
    ("layers/stacks",),
    ("trainers",),
)
_ROOMS = ("framework/functions", "framework", "layers/attention", "layers", ".")
_COUNTS = re.compile(r"(\d+) ([a-z]+)")
_CLOSING = re.compile(r"(=+ )?(\d+ [a-z]+|no tests ran)\b.* in [\d.]+s\b")


def groups() -> list[list[str]]:
    """Paths of the tests, by group."""
    apart = {*_ROOMS, *(part for group in _FIRST for part in group)}
    rest = [
        [path for path in sorted((TESTS / room).iterdir()) if _has_tests(path)]
        for room in _ROOMS
    ]
    named = [[path.relative_to(TESTS).as_posix() for path in group] for group in rest]
    left = [[part for part in group if part not in apart] for group in named]
    return [[f"tests/{part}" for part in group] for group in (*_FIRST, *left)]


def _has_tests(path: pathlib.Path) -> bool:
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return any(file.match("test_*.py") for file in files)


def run(arguments: Sequence[str]) -> int:
    """Runs all groups; returns 0 or the exit status of the first that failed."""
    start, counts = time.monotonic(), collections.Counter()
    statuses = []
    for paths in groups():
        command = [sys.executable, "-m", "pytest", *arguments, *paths]
        closing = ""
        with subprocess.Popen(
            command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                closing = line if _CLOSING.match(line) else closing
        for number, what in _COUNTS.findall(closing):
            counts[what.removesuffix("s")] += int(number)
        statuses.append(process.returncode)
    seconds = time.monotonic() - start
    summary = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"===== {summary or 'no tests ran'} in {seconds:.2f}s, all groups =====")
    empty = pytest.ExitCode.NO_TESTS_COLLECTED
    if set(statuses) == {empty}:
        return empty
    return next((status for status in statuses if status not in (0, empty)), 0)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
