"""What our types and JAX's explicit mode do, as docs/explanations/types_rules.md says.

DTensor's column of the table in docs/explanations/types.md is by its source: PyTorch is
not installed here.
"""

import re

import jax
import pytest

from tests.framework.types import types_page

EXAMPLES = types_page.examples()


@pytest.fixture(scope="module", autouse=True)
def jax_mesh():
    with jax.set_mesh(types_page.explicit_mesh()):
        yield


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_prints_what_the_page_says(example):
    assert example.printed() == example.text


def test_each_row_of_the_table_has_an_example():
    text = (types_page.PAGE.parent / "types.md").read_text()
    table = text.split("| situation |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert [example.name for example in EXAMPLES] == rows


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_table_tells_what_is_an_error(example):
    """The row's two columns against the two lines that are printed."""
    text = (types_page.PAGE.parent / "types.md").read_text()
    _, ours, theirs, _ = re.search(
        rf"^\| ({re.escape(example.name)}) \| (.*?) \| (.*?) \| (.*) \|$",
        text,
        re.MULTILINE,
    ).groups()
    lines = example.text.split("JAX: ")
    refused = "error" in ours
    assert lines[0].startswith("ours: error") == refused
    assert lines[1].startswith("error") == (
        "error" in theirs or (theirs == "the same" and refused)
    )
