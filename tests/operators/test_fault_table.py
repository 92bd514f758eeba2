"""docs/operators.md has the table of faults as the compiler reads it."""

import pytest

from tests.operators import fault_table
from tests.operators.known_failures import KNOWN_FAILURES


def test_the_page_has_the_table():
    assert fault_table.on_page() == fault_table.tables(fault_table.bytes_on_page())


@pytest.mark.slow
@pytest.mark.parametrize("failure", KNOWN_FAILURES, ids=lambda failure: failure.name)
def test_a_repair_costs_what_the_page_says(failure):
    assert fault_table.measured(failure) == fault_table.bytes_on_page()[failure.name]
