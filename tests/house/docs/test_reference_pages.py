"""Made pages have what gin files and docstrings say; gin files say how to run them."""

import re

import pytest

from meshwright import framework as mw
from meshwright.trainers.experiment.experiment import Experiment
from tests.house.docs import reference_pages
from tests.house.docs.reference_pages import (
    GIN_FOLDERS,
    MADE,
    REFERENCE,
    command_of,
)

TEXTS = reference_pages.pages()


@pytest.mark.parametrize("page", TEXTS)
def test_the_page_is_current(page):
    assert (REFERENCE / page).read_text() == TEXTS[page], "run `make reference`"


def test_no_page_is_left_over():
    kept = {
        file.relative_to(REFERENCE).as_posix()
        for file in REFERENCE.rglob("*.md")
        if file.read_text().startswith(MADE)
    }
    assert kept == set(TEXTS)


def test_the_page_of_names_has_each_with_its_parameters_and_a_sentence():
    sections = TEXTS["programs/api.md"].split("\n### ")[1:]
    assert sorted(section.split("\n")[0] for section in sections) == sorted(mw.__all__)
    for section in sections:
        assert re.search(r"\n```\n\n[\w`(].*[.:]\n", section), section
    (program,) = [s for s in sections if s.startswith("compile_program\n")]
    assert "(fn, args, mesh, *, compiler_options=None, **options)\n" in program


def test_every_field_of_an_experiment_has_a_meaning():
    table = TEXTS["configurables/experiment.md"].split("\n## ")[1]
    rows = re.findall(r"^\| `(\w+)`.* \| (\S.*) \|$", table, re.MULTILINE)
    assert [name for name, _ in rows] == list(Experiment.__dataclass_fields__)


@pytest.mark.parametrize("folder", sorted(set(GIN_FOLDERS) - {"paper"}))
def test_a_gin_file_that_runs_opens_with_its_command(folder):
    for file in reference_pages.gin_files(folder):
        command = command_of(file)
        if "# Must be set: nothing" in file.read_text():
            assert command, file
        if command:
            named = re.findall(r"--gin_file=(\S+)", command)
            assert named == [f"{folder}/{file.name}"]
