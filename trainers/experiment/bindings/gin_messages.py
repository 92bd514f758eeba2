"""Messages on wrong bindings, in terms of gin files, with the nearest known names."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import gin

from meshwright.trainers.experiment.bindings import of_t5x
from meshwright.trainers.experiment.bindings.field_types import (
    Misfit,
    misfits_of,
    spelling,
    type_hints,
)

MACRO = "gin.macro"
"""Gin's selector of macros; the name of a macro is the scope of its binding."""
_RENAMED = {"ShardingPlan.partial_axes": "unreduced_gradient_axes"}
"""The new names of parameters, by their former names."""
_ELSEWHERE = {"AdamW": "Adam, whose weight_decay is that of AdamW"}
"""What stands here for classes that other packages have."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MOST_LISTED = 20
OF_YOURS = "is a class of yours"
"""What the message on a name that is like no other has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """A parsed `scope/Class.parameter = value`, or a macro's `scope = value`."""

    scope: tuple[str, ...]
    selector: str
    parameter: str
    value: Any

    @property
    def key(self) -> tuple[str, str, str]:
        return "/".join(self.scope), self.selector, self.parameter

    def __str__(self) -> str:
        return f"{key_text(self.key)} = {self.value!r}"


def bindings() -> list[Binding]:
    """All bindings that gin has parsed."""
    return [
        Binding(
            scope=split_scope(scope), selector=selector, parameter=name, value=value
        )
        for (scope, selector), values in gin.config._CONFIG.items()
        for name, value in values.items()
    ]


def key_text(key: tuple[str, str, str]) -> str:
    """A binding's key (scope, selector, parameter) as a gin file has it."""
    scope, selector, parameter = key
    if selector == MACRO:
        return scope
    prefix = f"{scope}/" if scope else ""
    return f"{prefix}{short_name(selector)}.{parameter}"


def references(value: Any) -> set[tuple[str, str]]:
    """(scope, selector) of each class and macro that a bound value refers to."""
    return {ref.config_key for ref in gin.config.iterate_references({"": value})}


def message(text: str) -> str:
    """Gin's message `text` with the nearest known name, where it is about a name."""
    if match := re.match(
        r"Configurable '(.+?)' doesn't have a parameter .*'(.+)'", text
    ):
        configurable = gin.config._REGISTRY.get_match(match[1])
        name = f"{short_name(configurable.selector)}.{match[2]}"
        if new := _RENAMED.get(name):
            return f"{text}\n  It is called {new!r} now."
        if here := of_t5x.PARAMETERS.get(name):
            return f"{text}\n  T5X's {match[2]} is {here!r} here."
        parameters = inspect.signature(configurable.wrapped).parameters
        return text + did_you_mean(match[2], parameters)
    if match := re.match(r"No configurable matching (?:reference )?'@?([\w./]+)", text):
        name = match[1].rsplit("/", 1)[-1]
        bound = re.search(rf"\b{re.escape(name)}(\.\w+)? *=", text)
        if here := of_t5x.of_class(name + (bound and bound[1] or "")):
            return f"{text}\n  {here}."
        if here := _ELSEWHERE.get(name):
            return f"{text}\n  Did you mean {here}?"
        known = _suffixes(gin.config._REGISTRY, like=name)
        text += did_you_mean(name, known)
        if difflib.get_close_matches(name, known, cutoff=0.8):
            return text
        return (
            f"{text}{_fitting(text)}\n  If {name} {OF_YOURS}, the gin file must "
            "import the module that registers it:\n    import my_package.my_task\n"
            "  or the command be given --import=my_package.my_task, which registers "
            "all that the\n  module defines, as @my_package.my_task.NAME."
        )
    if match := re.match(r"No module named '(.+?)'", text):
        return text + (of_t5x.of_package(match[1]) or _where_modules_are())
    if text.startswith("Couldn't parse statement, expected"):
        return f"{text[:-1]}: write NAME=VALUE, as in Experiment.num_steps=100"
    if text == "Expected newline.":
        return f"{text[:-1]} after the value: quote a string, as in '8b'"
    if text == "Unable to parse value.":
        return f"{text[:-1]}: quote a string or a path, as in '/data'"
    # Python's words for a bare name are of its syntax tree.
    if match := re.match(r"malformed node.*\s+Failed to parse token '(.+)'", text):
        return (
            f"{match[1]!r} cannot be read as a value: quote a string, write %NAME for "
            f"a macro or constant, @NAME() for a class{text[match.end() :]}"
        )
    if match := re.match(rf"No bindings specified for '(.+)/{MACRO}'", text):
        return _unknown_macro(match[1])
    return text


def _fitting(text: str) -> str:
    """The registered classes that the parameter bound in gin's message `text` takes."""
    match = re.search(r"([\w.]+)\.(\w+) *= *@", text)
    owner = match and gin.config._REGISTRY.get_match(match[1])
    wanted = owner and type_hints(owner.wrapped).get(match[2])
    if not inspect.isclass(wanted) or wanted is object or _is_protocol(wanted):
        return ""
    fitting = sorted(
        short_name(selector)
        for selector, each in gin.config._REGISTRY.items()
        if isinstance(each.wrapped, type) and issubclass(each.wrapped, wanted)
    )
    if not 0 < len(fitting) <= _MOST_LISTED:
        return ""
    return f"\n  {match[1]}.{match[2]} takes {', '.join(fitting)}."


def _is_protocol(wanted: type) -> bool:
    """Whether nothing says what fits: classes do not name the protocols they follow."""
    return getattr(wanted, "_is_protocol", False)


def missing_parameters(text: str) -> str:
    """The message `text` of a `TypeError`, in terms of bindings."""
    missing = re.search(r"missing \d+ required .*arguments?: (.*)", text)
    culprit = re.search(r"In call to configurable '(\S+)'", text)
    if not missing or not culprit:
        return _without_calls(text)
    names = [f"{culprit[1]}.{name}" for name in re.findall(r"'(\w+)'", missing[1])]
    return (
        f"{' and '.join(names)} must be set: bind "
        f"{'it' if len(names) == 1 else 'them'} in a gin file, or by "
        f"--gin_param='{names[0]} = ...'"
    )


def refusal_text(text: str) -> str:
    """The message `text` of a class that refuses a value, with the value's binding."""
    text = _without_calls(text)
    match = re.match(r"(\w+)\.(\w+) is ", text)
    if match is None:
        return text
    bound = [b for b in bindings() if b.parameter == match[2]]
    return text + _bound_by(b for b in bound if b.selector.endswith(f".{match[1]}"))


def _without_calls(text: str) -> str:
    """`text` without gin's lines on what it was building, but for the class."""
    refusal, *calls = re.split(r"\n +In call to configurable '(\S+)' .*", text)
    if not calls or calls[0] in refusal:
        return refusal
    return f"{refusal}\n  @{calls[0]}() was being built."


def misfits_on_the_way(error: BaseException) -> Iterator[Misfit]:
    """The misfits of objects whose making an error ended, the innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        instance = frame.f_locals.get("self")
        if dataclasses.is_dataclass(instance):
            yield from misfits_of(instance)


def misfit_text(misfit: Misfit) -> str:
    """The error in a field, and the bindings that can have given it its value."""
    bound = (
        binding
        for binding in bindings()
        if binding.parameter == misfit.field
        and _wrapped(binding.selector) in (misfit.owner, None)
    )
    return f"{misfit}{_bound_by(bound)}"


def _bound_by(bound: Iterable[Binding]) -> str:
    return "".join(f"\n  It is bound by `{binding}`." for binding in bound)


def _wrapped(selector: str) -> type | None:
    """The class of a selector; None if it is a function's."""
    wrapped = gin.config._REGISTRY[selector].wrapped
    return wrapped if isinstance(wrapped, type) else None


def _unknown_macro(name: str) -> str:
    macros = ["/".join(bound.scope) for bound in bindings() if bound.selector == MACRO]
    known = macros + _suffixes(gin.config._CONSTANTS, like=name)
    # A constant that there is not is a macro's name, as far as gin can tell.
    users = [b for b in bindings() if (name, MACRO) in references(b.value)]
    # Words that macros share, such as DIMS, say nothing about which one is meant.
    hint = nearest(name, known, prefix="%", cutoff=0.8)
    if dtype := _DTYPES.get(name):
        hint = f"\n  Did you mean %{dtype}?"
    if not hint and users and users[0].selector != MACRO:
        hints = type_hints(gin.config._REGISTRY[users[0].selector].wrapped)
        if wanted := hints.get(users[0].parameter):
            hint = f"\n  It must be {spelling(wanted)}."
    if not hint:
        hint = f"\n  Set it, by {name} = ... in a gin file or in --gin_param."
    listed = "".join(f"\n    {bound}" for bound in users)
    if others := sorted(_undefined_macros() - {name}):
        hint += f"\n  Missing too: {', '.join(f'%{other}' for other in others)}."
    return f"no macro or constant %{name}, used by{listed}{hint}"


def _undefined_macros() -> set[str]:
    """The macros that bindings refer to, directly, and that nothing sets."""
    bound = {"/".join(b.scope) for b in bindings() if b.selector == MACRO}
    referred = {
        scope
        for b in bindings()
        for scope, selector in references(b.value)
        if selector == MACRO
    }
    return referred - bound


def _suffixes(selectors: Any, *, like: str) -> list[str]:
    """The ends of dotted selectors, as many parts of each as `like` has."""
    parts = like.count(".") + 1
    return [".".join(selector.split(".")[-parts:]) for selector, _ in selectors.items()]


def _where_modules_are() -> str:
    """Where Python looks for the modules that gin files import."""
    here = os.getcwd()
    is_searched = not {"", here}.isdisjoint(sys.path)
    if is_searched:
        return (
            "\n  It is looked for in the folders of PYTHONPATH, among installed "
            "packages, and last\n  in the working directory."
        )
    return (
        "\n  Python finds modules that are installed or in a folder of PYTHONPATH,\n"
        f"  which {here} is not: set PYTHONPATH=."
    )


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The nearest of `known`, or else all of them if they are few."""
    known = sorted(set(known))
    if near := nearest(name, known, prefix):
        return near
    if 0 < len(known) <= _MOST_LISTED:
        return f"\n  Known are {', '.join(prefix + text for text in known)}."
    return ""


def nearest(
    name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6
) -> str:
    """Suggests up to three names of `known` that are spelled like `name`; or ""."""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=cutoff)
    names = " or ".join(prefix + match for match in near)
    return f"\n  Did you mean {names}?" if near else ""


def short_name(selector: str) -> str:
    """The shortest name that a gin file may write for a selector."""
    return gin.config._REGISTRY.minimal_selector(selector)


def split_scope(scope: str) -> tuple[str, ...]:
    """The parts of a scope such as `encoder/attention`."""
    return tuple(scope.split("/")) if scope else ()
