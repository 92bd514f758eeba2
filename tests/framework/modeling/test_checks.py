"""Fields that say what may be in them."""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import pytest

from meshwright.framework.modeling.checks import (
    Checked,
    bounded,
    check_number,
    instance,
)
from tests.house.test_rooms import PRODUCT, code_files


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@runtime_checkable
class Readable(Protocol):
    def read(self) -> str: ...


class Book:
    def read(self) -> str:
        return "words"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    count: int = bounded(at_least=1)
    share: float = bounded(0.5, above=0, at_most=1)
    limit: int | None = bounded(None, at_least=2)
    rate: float | Book = bounded(0.1, at_least=0, below=1)
    colour: Colour | None = None
    loud: bool = False
    book: Readable | None = instance(None, example="@Book()")
    sizes: Sequence[int] = (1, 2)


def test_defaults_and_good_values():
    assert Config(count=1) == Config(
        count=1, share=0.5, limit=None, rate=0.1, colour=None, loud=False, book=None
    )
    book = Book()
    given = Config(
        count=np.int64(3), share=1, limit=2, rate=book, colour=Colour.RED, book=book
    )
    assert given.rate is given.book is book and given.share == 1
    with pytest.raises(TypeError, match="count"):
        Config()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("count", 0, "Config.count is 0; it must be a whole number of at least 1"),
        ("count", 2.0, "Config.count is 2.0; it must be a whole number"),
        ("count", None, "Config.count is None; it must be a whole number"),
        ("share", "x", "Config.share is 'x'; it must be a number above 0 and at most"),
        ("share", float("nan"), "Config.share is nan; it must be a number"),
        ("limit", 1, "Config.limit is 1; it must be a whole number of at least 2"),
        ("rate", 1, "Config.rate is 1; it must be a number of at least 0 and below 1"),
        (
            "colour",
            "red",
            "colour is 'red'; it must be one of Colour.RED, Colour.BLUE or None",
        ),
        ("loud", 1, "Config.loud is 1; it must be True or False"),
        ("book", 3, "book is 3; it must be of class Readable, such as @Book.. or None"),
        ("book", len, "or None: write @len.. for an instance"),
    ],
)
def test_what_is_something_else_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        Config(**{"count": 1, field: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stricter(Config):
    share: float = bounded(0.5, above=0.4)


class Plain(Config):
    pass


def test_a_subclass_may_have_other_bounds_or_no_fields():
    assert Plain(count=1, share=0.1).share == 0.1
    with pytest.raises(ValueError, match="Plain.count is 0"):
        Plain(count=0)
    with pytest.raises(ValueError, match="Stricter.share is 0.1; .* above 0.4"):
        Stricter(count=1, share=0.1)
    with pytest.raises(ValueError, match="Stricter.count is 0"):
        Stricter(count=0)


def test_bounds_may_come_from_other_fields():
    with pytest.raises(
        ValueError, match="Config.count is 3; it must be a number at mo"
    ):
        check_number(Config(count=3), "count", at_most=2)


def test_classes_in_functions_are_checked_as_far_as_their_types_are_known():
    class Local:
        pass

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Given(Checked):
        part: Local
        count: int = bounded(at_least=1)

    assert Given(part=3, count=1).part == 3
    with pytest.raises(ValueError, match="Given.count is 0"):
        Given(part=Local(), count=0)


def test_fields_that_are_declared_are_checked():
    """Their classes are `Checked`, and call its `__post_init__` from theirs."""
    classes = {
        node.name: node
        for file in code_files(*PRODUCT)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def bases(name: str) -> set[str]:
        direct = [ast.unparse(base) for base in classes[name].bases]
        return {name}.union(
            *(bases(base) if base in classes else {base} for base in direct)
        )

    checked = {name for name in classes if "Checked" in bases(name)} - {"Checked"}
    assert {"Experiment", "Adam", "MoE", "TextInput"} <= checked
    for name, node in classes.items():
        text = [ast.unparse(part) for part in node.body]
        declares = any(" = bounded(" in t or " = instance(" in t for t in text)
        assert name in checked or not declares, f"{name} is not Checked"
        method = next((t for t in text if t.startswith("def __post_init__")), "super()")
        if name in checked:
            assert "super()" in method, f"{name}.__post_init__ does not call Checked's"
