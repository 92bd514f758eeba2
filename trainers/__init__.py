"""Training: the loop, the programs around it, checkpoints, the binaries.

The searches for plans can be imported from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.trainers.planning.search.found.function_plans import search
    from meshwright.trainers.planning.search.found.keras_plans import search_keras

__all__ = ["search", "search_keras"]

_FOUND = "meshwright.trainers.planning.search.found"
_MODULES = {
    "search": f"{_FOUND}.function_plans",
    "search_keras": f"{_FOUND}.keras_plans",
}


def __getattr__(name: str) -> Any:
    """Imports the planner when one of its functions is used: a binary need not."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
