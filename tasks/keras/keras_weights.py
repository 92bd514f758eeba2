"""Which arrays of a file that Keras wrote are which variables of a model."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from keras.src.backend.common.variables import Variable
from keras.src.saving import saving_lib


@dataclasses.dataclass(frozen=True)
class NamedArrays:
    """What the loader of Keras takes from a file for a model.

    Args:
      names: of the array for each variable, by the variable's `id`.
      problems: why some variables get none.
    """

    names: dict[int, str]
    problems: list[str]


@dataclasses.dataclass(frozen=True)
class _Name:
    """Stands for an array of the file."""

    name: str


class _Store(saving_lib.H5IOStore):
    """A file of which only the names of arrays are known."""

    def __init__(self, names: Iterable[str]):
        self._groups = collections.defaultdict(dict)
        for name in names:
            group, _, key = name.rpartition("/")
            self._groups[group][key] = _Name(name)
        self._h5_entry_group = {}

    def __bool__(self):
        return True

    def get(self, path):
        self._h5_entry_group = self._groups.get(f"{path}/vars".lstrip("/"), {})
        return self

    def has_path(self, path):
        return any(f"{group}/".startswith(f"{path}/") for group in self._groups)

    def __getitem__(self, key):
        return self._h5_entry_group[key]


def named_arrays(model: Any, names: Iterable[str]) -> NamedArrays:
    """Which array is which variable, as Keras's `load_weights` finds them.

    Args:
      model: a Keras model, whose variables may be without values.
      names: of the arrays in the file, such as `layers/dense/vars/0`.
    """
    errors: dict[int, tuple[Any, Exception]] = {}
    with _noted() as assigned, warnings.catch_warnings():
        # It warns of what a file lacks, which is told from what gets no name.
        warnings.simplefilter("ignore")
        saving_lib._load_state(
            model,
            weights_store=_Store(names),
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
            failed_saveables=set(),
            error_msgs=errors,
        )
    for layer, _ in errors.values():
        # Half of a layer's variables would be another layer.
        for name in ("_trainable_variables", "_non_trainable_variables"):
            for variable in getattr(layer, name, ()):
                assigned.pop(id(variable), None)
    problems = [
        f"{getattr(layer, 'path', None) or getattr(layer, 'name', layer)}: "
        f"{' '.join(str(error).split())[:200]}"
        for layer, error in errors.values()
    ]
    return NamedArrays(assigned, problems)


@contextlib.contextmanager
def _noted() -> Iterator[dict[int, str]]:
    """Yields the names of the arrays that variables are assigned in the context."""
    assigned: dict[int, str] = {}
    assign = Variable.assign

    def note(self, value):
        if not isinstance(value, _Name):
            raise TypeError(
                f"{self.path!r} is computed from what is in the file: load it by Keras "
                "instead"
            )
        assigned[id(self)] = value.name

    Variable.assign = note
    try:
        yield assigned
    finally:
        Variable.assign = assign
