"""Every operator on one device and on eight, under both partitioners."""

import os
import pathlib
import subprocess
import sys
import zlib

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st
from jax.errors import JaxRuntimeError

from meshwright.framework.compiler.program import Partitioner
from tests.operators.cases import MESHES, cases, run
from tests.operators.known_failures import KNOWN_FAILURES, Outcome
from tests.operators.operators import OPERATORS

ROOT = pathlib.Path(__file__).parents[2]

# Cases share a compiled program, which costs less than one for each.
CASES_IN_A_PROGRAM = 2
TESTS = len(OPERATORS) * len(Partitioner) * len(MESHES)
# `make matrix` draws that many anew; without it the draws are always the same.
CASES = int(os.environ.get("MATRIX_CASES", 0))
PROGRAMS = max(1, -(-CASES // (TESTS * CASES_IN_A_PROGRAM)))


def test_the_matrix_has_500_cases():
    assert TESTS * CASES_IN_A_PROGRAM >= 500


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh).replace(", ", ","))
@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
@pytest.mark.parametrize("operator", OPERATORS)
def test_one_device_and_eight_agree(operator, partitioner, mesh):
    compared = []

    @settings(
        max_examples=PROGRAMS,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(
        st.lists(
            cases(operator, mesh, partitioner),
            min_size=CASES_IN_A_PROGRAM,
            max_size=CASES_IN_A_PROGRAM,
            unique_by=str,
        ),
        st.integers(0, 2**16),
    )
    def check(batch, luck):
        assume(luck)  # Else the simplest draw comes first, and alone where it is one.
        found = run(batch, partitioner)
        complaints = [c.complaint(f) for c, f in zip(batch, found, strict=True)]
        assert not any(complaints), "\n\n".join(filter(None, complaints))
        compared.append(len(batch))

    if not CASES:  # A seed of its own: derandomize=True draws alike for all operators.
        check = seed(zlib.crc32(f"{operator} on {mesh}".encode()))(check)
    check()
    assert sum(compared) >= CASES_IN_A_PROGRAM


RUN_ALONE = """
import tests.conftest
from tests.operators.cases import run
from tests.operators.known_failures import KNOWN_FAILURES
from meshwright.framework.compiler.program import Partitioner
case = KNOWN_FAILURES["{name}"].case()
print(case.complaint(run([case], Partitioner.{partitioner})[0]))
"""


def known_failures():
    """Strict: the test tells when XLA has mended one."""
    for name, failure in KNOWN_FAILURES.items():
        raises = (
            JaxRuntimeError if failure.outcome is Outcome.REFUSED else AssertionError
        )
        mark = pytest.mark.xfail(raises=raises, strict=True, reason="XLA gets it wrong")
        for partitioner in failure.partitioners:
            label = f"{name}-{partitioner.value}"
            yield pytest.param(name, partitioner, marks=mark, id=label)


@pytest.mark.parametrize("name,partitioner", list(known_failures()))
def test_known_failure(name, partitioner):
    failure = KNOWN_FAILURES[name]
    if failure.outcome is Outcome.ABORTED:
        code = RUN_ALONE.format(name=name, partitioner=partitioner.name)
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
        if ran.returncode > 0:  # An error of Python's is no abort.
            ran.check_returncode()
        assert ran.returncode == 0
    else:
        case = failure.case()
        complaint = case.complaint(run([case], partitioner)[0])
        assert complaint is None, complaint
