"""The docs have each field of an experiment, as its docstring has it."""

from tests.house.experiment_page import HEADING, PAGE, table


def test_the_page_has_the_table():
    text = PAGE.read_text().partition(HEADING)[2].strip()
    assert text == table().strip(), "run python -m tests.house.experiment_page"
