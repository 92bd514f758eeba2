"""Which axes split which variables, by patterns of their names."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gc
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from meshwright.framework.sharding.mesh import DeviceMesh, read_pattern
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm
from meshwright.framework.sizes import bytes_text

_PATH = "_meshwright_path"
_NUMBER = re.compile(r"_\d+$")
_WARNED_BYTES = 1 << 20
"""That variables of fewer bytes are padded is no warning: it costs next to nothing."""


def path_of(variable: tf.Variable) -> str:
    """The name of a variable as layouts, messages and reports have it."""
    return vars(variable).get(_PATH) or variable.name.removesuffix(":0")


def by_path(variables: Iterable[tf.Variable]) -> dict[str, tf.Variable]:
    """Variables by path, in their order; those of the same path are numbered."""
    named = {}
    for variable in variables:
        path = path_of(variable)
        numbered = (f"{path}:{number}" for number in itertools.count(1))
        names = itertools.chain([path], numbered)
        named[next(name for name in names if name not in named)] = variable
    return named


def note_path(variable: Any) -> tf.Variable:
    """TF's variable of a Keras variable, whose path is its name from now on.

    TF's own name lacks layers: it is `model/kernel` for each `Dense` of a subclass.
    """
    value = variable._value  # `value` may be a cast.
    vars(value)[_PATH] = variable.path
    return value


def note_keras_paths() -> None:
    """Notes the paths of all variables of Keras, those that no model tracks too."""
    kind = getattr(sys.modules.get("keras"), "Variable", None)
    for thing in gc.get_objects() if kind is not None else ():
        is_variable = issubclass(type(thing), kind)
        if is_variable and isinstance(getattr(thing, "_value", None), tf.Variable):
            note_path(thing)


class Layout:
    """Which mesh axes split which variables."""

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides."""
        raise NotImplementedError

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """For reports: what splits it, or why nothing does; "" if it is not known."""
        return self.missed(variable, mesh)

    def missed(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """Why it is not split though it is of a kind that is; "" if it is not."""
        del variable, mesh
        return ""

    def summary(self, variables: Sequence[tf.Variable], mesh: DeviceMesh) -> str:
        """What it does to the variables, in a few words; "" if the user said so."""
        del variables, mesh
        return ""

    def lacking(
        self,
        variables: Sequence[tf.Variable],
        forms: Sequence[StoredForm | None],
        mesh: DeviceMesh,
    ) -> str:
        """What it should do and cannot, for a warning with its remedy; "" if nothing.

        Args:
          variables: of a compiled program.
          forms: in which it keeps them.
          mesh: the program's.
        """
        del variables, forms, mesh
        return ""

    def check(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Raises ValueError if it does not fit the variables of the program `name`."""

    keeps: Callable[[Sequence[tf.Variable]], bool] | None = None
    """Whether variables that a trace made are there for the next call; see `trace`."""

    def compiling(
        self, graph: tf.Graph, specs: Sequence[tf.TensorSpec]
    ) -> contextlib.AbstractContextManager[None]:
        """Is open while a program is compiled.

        Args:
          graph: of the function.
          specs: of its tensors.
        """
        del graph, specs
        return contextlib.nullcontext()

    def report(
        self, variables: Sequence[tf.Variable], forms: Sequence[StoredForm | None]
    ) -> None:
        """Is given the forms in which a compiled program keeps the variables."""


@dataclasses.dataclass(frozen=True)
class LayoutTable(Layout):
    """A table from names of variables to the mesh axes that split their dims.

    Args:
      rows: regular expressions, and for each what `mesh_split` takes as its
        `dims_mapping`, or JAX's `PartitionSpec`. The first that is in a variable's name
        applies.
      owner: name of the model or the function, for messages.
      told: the rows that a warning has named.
    """

    rows: Mapping[str, Sequence[Any]]
    owner: str = "layout"
    told: set[str] = dataclasses.field(default_factory=set, repr=False, compare=False)

    def __post_init__(self):
        """Raises ValueError for a row that no variable could have."""
        rows = {pattern: _of_jax(dims) for pattern, dims in self.rows.items()}
        object.__setattr__(self, "rows", rows)
        for pattern, dims in rows.items():
            row = f"row {pattern!r}: {dims!r} of the layout"
            if not isinstance(pattern, str):
                raise ValueError(f"{row} begins with no regular expression: pass a str")
            read_pattern(pattern, row)
            if isinstance(dims, str) or not isinstance(dims, Sequence):
                raise ValueError(
                    f"{row} is no list: name the mesh axis of each dim, None for a dim "
                    "that is not split, such as [None, 'model']"
                )

    def check_axes(self, mesh: DeviceMesh, name: str) -> None:
        """Raises ValueError for a row that is for no axes of the mesh."""
        for pattern, dims in self.rows.items():
            try:
                Sharding.from_dims_mapping(mesh, dims)
            except ValueError as error:
                raise ValueError(f"{name}: layout row {pattern!r}: {error}") from None

    def unused(self, variables: Sequence[tf.Variable]) -> list[str]:
        """The rows that fit none of the variables."""
        paths = [path_of(variable) for variable in variables]
        return [p for p in self.rows if not any(re.search(p, path) for path in paths)]

    def undecided(self, variables: Sequence[tf.Variable]) -> dict[str, str]:
        """The rows that fit variables, each of which an earlier row fits too.

        Returns:
          For each such row the first of the earlier rows that fits the first variable.
        """
        deciding = {path_of(v): self._row_of(path_of(v)) for v in variables}
        earlier = {}
        for row in self.rows.keys() - {*deciding.values()}:
            fitting = [path for path in deciding if re.search(row, path)]
            if fitting:
                earlier[row] = deciding[fitting[0]]
        return earlier

    def _row_of(self, path: str) -> str | None:
        """The row that decides about a variable, if there is one."""
        return next((row for row in self.rows if re.search(row, path)), None)

    def check(
        self, variables: Sequence[tf.Variable], name: str, hint: str = ""
    ) -> None:
        """Raises ValueError, with a hint, for a row that fits no variable of `name`.

        A row that decides about none, as earlier rows do, is a warning.
        """
        self.check_matches(variables, name, hint)
        for row, first in self.undecided(variables).items():
            if row not in self.told:
                self.told.add(row)
                logging.warning(
                    "%s: layout row %r decides nothing, as earlier rows, such as %r, "
                    "match all its variables: put it before them",
                    *(name, row, first),
                )

    def check_matches(
        self, variables: Sequence[tf.Variable], name: str, hint: str = ""
    ) -> None:
        """Raises ValueError, with a hint, for a row that fits no variable of `name`."""
        for pattern in self.unused(variables):
            paths = [path_of(variable) for variable in variables]
            parts = {part: path for path in paths for part in _parts(path)}
            names = "/".join(re.findall(r"\w+", pattern))  # Of "^up/.*kernel$".
            near = difflib.get_close_matches(names, parts, 1)
            near = f"; near it is {parts[near[0]]!r}" if near else ""
            raise ValueError(
                f"{name}: layout row {pattern!r} matches none of its {len(paths)} "
                f"variables: {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}"
                f"{near}{hint}"
            )

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides.

        Raises:
          ValueError: its row has another number of dims, or no axes of the mesh.
        """
        path, rank = path_of(variable), variable.shape.rank
        pattern = self._row_of(path)
        if pattern is None:
            return None
        dims = self.rows[pattern]
        if isinstance(dims, _Leading):
            dims = (*dims, *[None] * (rank - len(dims)))
        if len(dims) != rank:
            raise ValueError(
                f"{self.owner}: layout row {pattern!r} has {len(dims)} entries, and "
                f"matches {path!r}, which has {rank} dims: narrow the expression, or "
                "put a row for that variable before it"
            )
        try:
            return Sharding.from_dims_mapping(mesh, dims, rank)
        except ValueError as error:
            raise ValueError(
                f"{self.owner}: layout row {pattern!r} for variable {path!r} of shape "
                f"{tuple(variable.shape)}: {error}"
            ) from None

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """The row that is for it."""
        del mesh
        row = self._row_of(path_of(variable))
        nothing = "no row of the layout is for it" if self.rows else ""
        return nothing if row is None else f"row {row!r} of the layout"


def _parts(path: str) -> Iterator[str]:
    """What people write for a path: neighbours in it, with their numbers or without."""
    whole = path.split("/")
    for names in [_NUMBER.sub("", name) for name in whole], whole:  # As "dense_115".
        for first, last in itertools.combinations(range(len(names) + 1), 2):
            yield "/".join(names[first:last])


class _Leading(tuple):
    """A row whose dims are a variable's first; those behind them are not split."""


def _of_jax(dims: Any) -> Any:
    """A row of a table; JAX's `PartitionSpec` as the row that it stands for.

    Raises:
      ValueError: it says more than which axes split which dims.
    """
    kind = type(dims)
    # In some versions of JAX it is a tuple.
    if kind.__module__.split(".")[0] != "jax" or not hasattr(dims, "UNCONSTRAINED"):
        return dims
    more = getattr(dims, "unreduced", ()) or getattr(dims, "reduced", ())
    if more or any(entry is dims.UNCONSTRAINED for entry in dims):
        raise ValueError(
            f"{dims!r} in a row of the layout is unreduced, reduced or unconstrained, "
            "and a variable is split by axes or not: give the axes of its dims alone"
        )
    return _Leading(dims)


@dataclasses.dataclass(frozen=True)
class Replicated(Layout):
    """Each device holds each variable."""

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding:
        """Splits no dim."""
        return Sharding.replicated(mesh, variable.shape.rank)

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """That it is not split."""
        del variable, mesh
        return 'the layout "data", which splits no weights'


@dataclasses.dataclass(frozen=True)
class FullySharded(Layout):
    """Each variable is split along its largest dim, and gathered where it is used.

    Args:
      axes: the mesh axes that split it.
    """

    axes: Sequence[str]

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding:
        """Splits the largest dim that the axes divide, else the largest."""
        shape, count = tuple(variable.shape), mesh.axes_size(self.axes)
        dims: list[Sequence[str]] = [()] * len(shape)
        largest = max(shape, default=0)
        if largest >= count:
            divided = [size for size in shape if size % count == 0]
            dims[shape.index(max(divided, default=largest))] = tuple(self.axes)
        return Sharding(mesh, tuple(dims))

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """That the largest dim is split, or why it is not."""
        largest, count = max(variable.shape, default=1), mesh.axes_size(self.axes)
        if largest < count:
            devices = f"{count}, the number of its devices"
            return f'the layout "fsdp", which splits no dim shorter than {devices}'
        if any(size % count == 0 for size in variable.shape):
            return (
                'the layout "fsdp", which splits the largest dim that its axes divide'
            )
        return 'the layout "fsdp", which pads the largest dim, as its axes divide none'


def rows_of(
    weights: Iterable[Any], layout: Layout, mesh: DeviceMesh, owner: str
) -> dict[str, list[Any]]:
    """A layout's row for each weight that it decides about; see `mw.keras.rows`.

    Args:
      weights: of Keras.
      layout: the layout.
      mesh: the device mesh.
      owner: of the weights, for messages.

    Raises:
      ValueError: the layout treats weights of one path differently, or refuses one.
    """
    rows: dict[str, list[Any] | None] = {}
    for weight in weights:
        sharding, row = layout.sharding_of(note_path(weight), mesh), None
        if sharding is not None:
            row = [list(d) if d[1:] else d[0] if d else None for d in sharding.dims]
        if rows.setdefault(f"^{re.escape(weight.path)}$", row) != row:
            raise ValueError(
                f"{owner} has two weights {weight.path!r}, which the layout treats "
                "differently, and a row is for both: give their layers names"
            )
    return {path: row for path, row in rows.items() if row is not None}


def layout_notes(
    layout: Layout,
    mesh: DeviceMesh,
    variables: Sequence[tf.Variable],
    forms: Sequence[StoredForm | None],
) -> tuple[str, bool]:
    """What a layout does to the variables of a program, in a line.

    Args:
      layout: of the variables.
      mesh: the device mesh.
      variables: the program's.
      forms: of the variables, in order; None: completion decides.

    Returns:
      The line, and whether it is of note: the layout did not do something that it is to
      do, or much is padded.
    """
    total = held = alike = count = uneven = 0
    padded = []
    for variable, form in zip(variables, forms, strict=False):
        size = variable.shape.num_elements() * variable.dtype.size
        split = form.border.splits() if form else ()
        share = size // math.prod(split)
        total, held = total + size, held + share
        if share == size:
            alike, count = alike + size, count + 1
        if form and form.combined is None and not form.is_logical:
            uneven += size
            padded.append(f"{path_of(variable)} {form.shape} to {form.stored_shape}")
    why = {path_of(v): layout.missed(v, mesh) for v in variables}
    missed = [f"{path}: {text}" for path, text in why.items() if text]
    line = (
        f"each of {mesh.size} devices holds {bytes_text(held)} of {bytes_text(total)} "
        f"of variables; replicated are {count} of {len(variables)}, {bytes_text(alike)}"
    )
    if summary := layout.summary(variables, mesh):
        line += f"; {summary}"
    if padded:
        line += f"; padded, as the axes do not divide them: {_first(padded)}"
    if missed:
        are = f"are {len(missed)}, such as" if len(missed) > 1 else "is"
        line += f"; not split {are} {missed[0]}"
    return line, bool(missed) or uneven >= _WARNED_BYTES


def _first(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more
