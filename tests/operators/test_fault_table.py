"""docs/internals/operators.md has the compiler's tables of faults and workarounds."""

import dataclasses

import pytest

from meshwright.framework.compiler.repair.table.faults import FAULTS
from tests.operators import fault_table
from tests.operators.known_failures import OF_FAULTS


@pytest.mark.parametrize("of", fault_table.OF)
def test_the_page_has_the_table(of):
    costs = fault_table.bytes_on_page()
    assert fault_table.on_page(of) == fault_table.tables(of, costs)


def test_an_op_that_stablehlo_lacks_is_refused():
    message = (
        f"fault '{FAULTS[0].name}': StableHLO has no op 'stablehlo.gathr'; did you "
        "mean 'stablehlo.gather'"
    )
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FAULTS[0], ops=("stablehlo.gathr",))


QUICK = "gather_of_split_rows-gspmd"  # Its repair sends something.


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(
            failure,
            id=failure.name,
            marks=pytest.mark.always if failure.name == QUICK else pytest.mark.slow,
        )
        for failure in OF_FAULTS
    ],
)
def test_a_repair_costs_what_the_page_says(failure):
    costs = fault_table.bytes_on_page()
    assert failure.name in costs, "run python -m tests.operators.fault_table"
    assert fault_table.measured(failure) == costs[failure.name]
