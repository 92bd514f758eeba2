"""Gin at the edge: files found by name, bindings that are known and take effect."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

import gin

from meshwright.trainers.experiment.bindings.field_types import misfits
from meshwright.trainers.experiment.bindings.gin_messages import (
    MACRO,
    Binding,
    bindings,
    did_you_mean,
    key_text,
    message,
    misfit_text,
    misfits_on_the_way,
    missing_parameters,
    nearest,
    references,
    refusal_text,
    short_name,
    split_scope,
)
from meshwright.trainers.experiment.bindings.of_t5x import (
    PAGE,
    of_macro,
    of_package,
)
from meshwright.trainers.experiment.bindings.outside_names import (
    KERAS,
    register_keras,
)
from meshwright.trainers.experiment.bindings.undone import Places

PARAMS = pathlib.Path(__file__).parents[2] / "params"
"""The shipped gin files: beside this room in a checkout, and installed as well."""

DTYPES = ("float32", "bfloat16", "float16")
"""TensorFlow's dtypes that are constants of gin files."""
_PLANS_MACRO, _SHAPE_OF_PLAN = "MESH_SHAPE", "ShardingPlan.mesh_shape"
# Limits of a configuration; shipped configurations have a hundred references and ten
# files at most. Where each macro names the next twice, or each file includes the next
# twice, twenty make a million.
_MOST_REFERENCES = 10_000
_MOST_FILES = 1000
_T = TypeVar("_T")

# Keys of bindings that a later binding put out of use on purpose, see `load`; and
# whether it was one of the same file, where they can go.
_set_aside: dict[tuple[str, str, str], bool] = {}
# The bindings that a file undoes, as text: see `undone`.
_undone: list[str] = []


class ConfigError(ValueError):
    """A gin file or binding that is unknown, malformed or without effect."""


def find_gin_file(
    path: str | os.PathLike, included_by: str | None = None
) -> pathlib.Path:
    """The file that `path` names.

    Args:
      path: absolute, relative to the folder of the file that includes it, to the
        working directory, or to `params/`, in this order; `.gin` may be left out.
      included_by: the file that includes it; None if no file does.

    Raises:
      ConfigError: there is no such file; the message names files spelled alike: those
        in the folder that the path names, and shipped ones.
    """
    path = os.fspath(path)
    names = [path] if path.endswith(".gin") else [path, f"{path}.gin"]
    beside = [] if included_by is None else [pathlib.Path(included_by).parent]
    roots = [*beside, pathlib.Path(), PARAMS]
    for root in roots:
        for name in names:
            if (root / name).is_file():
                return root / name
    for root in roots:
        if (root / path).is_dir():
            raise ConfigError(
                f"gin file {path!r} is a folder, {root.absolute() / path}: name a "
                "file in it"
            )
    shipped = sorted(
        file.relative_to(PARAMS).as_posix() for file in PARAMS.rglob("*.gin")
    )
    looked = dict.fromkeys(str(root.absolute()) for root in roots)
    raise ConfigError(
        f"no gin file {path!r}, neither from {' nor from '.join(looked)}"
        + (
            _beside(roots[:-1], names[-1])
            or of_package(path)
            or did_you_mean(names[-1], shipped)
        )
    )


def _beside(roots: Sequence[pathlib.Path], path: str) -> str:
    """Suggests gin files in the folder of `path` whose own names are alike; or ""."""
    folder, name = os.path.split(path)
    there = set()
    for root in roots:
        with contextlib.suppress(OSError):
            there |= {file.name for file in (root / folder).glob("*.gin")}
    # Paths would be alike by their folders alone.
    return nearest(name, there, prefix=os.path.join(folder, ""))


def load(
    gin_files: Sequence[str | os.PathLike], gin_params: Sequence[str] = ()
) -> None:
    """Replaces gin's configuration by files and then single bindings, and locks it.

    The modules whose classes the bindings name must have been imported, or a file must
    `import` them: a file can only run installed modules, at import, and registered
    classes; see docs/internals/hostile_input.md. `include` in a file finds files as
    `find_gin_file` does. The constants `%float32`, `%bfloat16` and `%float16`,
    TensorFlow's dtypes, come with the class `Experiment`.

    A later binding may refer to another class: `Experiment.optimizer = @SGD()` over a
    file that sets up Adam. The bindings until then for the class that it replaces are
    set aside: they need not take effect.

    A file that another includes once more sets its bindings back; where one of these
    had been replaced in between by a reference to another class, this is an error.

    Args:
      gin_files: as for `find_gin_file`; later files override earlier files.
      gin_params: bindings such as `"Adam.beta1 = 0.8"`, which override the files'.

    Raises:
      ConfigError: a file does not exist or cannot be parsed; a class, parameter, macro
        or constant is unknown (the message has the nearest known name); a parameter is
        left at `%gin.REQUIRED`; an imported module has no classes for gin; a file that
        is read again sets a reference back (the message has both places).
    """
    gin.clear_config()
    _set_aside.clear()
    _undone.clear()
    places = Places()
    with (
        _reading_gin_files(places),
        _noting_replaced_classes(places),
        _checking_imports(),
    ):
        for path in gin_files:
            with _explained(f"gin file {os.fspath(path)}"):
                gin.parse_config_file(os.fspath(path))
        for line in gin_params:
            with _explained("gin parameters", text=line):
                gin.parse_config(line)
        with _explained("gin configuration"):
            gin.finalize()
    for each in places.undone:
        if each.loses_a_class:
            raise ConfigError(str(each))
        _undone.append(str(each))


def undone() -> list[str]:
    """What `load` found set back by a file that is read again, other than classes.

    Each is a sentence with the binding, its file and line, and those that undo it.
    """
    return list(_undone)


def build(cls: type[_T]) -> _T:
    """The `cls` that the loaded configuration describes.

    Raises:
      ConfigError: a parameter has no binding and no default, a value is of a wrong
        type, or a class refuses it; references do not end, or are too many.
    """
    try:
        with _counting_references():
            built = gin.get_configurable(cls)()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(refusal_text(str(error))) from error
    # The errors of classes that expect values of other types.
    except (TypeError, ArithmeticError, AttributeError, LookupError) as error:
        text = missing_parameters(str(error))
        if misfit := next(misfits_on_the_way(error), None):
            text = misfit_text(misfit)
        raise ConfigError(text) from error
    if misfit := next(misfits(built), None):
        raise ConfigError(misfit_text(misfit))
    return built


def load_and_build(
    cls: type[_T], gin_files: Sequence[str], gin_params: Sequence[str]
) -> tuple[_T, list[str]]:
    """The `cls` of files and bindings, and the names of those that can go.

    Raises:
      ConfigError: see `load`, `build` and `check_all_operative`.
    """
    load(gin_files, gin_params)
    return build(cls), check_all_operative()


def check_all_operative() -> list[str]:
    """Checks that every binding took effect; call it when all has been built.

    A binding takes effect when gin passes its value to a call of its class, or when
    its macro is evaluated for such a call.

    Returns:
      The names of bindings without effect that were set aside, see `load`, by another
      of the same file, or both of the command line. Of an included file they are
      defaults, which it is usual to replace; and macros may serve other files.

    Raises:
      ConfigError: another binding has no effect; the message says why, and the remedy.
    """
    unused = [bound for bound in bindings() if _why_inoperative(bound)]
    _refuse([bound for bound in unused if bound.key not in _set_aside])
    aside = [key_text(bound.key) for bound in unused if _set_aside[bound.key]]
    return [name for name in aside if "." in name]


def bound_parameters(name: str) -> set[str]:
    """The parameters of a class that bindings set."""
    return {b.parameter for b in bindings() if short_name(b.selector) == name}


def check_all_referred(root: str) -> None:
    """Checks that every binding is for what a class refers to, directly or not.

    It can be called before anything is built: `check_all_operative` finds these
    bindings too, and others.

    Args:
      root: the name of the class that is to be built.

    Raises:
      ConfigError: as `check_all_operative`.
    """
    unreached = collections.defaultdict(list)
    for bound in bindings():
        unreached[_configures(bound)].append(bound)
    pending = [_configured("", gin.config._REGISTRY.get_match(root).selector)]
    while pending:
        for bound in unreached.pop(pending.pop(), ()):
            pending += [_configured(*key) for key in references(bound.value)]
    left = [bound for bound in bindings() if _configures(bound) in unreached]
    _refuse(bound for bound in left if bound.key not in _set_aside)


def _configures(bound: Binding) -> str:
    return _configured("/".join(bound.scope), bound.selector)


def _configured(scope: str, selector: str) -> str:
    """A macro, which is named by its scope, or a class in whatever scope."""
    return f"%{scope}" if selector == MACRO else selector


def _refuse(unused: Iterable[Binding]) -> None:
    problems = [f"  {bound}\n    {_why_inoperative(bound)}" for bound in unused]
    if problems:
        raise ConfigError(
            f"{len(problems)} gin binding(s) never took effect:\n" + "\n".join(problems)
        )


def operative_text() -> str:
    """All parameter values in effect, defaults included, as a gin file.

    `gin.markdown` makes it fit for TensorBoard's text tab.
    """
    return gin.operative_config_str()


def _why_inoperative(binding: Binding) -> str | None:
    """Why no call got the binding's value, and the remedy; None if a call did."""
    calls = {
        split_scope(scope): values
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
    name = short_name(binding.selector)
    if binding.selector == MACRO:
        macro = "/".join(binding.scope)
        referred = {
            scope: key_text(bound.key)
            for bound in bindings()
            for scope, selector in references(bound.value)
            if selector == MACRO
        }
        if macro == _PLANS_MACRO:
            shapes = [b for b in bindings() if key_text(b.key) == _SHAPE_OF_PLAN]
            if not shapes and not bound_parameters("ShardingPlan"):
                return _no_plan()
            if shapes and macro not in referred:
                return f"`{shapes[0]}` does not refer to it: change that instead"
        unused = f"nothing in use refers to %{macro}"
        if here := of_macro(macro):
            return f"{unused}: {here}"
        if macro in referred:
            return f"{unused}, only {referred[macro]}, which is not in use: remove it"
        return unused + (nearest(macro, referred, prefix="%") or ": remove it")
    if not calls:
        return f"gin built no {name}: refer to it as @{name}(), or remove the binding"
    if not inside:
        scope = "/".join(binding.scope)
        built_in = ["/".join(parts) for parts in calls if parts]
        return (
            f"gin built no {name} in scope {scope!r}: refer to it as "
            f"@{scope}/{name}(), or remove the binding" + did_you_mean(scope, built_in)
        )
    return (
        f"every {name} got its {binding.parameter} from code or from the binding of an "
        "inner scope: remove this binding"
    )


def _no_plan() -> str:
    plans = sorted(file.name for file in PARAMS.glob("plans/*.gin"))
    return (
        f"no plan refers to %{_PLANS_MACRO}, as none is included, and without one the "
        "job uses one device: include one, by include 'plans/data_tensor.gin' or "
        f"--gin_file=plans/data_tensor.gin\n    plans/ has {', '.join(plans)}"
    )


def _overridden(binding: Binding, scope: tuple[str, ...]) -> bool:
    """Whether, for a call in `scope`, a more deeply scoped binding wins."""
    return any(
        binding.parameter
        in gin.config._CONFIG.get(("/".join(scope[:depth]), binding.selector), {})
        for depth in range(len(binding.scope) + 1, len(scope) + 1)
    )


@contextlib.contextmanager
def _noting_replaced_classes(places: Places) -> Iterator[None]:
    """Sets aside the bindings of a class when another reference takes its place.

    Args:
      places: is told where they are bound.
    """
    bind = gin.config.bind_parameter
    following = places.following(gin.config.utils.try_with_location)

    def bind_and_note(key, value):
        parsed = gin.config.ParsedBindingKey.parse(key)
        key = (*parsed.config_key, parsed.arg_name)
        before = {binding.key: binding for binding in bindings()}
        bind(key, value)
        places.note(key, value)
        _set_aside.pop(key, None)
        if key in before:
            replaced = references(before[key].value) - references(value)
            _put_aside(replaced, before.values(), places)

    with (
        in_place(gin.config, "bind_parameter", bind_and_note),
        in_place(gin.config.utils, "try_with_location", following),
    ):
        yield


def _put_aside(
    replaced: set[tuple[str, str]], known: Collection[Binding], places: Places
) -> None:
    """Sets aside those of `known` that serve replaced references, directly or not."""
    while replaced:
        scope, selector = replaced.pop()
        for binding in known:
            # A macro is named by its scope; a class may be bound in any.
            same = selector != MACRO or "/".join(binding.scope) == scope
            if binding.selector == selector and same and binding.key not in _set_aside:
                _set_aside[binding.key] = places.is_bound_here(binding.key)
                replaced |= references(binding.value)


@contextlib.contextmanager
def _checking_imports() -> Iterator[None]:
    """Lets files import packages that may register classes, and nothing else.

    With gin's dynamic registration a file could call any function.
    """
    process = gin.config.ParseContext.process_import

    def check_and_process(context, statement):
        package = statement.module.partition(".")[0]
        if package == "__gin__":
            raise ConfigError(
                f"`{statement.format()}` would let a gin file call any function: take "
                "it out, and register your classes by @gin.register, or give "
                f"--import=my_module\n  {PAGE} says more of T5X's gin files."
            )
        if package in sys.stdlib_module_names:
            raise ConfigError(
                f"`{statement.format()}` is for modules that register classes by "
                "@gin.register, which no standard module does: take it out"
            )
        process(context, statement)
        if package in KERAS:
            register_keras(package)

    with in_place(gin.config.ParseContext, "process_import", check_and_process):
        yield


@contextlib.contextmanager
def _counting_references() -> Iterator[None]:
    """Ends the building of objects that refer to themselves, or to far too many."""
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
                f"{reference!r} refers to itself, directly or not: bind something else"
            ) from None

    with in_place(gin.config.ConfigurableReference, "__deepcopy__", count_and_copy):
        yield


@contextlib.contextmanager
def _reading_gin_files(places: Places) -> Iterator[None]:
    """Makes gin find files as `find_gin_file` does, in `include` statements too."""
    opened = 0

    def open_file(path: str) -> TextIO:
        nonlocal opened
        opened += 1
        if opened > _MOST_FILES:
            raise ConfigError(f"more than {_MOST_FILES} gin files are included")
        return open(str(find_gin_file(path, places.file)), encoding="utf-8")

    # gin.register_file_reader would append to gin's readers, one of which logs an
    # error for each path that names no Python package.
    with in_place(gin.config, "_FILE_READERS", [(open_file, lambda path: True)]):
        yield


@contextlib.contextmanager
def in_place(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of gin's while the context lasts."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _explained(source: str, *, text: str = "") -> Iterator[None]:
    """Turns whatever gin raises while it parses into a ConfigError with a hint.

    Args:
      source: what is parsed, for messages.
      text: its text, for errors at its end, of which gin does not say the line.
    """
    try:
        yield
    except SyntaxError as error:
        place = error.filename if error.filename not in (None, "<tokenize>") else source
        line = f"line {error.lineno}\n    {(error.text or '').strip() or text}"
        raise ConfigError(f"{place}: {message(error.msg)}\n  In {line}") from error
    except ConfigError:
        raise
    # An imported module may raise anything.
    except Exception as error:
        raise ConfigError(f"{source}: {message(str(error))}") from error
