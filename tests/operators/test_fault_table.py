"""docs/internals/operators.md has the compiler's tables of faults and workarounds."""

import dataclasses

import pytest

from meshwright.framework.compiler.repair import check
from meshwright.framework.compiler.repair.op_layout import FactorKind
from meshwright.framework.compiler.repair.table.fault import evenly
from meshwright.framework.compiler.repair.table.faults import FAULTS
from meshwright.framework.compiler.repair.table.index_patterns import single_index
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    Outcome,
    Smallest,
)
from tests.operators import fault_table
from tests.operators.known_failures import OF_FAULTS, refuse_twice


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
    with pytest.raises(ValueError, match="ops = 'stablehlo.gather' is a string: make"):
        dataclasses.replace(FAULTS[0], ops="stablehlo.gather")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ops": ()}, "ops is empty, so that no op could meet it: name one"),
        ({"choose": None}, "choose = None is no function of an OpLayout: give one"),
        ({"until": "0.9"}, "until = '0.9' is no version of jaxlib: write up to"),
        (
            {"until": (0, "9")},
            r"until = \(0, '9'\) is no version of jaxlib: write up to",
        ),
        (
            {"smallest": {"p": Smallest(Outcome.REFUSED, " ")}},
            r"'p' of row .* is Smallest\(<Outcome.REFUSED.*, ' '\): give it an Outcome",
        ),
        ({"smallest": {"p": Smallest("wrong", "x")}}, "Smallest.'wrong', 'x'.: give"),
    ],
)
def test_a_row_that_cannot_apply_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FAULTS[0], **fields)


def test_a_row_that_no_program_shows_is_refused():
    with pytest.raises(ValueError, match="has no program that shows it: give"):
        dataclasses.replace(FAULTS[0], smallest={})
    ((name, program), *_) = FAULTS[0].smallest.items()
    never = dataclasses.replace(program, shardy=False, gspmd=False)
    with pytest.raises(ValueError, match=f"{name}.* meets it under neither partition"):
        dataclasses.replace(FAULTS[0], smallest={name: never})


def test_a_program_that_does_not_meet_its_row_is_not_documented():
    wrong = dataclasses.replace(OF_FAULTS[0], fault=FAULTS[-1])
    message = f"does not meet its row '{FAULTS[-1].name}' but '{FAULTS[0].name}'"
    with pytest.raises(ValueError, match=message):
        fault_table.measured(wrong)


def test_a_layout_that_does_not_help_is_not_documented(monkeypatch):
    """The compiler replicates such an op without a word."""
    failure = next(f for f in OF_FAULTS if f.name == "scatter_of_one_index-shardy")
    keeps = dataclasses.replace(
        failure.fault, choose=evenly(single_index, FactorKind.PARALLEL)
    )
    rows = [keeps if row is failure.fault else row for row in check.PRESENT]
    monkeypatch.setattr(check, "PRESENT", rows)
    message = "row 'scatter of a single index' chooses for .* is not kept, or meets a"
    with pytest.raises(ValueError, match=message):
        fault_table.measured(dataclasses.replace(failure, fault=keeps))
    with pytest.raises(TypeError, match="evenly keeps 'PARALLEL': give a FactorKind"):
        evenly(single_index, "PARALLEL")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            'Fault(name="a", smallest={})',
            '\nFault(name="a", smallest={})',
            "one.py:1 and two.py:2 both have a row named 'a': give one of them another",
        ),
        (
            'Fault(name="a", smallest={"p": 1,\n"p": 2})',
            "",
            "one.py:1 and one.py:2 both have a program named 'p'",
        ),
    ],
)
def test_a_name_that_is_given_twice_is_refused(first, second, message):
    with pytest.raises(ValueError, match=message):
        refuse_twice({"one.py": first, "two.py": second})


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
