"""The cases that `make test` runs: they exist, and are chosen by lines and cost.

What `make test-all` runs, group after group, is everything.
"""

import ast
import functools
import pathlib
import re

from tests.house import choose_cases, in_turn, some_cases
from tests.house.some_cases import left_cases, mark_of

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def functions_in(path):
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_listed_test_exists():
    missing = []
    for name in left_cases():
        path, *_, test = name.split("::")
        if not (ROOT / path).is_file() or test not in functions_in(path):
            missing.append(name)
    assert not missing, (
        "renamed or removed: do so in tests/some_cases.txt too, or run `make cases`:\n"
        + "\n".join(missing)
    )


SECONDS = {"a[0]": 1.0, "a[1]": 0.1, "b": 50.0, "c[x]": 0.2, "c[y]": 700.0}
LINES = {
    "a[0]": {(1, line) for line in range(100)},
    "a[1]": {(1, 0)},
    "b": {(1, 5), (2, 1)},
    "c[x]": set(),
    "c[y]": set(),
}


def test_lines_come_first_then_a_case_of_every_test_then_what_time_is_left_for():
    kept = choose_cases.chosen(SECONDS, LINES)
    assert kept == {"a[0]", "a[1]", "b", "c[x]"}


def test_what_is_marked_always_is_kept_whatever_it_costs():
    kept = choose_cases.chosen(SECONDS, LINES, always={"c[y]"})
    # That leaves no time for others, but lines still come first.
    assert kept == {"a[0]", "c[y]"}


def test_what_runs_in_all_cases_is_not_listed():
    text = choose_cases.text(SECONDS, {"a[0]", "a[1]", "c[x]"})
    lines = [line for line in text.splitlines() if line[0] != "#"]
    assert lines == [f"b\t{mark_of('')}", f"c\tx\t{mark_of('y')}"]


def test_a_new_case_of_a_listed_test_is_not_left_out(tmp_path, monkeypatch):
    file = tmp_path / "cases.txt"
    file.write_text(choose_cases.text(SECONDS, {"a[0]", "a[1]", "c[x]"}))
    monkeypatch.setattr(some_cases, "SOME_CASES", file)
    assert left_cases() == {"b": {mark_of("")}, "c": {mark_of("y")}}
    assert mark_of("new") not in left_cases()["c"]


def test_each_file_of_tests_is_in_one_group():
    files = (ROOT / "tests").rglob("test_*.py")
    paths = [ROOT / path for group in in_turn.groups() for path in group]
    groups = [[p for p in paths if p == file or p in file.parents] for file in files]
    assert {len(group) for group in groups} == {1}


def test_groups_are_counted_together(monkeypatch, capsys):
    folders = [["tests/data"], ["tests/framework/sharding/test_nested_map.py"]]
    monkeypatch.setattr(in_turn, "groups", lambda: [*folders, folders[1]])
    assert in_turn.run(["-q", "-p", "no:cacheprovider", "-k", "path"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"=+ (\d+) passed, \d+ deselected in .*, all groups =+", last)
    assert int(last.split()[1]) % 2 == 0
