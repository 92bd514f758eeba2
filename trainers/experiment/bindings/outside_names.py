"""Names of Keras, and of modules of the user's, for gin files."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import gin
from gin.selector_map import SelectorMap

KERAS = ("keras", "keras_hub", "keras_rs")
"""Packages whose classes a gin file can name in full after it has imported them."""

# No layers and models: some read files, or run what is in them.
_BASES = (
    "Loss",
    "Metric",
    "Optimizer",
    "optimizers.schedules.LearningRateSchedule",
    "Initializer",
    "Regularizer",
    "constraints.Constraint",
    "DTypePolicy",
)
_imported: list[str] = []


class _Names(SelectorMap):
    """Gin's registry, in which the end of a name is this package's rather than Keras's.

    `Adam` is ours, however much of Keras is registered.
    """

    def matching_selectors(self, partial_selector):
        names = super().matching_selectors(partial_selector)
        return [name for name in names if not _is_keras(name)] or names

    def minimal_selector(self, complete_selector):
        if _is_keras(complete_selector):
            return complete_selector
        parts = complete_selector.split(".")
        names = (".".join(parts[i:]) for i in reversed(range(len(parts))))
        return next(n for n in names if len(self.matching_selectors(n)) == 1)


def _is_keras(name: str) -> bool:
    return name.partition(".")[0] in KERAS


def register_keras(package: str) -> None:
    """Registers losses, metrics, optimizers and the like of one of `KERAS`.

    From then on gin's registry, which the process shares, prefers our names.
    """
    gin.config._REGISTRY.__class__ = _Names
    root = importlib.import_module(package)
    for module in _public_modules(root):
        _register(module.__name__, _of_keras(module))


def import_modules(names: Iterable[str]) -> None:
    """Imports modules and registers the classes and functions that they define.

    Raises:
      ValueError: there is no such module, or it cannot be imported.
    """
    for name in names:
        try:
            with gin.unlock_config():  # Another configuration may have been built.
                module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise ValueError(
                    f"--import={name}: it imports {error.name}, which is not installed"
                ) from error
            raise ValueError(
                f"--import={name}: {error}: it is looked for in the folders of "
                "PYTHONPATH, among installed packages, and last in the working "
                "directory"
            ) from error
        except Exception as error:  # It may raise anything.
            raise ValueError(
                f"--import={name}: the module raises {type(error).__name__}: {error}"
            ) from error
        members = {
            key: value
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == name
        }
        with gin.unlock_config():
            _register(name, members)
        if name not in _imported:
            _imported.append(name)


def imported() -> Sequence[str]:
    """The modules that `import_modules` has imported, for other processes."""
    return tuple(_imported)


def _register(module: str, members: dict[str, object]) -> None:
    for name, value in members.items():
        if name.startswith("_") or f"{module}.{name}" in gin.config._REGISTRY:
            continue
        gin.register(name, module=module)(value)


def _public_modules(root: ModuleType) -> Iterator[ModuleType]:
    """The modules of a Keras package's own names, such as `keras.optimizers`."""
    yield root
    for value in list(vars(root).values()):
        is_part = inspect.ismodule(value) and value.__name__.startswith(
            f"{root.__name__}."
        )
        if is_part and ".src" not in value.__name__ and "_tf_keras" not in str(value):
            yield from _public_modules(value)


def _of_keras(module: ModuleType) -> dict[str, object]:
    import keras

    bases = tuple(operator.attrgetter(path)(keras) for path in _BASES)
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, bases)
    }
