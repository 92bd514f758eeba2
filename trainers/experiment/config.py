"""Gin at the edge: files found by name, bindings that are known and take effect."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

import gin
import tensorflow as tf

PARAMS = pathlib.Path(__file__).parents[2] / "params"
"""The shipped gin files: beside this room in a checkout, and installed as well."""

_MACRO = "gin.macro"
_RENAMED = {"ShardingPlan.partial_axes": "unreduced_gradient_axes"}
"""Parameters by the names that they had once."""
# Of a configuration; ours have a hundred references and ten files at most. Where each
# macro names the next one twice, or each file includes it twice, twenty make a million.
_MOST_REFERENCES = 10_000
_MOST_FILES = 1000
_T = TypeVar("_T")

# Keys of bindings that a later one put out of use on purpose: see `load`.
_set_aside: set[tuple[str, str, str]] = set()

# Under a module name of ours, so that `gin.tf`'s own constants can live beside them.
for _dtype in (tf.float32, tf.bfloat16, tf.float16):
    gin.constant(f"meshwright.{_dtype.name}", _dtype)


class ConfigError(ValueError):
    """A gin file or binding that is unknown, malformed or without effect."""


def find_gin_file(path: str | os.PathLike) -> pathlib.Path:
    """The file that `path` names.

    Args:
      path: absolute, relative to the working directory, or relative to `params/`, in
        this order; `.gin` may be left out.

    Raises:
      ConfigError: there is none; names the shipped files that are spelled alike.
    """
    path = os.fspath(path)
    names = [path] if path.endswith(".gin") else [path, f"{path}.gin"]
    for root in (pathlib.Path(), PARAMS):
        for name in names:
            if (root / name).is_file():
                return root / name
    shipped = sorted(
        file.relative_to(PARAMS).as_posix() for file in PARAMS.rglob("*.gin")
    )
    raise ConfigError(
        f"no gin file {path!r}, neither from {os.getcwd()} nor in {PARAMS}"
        + _did_you_mean(names[-1], shipped)
    )


def load(
    gin_files: Sequence[str | os.PathLike], gin_params: Sequence[str] = ()
) -> None:
    """Replaces gin's configuration by files and then single bindings, and locks it.

    The modules whose classes the bindings name must have been imported, or a file must
    `import` them: what a file can run is what is installed, at import, and classes that
    are registered; see docs/hostile_input.md. `include` in a file finds files as
    `find_gin_file` does. The constants `%float32`, `%bfloat16`
    and `%float16` are TensorFlow's dtypes.

    A later binding may refer to another class: `Experiment.optimizer = @SGD()` over a
    file that sets up Adam. What was bound until then for the class it replaces is set
    aside: it need not take effect.

    Args:
      gin_files: as for `find_gin_file`; later ones override earlier ones.
      gin_params: bindings such as `"Adam.beta1 = 0.8"`, which override the files'.

    Raises:
      ConfigError: a file that is not there or cannot be parsed; an unknown class,
        parameter, macro or constant, with the nearest known name; a parameter left at
        `%gin.REQUIRED`; an import of what has no classes for gin.
    """
    gin.clear_config()
    _set_aside.clear()
    with _reading_gin_files(), _noting_replaced_classes(), _checking_imports():
        for path in gin_files:
            with _explained(f"gin file {os.fspath(path)}"):
                gin.parse_config_file(os.fspath(path))
        for line in gin_params:
            with _explained("gin parameters"):
                gin.parse_config(line)
        with _explained("gin configuration"):
            gin.finalize()


def build(cls: type[_T]) -> _T:
    """The `cls` that the loaded configuration describes.

    Raises:
      ConfigError: a parameter has no binding and no default, or a value is of a wrong
        type; references have no end, or too many.
      ValueError: a class refuses its parameters.
    """
    try:
        with _counting_references():
            return gin.get_configurable(cls)()
    except TypeError as error:
        raise ConfigError(_missing_parameters(str(error))) from error
    # What classes run into that expect other values.
    except (ArithmeticError, AttributeError, LookupError) as error:
        raise ConfigError(str(error)) from error


def load_and_build(
    cls: type[_T], gin_files: Sequence[str], gin_params: Sequence[str]
) -> tuple[_T, list[str]]:
    """What files and bindings describe, and which of them others have replaced.

    Raises:
      ConfigError: see `load`, `build` and `check_all_operative`.
      ValueError: a class refuses its parameters.
    """
    load(gin_files, gin_params)
    return build(cls), check_all_operative()


def check_all_operative() -> list[str]:
    """Checks that every binding took effect; call it when all has been built.

    A binding takes effect when gin passes its value to a call of its class, or when
    its macro is evaluated for such a call.

    Returns:
      The bindings without effect that were set aside (see `load`), as text.

    Raises:
      ConfigError: lists each other binding without effect, why, and what to do.
    """
    unused = [(one, why) for one in _bindings() if (why := _why_inoperative(one))]
    problems = [
        f"  {one}\n    {why}" for one, why in unused if one.key not in _set_aside
    ]
    if problems:
        raise ConfigError(
            f"{len(problems)} gin binding(s) never took effect:\n" + "\n".join(problems)
        )
    return [str(one) for one, _ in unused]


def operative_text() -> str:
    """All parameter values in effect, defaults included, as a gin file.

    `gin.markdown` makes it fit for TensorBoard's text tab.
    """
    return gin.operative_config_str()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Binding:
    """One parsed `scope/Class.parameter = value`, or a macro's `scope = value`."""

    scope: tuple[str, ...]
    selector: str
    parameter: str
    value: Any

    @property
    def key(self) -> tuple[str, str, str]:
        return "/".join(self.scope), self.selector, self.parameter

    def __str__(self) -> str:
        scope = "/".join(self.scope)
        if self.selector == _MACRO:
            return f"{scope} = {self.value!r}"
        prefix = f"{scope}/" if scope else ""
        return f"{prefix}{_short(self.selector)}.{self.parameter} = {self.value!r}"


def _bindings() -> list[_Binding]:
    return [
        _Binding(scope=_split(scope), selector=selector, parameter=name, value=value)
        for (scope, selector), values in gin.config._CONFIG.items()
        for name, value in values.items()
    ]


def _why_inoperative(binding: _Binding) -> str | None:
    """Why no call got the binding's value, and the remedy; None if one did."""
    calls = {
        _split(scope): values
        for (scope, selector), values in gin.config._OPERATIVE_CONFIG.items()
        if selector == binding.selector
    }
    depth = len(binding.scope)
    inside = [scope for scope in calls if scope[:depth] == binding.scope]
    if any(
        binding.parameter in calls[scope] and not _overridden(binding, scope)
        for scope in inside
    ):
        return None
    name = _short(binding.selector)
    if binding.selector == _MACRO:
        return f"nothing in use refers to %{'/'.join(binding.scope)}: remove it"
    if not calls:
        return f"gin built no {name}: refer to one as @{name}(), or remove the binding"
    if not inside:
        scope = "/".join(binding.scope)
        built_in = ["/".join(one) for one in calls if one]
        return (
            f"gin built no {name} in scope {scope!r}: refer to one as "
            f"@{scope}/{name}(), or remove the binding" + _did_you_mean(scope, built_in)
        )
    return (
        f"every {name} got its {binding.parameter} from code or from the binding of an "
        "inner scope: remove this one"
    )


def _overridden(binding: _Binding, scope: tuple[str, ...]) -> bool:
    """Whether, for a call in `scope`, a more deeply scoped binding wins."""
    return any(
        binding.parameter
        in gin.config._CONFIG.get(("/".join(scope[:depth]), binding.selector), {})
        for depth in range(len(binding.scope) + 1, len(scope) + 1)
    )


@contextlib.contextmanager
def _noting_replaced_classes() -> Iterator[None]:
    """Sets aside what is bound for a class when another reference takes its place."""
    bind = gin.config.bind_parameter

    def bind_and_note(key, value):
        parsed = gin.config.ParsedBindingKey.parse(key)
        key = (*parsed.config_key, parsed.arg_name)
        before = {one.key: one for one in _bindings()}
        bind(key, value)
        _set_aside.discard(key)
        if key in before:
            replaced = _references(before[key].value) - _references(value)
            _put_aside(replaced, before.values())

    with _in_place(gin.config, "bind_parameter", bind_and_note):
        yield


def _put_aside(replaced: set[tuple[str, str]], bindings: Collection[_Binding]) -> None:
    """Puts those of `bindings` aside that serve references, directly or not."""
    while replaced:
        scope, selector = replaced.pop()
        for one in bindings:
            # A macro is named by its scope; a class may be bound in any.
            same = selector != _MACRO or "/".join(one.scope) == scope
            if one.selector == selector and same and one.key not in _set_aside:
                _set_aside.add(one.key)
                replaced |= _references(one.value)


def _references(value: Any) -> set[tuple[str, str]]:
    """(scope, selector) of each class and macro that a bound value refers to."""
    return {one.config_key for one in gin.config.iterate_references({"": value})}


@contextlib.contextmanager
def _checking_imports() -> Iterator[None]:
    """Lets files import packages that may register classes, and nothing else.

    With gin's dynamic registration a file could call any function there is.
    """
    process = gin.config.ParseContext.process_import

    def check_and_process(context, statement):
        package = statement.module.partition(".")[0]
        if package == "__gin__":
            raise ConfigError(
                f"`{statement.format()}` would let a gin file call any function: take "
                "it out, and register your classes by @gin.register"
            )
        if package in sys.stdlib_module_names:
            raise ConfigError(
                f"`{statement.format()}` is for modules that register classes by "
                "@gin.register, which none of Python's own does: take it out"
            )
        process(context, statement)

    with _in_place(gin.config.ParseContext, "process_import", check_and_process):
        yield


@contextlib.contextmanager
def _counting_references() -> Iterator[None]:
    """Ends the building of what refers to itself, or to far too much."""
    copy = gin.config.ConfigurableReference.__deepcopy__
    seen = 0

    def count_and_copy(reference, memo):
        nonlocal seen
        seen += 1
        if seen > _MOST_REFERENCES:
            raise ConfigError(
                f"more than {_MOST_REFERENCES} references are followed, the last to "
                f"{reference!r}: see what refers to it, and how often"
            )
        try:
            return copy(reference, memo)
        except RecursionError:
            raise ConfigError(
                f"{reference!r} refers to itself, by way of others or not: bind "
                "something else"
            ) from None

    with _in_place(gin.config.ConfigurableReference, "__deepcopy__", count_and_copy):
        yield


@contextlib.contextmanager
def _reading_gin_files() -> Iterator[None]:
    """Makes gin find files as `find_gin_file` does, in `include` statements too."""
    opened = 0

    def open_file(path: str) -> TextIO:
        nonlocal opened
        opened += 1
        if opened > _MOST_FILES:
            raise ConfigError(f"more than {_MOST_FILES} gin files are included")
        return open(str(find_gin_file(path)), encoding="utf-8")

    # gin.register_file_reader would append to gin's own readers, one of which logs an
    # error for each path that names no Python package.
    with _in_place(gin.config, "_FILE_READERS", [(open_file, lambda path: True)]):
        yield


@contextlib.contextmanager
def _in_place(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts a value in the place of gin's own while the context lasts."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turns whatever gin raises while it parses into a ConfigError with a hint."""
    try:
        yield
    except SyntaxError as error:
        place = error.filename if error.filename not in (None, "<tokenize>") else source
        line = f"line {error.lineno}\n    {(error.text or '').strip()}"
        raise ConfigError(f"{place}: {_message(error.msg)}\n  In {line}") from error
    except ConfigError:
        raise
    # An imported module may raise anything.
    except Exception as error:
        raise ConfigError(f"{source}: {_message(str(error))}") from error


def _message(text: str) -> str:
    """Gin's message `text` with the nearest known name, where it is about a name."""
    if match := re.match(
        r"Configurable '(.+?)' doesn't have a parameter .*'(.+)'", text
    ):
        configurable = gin.config._REGISTRY.get_match(match[1])
        if new := _RENAMED.get(f"{_short(configurable.selector)}.{match[2]}"):
            return f"{text}\n  It is called {new!r} now."
        parameters = inspect.signature(configurable.wrapped).parameters
        return text + _did_you_mean(match[2], parameters)
    if match := re.match(r"No configurable matching (?:reference )?'@?([\w./]+)", text):
        name = match[1].rsplit("/", 1)[-1]
        return text + _did_you_mean(name, _suffixes(gin.config._REGISTRY, like=name))
    # Python's words for a bare name are of its own syntax tree.
    if match := re.match(r"malformed node.*\s+Failed to parse token '(.+)'", text):
        hint = f"{match[1]!r} is no value: quote a text, write %NAME for a macro or "
        return hint + "constant, @NAME() for a class" + text[match.end() :]
    if match := re.match(rf"No bindings specified for '(.+)/{_MACRO}'", text):
        return _unknown_macro(match[1])
    return text


def _missing_parameters(text: str) -> str:
    """What a `TypeError` with the message `text` says, in terms of bindings."""
    missing = re.search(r"missing \d+ required .*arguments?: (.*)", text)
    culprit = re.search(r"In call to configurable '(\S+)'", text)
    if not missing or not culprit:
        return text
    names = [f"{culprit[1]}.{name}" for name in re.findall(r"'(\w+)'", missing[1])]
    return (
        f"{', '.join(names)} must be set: bind it in a gin file, or by "
        f"--gin_param='{names[0]} = ...'"
    )


def _unknown_macro(name: str) -> str:
    macros = ["/".join(one.scope) for one in _bindings() if one.selector == _MACRO]
    known = macros + _suffixes(gin.config._CONSTANTS, like=name)
    users = "".join(
        f"\n    {one}" for one in _bindings() if f"%{name}" in repr(one.value)
    )
    hint = _did_you_mean(name, known, prefix="%")
    return f"no macro or constant %{name}, used by{users}{hint}"


def _suffixes(selectors: Any, *, like: str) -> list[str]:
    """The ends of dotted selectors, as many parts of each as `like` has."""
    parts = like.count(".") + 1
    return [".".join(one.split(".")[-parts:]) for one, _ in selectors.items()]


def _did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    known = sorted(set(known))
    if near := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"\n  Did you mean {' or '.join(prefix + one for one in near)}?"
    if 0 < len(known) <= 20:
        return f"\n  Known are {', '.join(prefix + one for one in known)}."
    return ""


def _short(selector: str) -> str:
    return gin.config._REGISTRY.minimal_selector(selector)


def _split(scope: str) -> tuple[str, ...]:
    return tuple(scope.split("/")) if scope else ()
