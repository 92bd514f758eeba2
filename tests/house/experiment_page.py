"""The fields of an experiment in docs/reference/programs/tasks.md, from its docstring.

python -m tests.house.experiment_page writes it.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re

from meshwright.trainers.experiment.experiment import Experiment

PAGE = pathlib.Path(__file__).parents[2] / "docs/reference/programs/tasks.md"
HEADING = "## The fields of an experiment\n"


def table() -> str:
    """A row for each field: its name, default and meaning."""
    text = inspect.cleandoc(Experiment.__doc__)
    text = text.partition("Args:\n")[2].partition("\nRaises:")[0]
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.MULTILINE)
    meanings = {name: " ".join(meaning.split()) for name, meaning in entries}
    rows = ["| `Experiment.` | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(Experiment):
        default = field.default
        shown = "" if default is dataclasses.MISSING else f"`{_gin(default)}`"
        rows.append(f"| `{field.name}` | {shown} | {meanings[field.name]} |")
    return "\n".join(rows) + "\n"


def _gin(value) -> str:
    """A default as a gin file has it."""
    if hasattr(value, "as_numpy_dtype"):
        return f"%{value.name}"
    if type(value).__name__ == "WeightUpdateSharding":
        return repr(value.value)
    return f"%{value}" if hasattr(value, "name") else repr(value)


def main() -> None:
    """Writes the table at the end of the page."""
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(f"{before}{HEADING}\n{table()}")


if __name__ == "__main__":
    main()
