"""One device and several, under both partitioners."""

import zlib

import pytest

from meshwright.framework.compiler.program import Partitioner
from tests.operators.apart import Outcome, judge
from tests.operators.cases import MESHES
from tests.operators.groups import Group, judged, shrunk
from tests.operators.known_failures import KNOWN_FAILURES
from tests.operators.operators import OPERATORS

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
    found = judged(group)
    assert len(found) == CASES[partitioner]
    known = {str(one.case): one.verdict for one in found}
    for one in found:
        if one.verdict.outcome.is_fault:
            pytest.fail(str(shrunk(one, known)))


def known_failures():
    """Strict: a test tells when XLA has mended one. Slow: it seldom changes."""
    mark = pytest.mark.xfail(strict=True, reason="XLA gets it wrong")
    for name, failure in KNOWN_FAILURES.items():
        for partitioner in failure.partitioners:
            label = f"{name}-{partitioner.value}"
            marks = [mark, pytest.mark.slow]
            yield pytest.param(name, partitioner, marks=marks, id=label)


@pytest.mark.parametrize("name,partitioner", list(known_failures()))
def test_known_failure(name, partitioner):
    failure = KNOWN_FAILURES[name]
    (verdict,) = judge([failure.case], partitioner)
    assert verdict.outcome in (Outcome.RIGHT, failure.outcome)  # Else it is red.
    assert verdict.outcome is Outcome.RIGHT, verdict.text
