"""Every operator on one device and on eight, under both partitioners."""

import os
import re
import zlib

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from meshwright.framework.compiler.lower import LoweringError
from meshwright.framework.compiler.program import Partitioner
from tests.operators.apart import ProcessEndedError, complaints
from tests.operators.cases import MESHES
from tests.operators.draws import cases
from tests.operators.known_failures import KNOWN_FAILURES, Outcome
from tests.operators.operators import OPERATORS

# Cases share a compiled program, which costs less than one for each.
CASES_IN_A_PROGRAM = 2
TESTS = len(OPERATORS) * len(Partitioner) * len(MESHES)
# `make matrix` draws that many, others for each seed.
CASES = int(os.environ.get("MATRIX_CASES", 0))
SEED = os.environ.get("MATRIX_SEED", "")
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
        phases=[Phase.generate, Phase.shrink],
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
        wrong = list(filter(None, complaints(batch, partitioner)))
        assert not wrong, "\n\n".join(wrong)
        compared.append(len(batch))

    # A seed of its own: derandomize=True draws alike for all operators.
    own = f"{operator} on {mesh}, {partitioner.value} {SEED}"
    seed(zlib.crc32(own.encode()))(check)()
    assert sum(compared) >= CASES_IN_A_PROGRAM


RAISES = {
    Outcome.WRONG: AssertionError,
    Outcome.REFUSED: LoweringError,
    Outcome.ABORTED: ProcessEndedError,
}


def known_failures():
    """Strict: a test tells when XLA has mended one. Slow: it seldom changes."""
    for name, failure in KNOWN_FAILURES.items():
        raises = RAISES[failure.outcome]
        mark = pytest.mark.xfail(raises=raises, strict=True, reason="XLA gets it wrong")
        for partitioner in failure.partitioners:
            label = f"{name}-{partitioner.value}"
            marks = [mark, pytest.mark.slow]
            yield pytest.param(name, partitioner, marks=marks, id=label)


@pytest.mark.parametrize("name,partitioner", list(known_failures()))
def test_known_failure(name, partitioner):
    (complaint,) = complaints([KNOWN_FAILURES[name].case()], partitioner)
    assert complaint is None, complaint


def test_what_ends_a_process_is_named_and_the_next_case_runs():
    name = "grouped_convolution_of_split_kernel"
    case, partitioner = KNOWN_FAILURES[name].case(), Partitioner.GSPMD
    named = re.escape(f"ended by SIGABRT:\n{case}")
    with pytest.raises(ProcessEndedError, match=named):
        complaints([case], partitioner)
    assert complaints([case.on_one_device()], partitioner) == [None]
