"""Checks of hyperparameters, with one wording for all of them."""

from __future__ import annotations

import enum
import math
import numbers
from typing import Any


def check_number(
    config: Any,
    field: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Checks that `config.field` is a finite number within the bounds given.

    Raises:
      ValueError: it is not; names class, field, value and bounds.
    """
    value = getattr(config, field)
    name = f"{type(config).__name__}.{field}"
    check_value(name, value, at_least, above, below, at_most)


def check_value(
    name: str,
    value: Any,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Like `check_number`, of a value under a name."""
    good = isinstance(value, numbers.Real) and math.isfinite(value)
    good = good and (at_least is None or value >= at_least)
    good = good and (above is None or value > above)
    good = good and (below is None or value < below)
    good = good and (at_most is None or value <= at_most)
    if not good:
        bounds = {"at least": at_least, "above": above}
        bounds |= {"below": below, "at most": at_most}
        wanted = [
            f"{word} {bound}" for word, bound in bounds.items() if bound is not None
        ]
        text = " and ".join(wanted)
        raise ValueError(f"{name} is {value!r}; it must be a number {text}".rstrip())


def check_kind(config: Any, field: str, kind: type, example: str = "") -> None:
    """Checks that `config.field` is of a class, or one of an enum's members.

    Raises:
      ValueError: it is not; names class, field, value and what there is, or an example.
    """
    value = getattr(config, field)
    if isinstance(value, kind):
        return
    wanted = f"of class {kind.__name__}, such as {example}"
    if issubclass(kind, enum.Enum):
        wanted = f"one of {', '.join(map(str, kind))}"
    raise ValueError(
        f"{type(config).__name__}.{field} is {value!r}; it must be {wanted}"
    )
