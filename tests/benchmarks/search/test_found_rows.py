"""Rows of the papers' tables for which plans were searched, as they are kept."""

import json

import pytest

from benchmarks.search import found_rows, measured
from meshwright.trainers.planning.search.search_space import AS_CONFIGURED

ROWS = json.loads(found_rows.KEPT.read_text())


@pytest.mark.parametrize("row", ROWS)
def test_a_kept_row_is_of_its_space(row):
    kept = ROWS[row]
    space = found_rows.space_of(row)
    assert kept["topology"] == space.torus.name
    assert [plan.name for plan in space.plans] == [AS_CONFIGURED]
    assert kept["considered"] >= 10**5 and kept["propagated"] >= 10**3
    assert 1 <= len(kept["found"]) <= 16


def test_a_row_is_printed(capsys):
    found_rows.print_row(ROWS["3_32x8"])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("3_32x8 on v3:8x16: ")
    assert any(line.startswith("  paper [32, 8]") for line in rest)
    assert rest[-1].split() == ["vocab", "Y", "Y"]


def test_programs_take_turns():
    called = []
    pairs = measured.ratios(
        lambda: called.append("winner"), lambda: called.append("shipped"), 2
    )
    assert list(map(len, pairs)) == [2, 2]
    assert called == ["shipped"] * 2 + ["winner"] * 4 + ["shipped"] * 2
