"""Reads the text of a configuration, without looking up its names."""

from __future__ import annotations

import dataclasses
import tokenize
from collections.abc import Mapping
from typing import Any

from gin import config_parser


@dataclasses.dataclass(frozen=True)
class _Reference:
    """A reference `@name`, `@name()` or `%NAME`, which is not looked up."""

    text: str

    def __repr__(self) -> str:
        return self.text


class _AsText(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name, evaluate):
        return _Reference(f"@{scoped_configurable_name}{'()' if evaluate else ''}")

    def macro(self, scoped_name):
        return _Reference(f"%{scoped_name}")


def parameters(text: str) -> dict[str, Any]:
    """The value of each class's parameter in an operative configuration.

    Macros are replaced by their values; a reference to a class is no value, but its
    `repr` is its text.

    Raises:
      ValueError: `text` is no configuration.
    """
    values, macros = _statements(text)
    for name, value in values.items():
        seen = set()
        while isinstance(value, _Reference) and value.text not in seen:
            seen.add(value.text)
            value = macros.get(value.text, value)
        values[name] = value
    return values


def changed(before: str, now: str) -> list[str]:
    """What differs between two operative configurations, a line for each.

    Macros come first, such as `MODEL_DIMS: 64 -> 128`, and parameters that refer to
    them do not differ; parameters of `Experiment` come last. Empty if one of the two
    is no configuration.
    """
    try:
        (values, macros), (new_values, new_macros) = map(_statements, (before, now))
    except ValueError:
        return []
    rest = sorted(
        values.keys() | new_values.keys(), key=lambda n: ("Experiment." in n, n)
    )
    names = [*sorted(macros.keys() | new_macros.keys()), *rest]
    old, new = {**macros, **values}, {**new_macros, **new_values}
    return [
        f"{name.removeprefix('%')}: {shown(old, name)} -> {shown(new, name)}"
        for name in names
        if shown(old, name) != shown(new, name)
    ]


def shown(parameters: Mapping[str, Any], name: str) -> str:
    """The value of a parameter as a gin file has it, or that it is not used."""
    return repr(parameters[name]) if name in parameters else "not used"


def _statements(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of parameters as they are written, and of macros, by `%NAME`.

    Raises:
      ValueError: `text` is no configuration.
    """
    values, macros = {}, {}
    try:
        for statement in config_parser.ConfigParser(text, _AsText()):
            if isinstance(statement, config_parser.BindingStatement):
                scope = f"{statement.scope}/" if statement.scope else ""
                if statement.arg_name:
                    name = f"{scope}{statement.selector}.{statement.arg_name}"
                    values[name] = statement.value
                else:
                    macros[f"%{scope}{statement.selector}"] = statement.value
    # Checkpoints may be damaged.
    except (SyntaxError, tokenize.TokenError, RecursionError) as error:
        raise ValueError(f"no configuration: {error}") from error
    return values, macros


def rounds_of_pipelines(metadata: Any) -> int | None:
    """`Pipeline.num_repeats` of the configuration in a checkpoint's metadata.

    1 if it has no pipelines; None if pipelines differ, or there is no configuration
    that can be read.
    """
    try:
        text = metadata["config"]
        values = parameters(text)
    except (KeyError, TypeError, ValueError):
        return None
    if not text:
        return None
    rounds = {v for name, v in values.items() if is_rounds_of_pipeline(name)}
    (known, *others) = rounds or {1}
    return None if others or not isinstance(known, int) or known < 1 else known


def is_rounds_of_pipeline(name: str) -> bool:
    """Whether a parameter says how many rounds a pipeline has."""
    return name.endswith("Pipeline.num_repeats")
