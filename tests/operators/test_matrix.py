"""One device and several, under both partitioners."""

import itertools
import pathlib
import zlib

import pytest

from meshwright.framework.compiler.xla.jax_bridge import JAXLIB
from meshwright.framework.compiler.xla.partitioner import Partitioner
from tests.operators.definitions.operators import OPERATORS
from tests.operators.judging.apart import Outcome, judge, left_out
from tests.operators.judging.cases import MESHES, compiled
from tests.operators.judging.groups import Group, groups, judged, shrunk
from tests.operators.judging.layouts import LAYOUTS
from tests.operators.known_failures import KNOWN_FAILURES, OF_FAULTS

ROOT = pathlib.Path(__file__).parents[2]
# More in a program cost less for each; `make matrix` draws others for each seed.
CASES = {Partitioner.SHARDY: 2, Partitioner.GSPMD: 1}


@pytest.mark.parametrize(
    ("page", "count"),
    [
        (
            "results.md",
            f"{len(OPERATORS) * sum(CASES.values())} cases of {len(OPERATORS)} "
            "operators, two of each operator under Shardy and one under GSPMD",
        ),
        ("internals/operators.md", f"for each of {len(OPERATORS)} operators"),
    ],
)
def test_the_docs_count_the_operators_and_their_cases(page, count):
    assert (CASES[Partitioner.SHARDY], CASES[Partitioner.GSPMD]) == (2, 1)
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert count in text, f"docs/{page} should say: {count}"


@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
@pytest.mark.parametrize("operator", OPERATORS)
def test_one_device_and_several_agree(operator, partitioner):
    group = Group(
        operator=operator,
        partitioner=partitioner,
        mesh=zlib.crc32(f"{operator} {partitioner.value}".encode()) % len(MESHES),
        count=CASES[partitioner],
        seed="",
    )
    verdicts = judged(group)
    assert len(verdicts) == CASES[partitioner]
    _all_right(verdicts)


def slow_but(quick, cases, name_of):
    """Parameters by name, of which one case stands for all in `make test`."""
    named = {name_of(case): case for case in cases}
    assert quick in named, f"{quick} was renamed: name another quick one here"
    marks = dict.fromkeys(named, pytest.mark.slow) | {quick: pytest.mark.always}
    return [pytest.param(*named[n], id=n, marks=mark) for n, mark in marks.items()]


@pytest.mark.parametrize(
    ("name", "partitioner"),
    slow_but(
        "columns-shardy",
        itertools.product(LAYOUTS, Partitioner),
        lambda case: f"{case[0]}-{case[1].value}",
    ),
)
def test_single_operators_are_right_in_any_layout(name, partitioner):
    verdicts = judged(*groups([name], 24, "", [partitioner]))
    assert len(verdicts) > 10
    _all_right(verdicts)


def _all_right(verdicts):
    known = {str(case.case): case.verdict for case in verdicts}
    for case in verdicts:
        if case.verdict.outcome.is_fault:
            pytest.fail(str(shrunk(case, known)))


def over(failures):
    return pytest.mark.parametrize("failure", failures, ids=lambda f: f.name)


@over(KNOWN_FAILURES)
def test_what_meets_a_fault_is_repaired(failure):
    (verdict,) = judge([failure.case], failure.partitioner)
    assert verdict.outcome is Outcome.RIGHT, verdict.text
    if failure in OF_FAULTS and failure.fault.is_in(JAXLIB):
        assert failure.fault.name in verdict.repairs


@pytest.mark.parametrize(
    "failure",
    slow_but(
        "scatter_of_one_index-shardy",
        ([failure] for failure in KNOWN_FAILURES),
        lambda case: case[0].name,
    ),
)
def test_a_row_of_a_table_is_needed_still(failure):
    """If this fails with a new jaxlib that has mended it, set `until` of the row."""
    (verdict,) = judge([failure.case], failure.partitioner, without=failure.without)
    is_right = "right without the row: not the smallest, or mended in this XLA"
    assert verdict.outcome is failure.outcome, verdict.text or is_right


@over([failure for failure in KNOWN_FAILURES if failure.is_slow])
def test_a_row_for_speed_saves_bytes(failure):
    """If this fails with a new jaxlib, set `until` of the row."""
    case = failure.case

    def moved(without):
        with left_out(without):
            program = compiled([case], failure.partitioner, [case.use.values])
        return sum(collective.bytes for collective in program.collectives())

    assert moved(()) < moved(failure.without)
