"""One device and several, under both partitioners."""

import zlib

import pytest

from meshwright.framework.compiler.xla.partitioner import Partitioner
from tests.operators.definitions.operators import OPERATORS
from tests.operators.judging.apart import Outcome, judge
from tests.operators.judging.cases import MESHES
from tests.operators.judging.groups import Group, groups, judged, shrunk
from tests.operators.judging.layouts import LAYOUTS
from tests.operators.known_failures import KNOWN_FAILURES

# More in a program cost less for each; `make matrix` draws others for each seed.
CASES = {Partitioner.SHARDY: 2, Partitioner.GSPMD: 1}


def test_the_matrix_has_80_operators_and_400_cases():
    assert len(OPERATORS) >= 80
    assert len(OPERATORS) * sum(CASES.values()) >= 400


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


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
@pytest.mark.parametrize("name", LAYOUTS)
def test_single_operators_are_right_in_any_layout(name, partitioner):
    verdicts = judged(*groups([name], 24, "", [partitioner]))
    assert len(verdicts) > 10
    _all_right(verdicts)


def _all_right(verdicts):
    known = {str(case.case): case.verdict for case in verdicts}
    for case in verdicts:
        if case.verdict.outcome.is_fault:
            pytest.fail(str(shrunk(case, known)))


def of_known_failures():
    return pytest.mark.parametrize("failure", KNOWN_FAILURES, ids=lambda f: f.name)


@of_known_failures()
def test_what_meets_a_fault_is_repaired(failure):
    (verdict,) = judge([failure.case], failure.partitioner)
    assert verdict.outcome is Outcome.RIGHT, verdict.text
    assert failure.fault.name in verdict.repairs


@pytest.mark.slow
@of_known_failures()
def test_a_row_of_the_table_is_needed_still(failure):
    """With a jaxlib that has mended one, say so in `Fault.until`."""
    (verdict,) = judge([failure.case], failure.partitioner, repair=False)
    assert verdict.outcome is failure.outcome, verdict.text
