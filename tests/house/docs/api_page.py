"""The page of docs/reference that lists what `meshwright.framework` exports."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from meshwright import framework as mw

_WIDTH = 80
_HEAD = """\
# The names in `mw`

What `from meshwright import framework as mw` has, with its parameters and the first
sentence of its docstring; `help(mw.compile_program)` shows the rest. `**options` of
`compile_program` and `function` are those of `trace_program`.
"""
_NONE = inspect.Parameter.empty


def api_page(prose: Callable[[str], str]) -> str:
    """The page's text: functions, classes and modules, each in alphabetical order.

    Args:
      prose: makes Markdown of a docstring's text.
    """
    named = {name: getattr(mw, name) for name in sorted(mw.__all__, key=str.lower)}
    of_kind = {
        "Functions": [n for n, one in named.items() if inspect.isroutine(one)],
        "Classes": [n for n, one in named.items() if inspect.isclass(one)],
        "Modules": [n for n, one in named.items() if inspect.ismodule(one)],
    }
    parts = [_HEAD]
    for kind, names in of_kind.items():
        parts.append(f"## {kind}\n")
        parts += [_section(name, named[name], prose) for name in names]
    return "\n".join(parts)


def _section(name: str, one: Any, prose: Callable[[str], str]) -> str:
    members = _members(one)
    shown = _signature(f"mw.{name}", one)
    if inspect.ismodule(one):
        # Of a module that says what it shows: others have functions for our own code.
        named = getattr(one, "__all__", ())
        functions = [m for m in named if inspect.isroutine(getattr(one, m))]
        calls = [_signature(f"mw.{name}.{m}", getattr(one, m)) for m in functions]
        shown = "\n".join(calls or [shown])
    has = f"It has {', '.join(f'`{m}`' for m in members)}.\n" if members else ""
    text = [f"### {name}\n", f"```\n{shown}\n```\n", f"{prose(_first_sentence(one))}\n"]
    return "\n".join([*text, *([has] if has else [])])


def _signature(name: str, one: Any) -> str:
    """A call on one line or, if that is long, a line for each parameter."""
    if inspect.isclass(one) and issubclass(one, enum.Enum):
        return "\n".join(f"{name}.{member.name}" for member in one)
    is_exception = inspect.isclass(one) and issubclass(one, Exception)
    if is_exception or inspect.ismodule(one):
        return name
    parameters = [_parameter(p) for p in inspect.signature(one).parameters.values()]
    kinds = [p.kind for p in inspect.signature(one).parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and not any(
        kind is inspect.Parameter.VAR_POSITIONAL for kind in kinds
    ):
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    call = f"{name}({', '.join(parameters)})"
    if len(call) <= _WIDTH:
        return call
    return "\n".join([f"{name}(", *(f"    {text}," for text in parameters), ")"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    default = parameter.default
    return f"{stars}{parameter.name}{'' if default is _NONE else f'={_value(default)}'}"


def _value(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return str(default)
    if isinstance(default, tf.DType):
        return f"tf.{default.name}"
    if dataclasses.is_dataclass(default) and not inspect.isclass(default):
        return f"{type(default).__name__}()"
    if inspect.isclass(default) or inspect.isroutine(default):
        return default.__name__
    # What a dataclass makes anew for each instance.
    return "..." if repr(default) == "<factory>" else repr(default)


def _members(one: Any) -> list[str]:
    """Public methods and properties of a class, or names of a module, in order."""
    if inspect.ismodule(one):
        names = getattr(one, "__all__", None) or [
            name
            for name, value in vars(one).items()
            if inspect.isroutine(value) or inspect.isclass(value)
            if value.__module__ == one.__name__
        ]
        return [name for name in names if not name.startswith("_")]
    if not inspect.isclass(one) or issubclass(one, enum.Enum):
        return []
    own = [base for base in one.__mro__ if base.__module__.startswith("meshwright")]
    kinds = (property, classmethod, staticmethod)
    return sorted(
        {
            name
            for base in own
            for name, value in vars(base).items()
            if not name.startswith("_")
            and (
                inspect.isroutine(value)
                or isinstance(value, kinds)
                or hasattr(value, "func")  # A cached property.
            )
        }
    )


def _first_sentence(one: Any) -> str:
    text = (inspect.getdoc(one) or "").split("\n\n")[0]
    text = " ".join(text.split())
    return re.match(r".*?[.:](?= [A-Z`]|$)|.*", text)[0]
