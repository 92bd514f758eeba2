"""Stand-ins for what gin files may name of this package, without importing it.

Names and parameters are read from the sources: of all that `@gin.register` or
`@gin.constants_from_enum` decorates at the top level of a module. Parameters of a
dataclass are its fields and those of bases that are dataclasses.
"""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
from collections.abc import Iterator

import gin

from meshwright.trainers.experiment import config

_PACKAGE = "meshwright"
_ROOT = pathlib.Path(__file__).parents[3]
_ROOMS = ("framework", "layers", "tasks", "trainers")


def register() -> None:
    """Registers all stand-ins with gin, where the real classes are not."""
    for name in config.DTYPES:
        gin.constant(f"{_PACKAGE}.{name}", name)
    for module in _modules_with_names():
        for node in _tree(module).body:
            decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
            for decorator in decorators:
                if decorator == "gin.register":
                    gin.register(_stand_in(module, node))
                elif decorator == "gin.constants_from_enum":
                    for member in _assigned(node):
                        gin.constant(f"{module}.{node.name}.{member}", member)


def _modules_with_names() -> Iterator[str]:
    for room in _ROOMS:
        for file in (_ROOT / room).rglob("*.py"):
            if "\n@gin." in file.read_text(encoding="utf-8"):
                parts = file.relative_to(_ROOT).with_suffix("").parts
                yield ".".join((_PACKAGE, *parts))


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():  # A package, or not this package's: no bases with fields.
        return ast.Module(body=[], type_ignores=[])
    return ast.parse(path.read_text(encoding="utf-8"))


def _stand_in(module: str, node: ast.ClassDef | ast.FunctionDef):
    """A function with the name and the parameters of a class or function."""

    def stand_in():
        raise TypeError(f"{node.name} is only named here, not defined")

    if isinstance(node, ast.ClassDef):
        names = list(dict.fromkeys(_fields(module, node)))
    else:
        names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
    stand_in.__name__ = stand_in.__qualname__ = node.name
    stand_in.__module__ = module
    stand_in.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    return stand_in


def _fields(module: str, node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        definition = _class(module, ast.unparse(base).partition("[")[0])
        if definition is not None:
            yield from _fields(*definition)
    if "dataclass" not in " ".join(map(ast.unparse, node.decorator_list)):
        return
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            is_field = "ClassVar" not in ast.unparse(line.annotation)
            value = ast.unparse(line.value) if line.value else ""
            if is_field and "init=False" not in value:
                yield line.target.id


def _class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The class that a name means in a module of this package, and its module."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _class(node.module or "", alias.name)
    return None


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.Assign):
            yield from (t.id for t in line.targets if isinstance(t, ast.Name))
