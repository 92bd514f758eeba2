"""Reads tests/some_cases.txt, the cases that `make test` runs of tests that have many.

A line has a test, the cases that run, and last a mark of each case that is left out:
what has no mark, such as a new case, runs.
"""

import pathlib
import zlib

SOME_CASES = pathlib.Path(__file__).parents[1] / "some_cases.txt"


def left_cases() -> dict[str, set[str]]:
    """By test the marks of the cases that `make test` leaves to `make test-all`."""
    left = {}
    for line in SOME_CASES.read_text().splitlines():
        if not line.startswith("#"):
            name, *_, marks = line.split("\t")
            left[name] = set(marks.split())
    return left


def mark_of(case: str) -> str:
    """What stands for a case that is left out."""
    return f"{zlib.crc32(case.encode()):08x}"
