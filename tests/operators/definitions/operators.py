"""The operators of the matrix: for each an expression and what is drawn for it."""

from __future__ import annotations

from tests.operators.definitions import (  # noqa: F401  They enter their operators.
    along,
    control,
    indices,
    linalg,
    moving,
    pointwise,
    products,
    randoms,
    windows,
)
from tests.operators.definitions.use import OPERATORS

__all__ = ["OPERATORS"]
