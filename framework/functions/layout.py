"""Which axes split which variables, by patterns of their names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


def path_of(variable: tf.Variable) -> str:
    """The name of a variable as layouts, messages and reports have it."""
    return variable.name.removesuffix(":0")


class Layout(Protocol):
    """Which mesh axes split which variables."""

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides."""


@dataclasses.dataclass(frozen=True)
class LayoutTable:
    """A table from names of variables to the mesh axes that split their dims.

    Args:
      rows: regular expressions, and for each what `mesh_split` takes as its
        `dims_mapping`. The first that is in a variable's name applies.
    """

    rows: Mapping[str, Sequence[Any]]

    def __post_init__(self):
        """Raises ValueError for a row that no variable could have."""
        for pattern, dims in self.rows.items():
            row = f"row {pattern!r}: {dims!r} of the layout"
            if not isinstance(pattern, str):
                raise ValueError(f"{row} begins with no regular expression: pass a str")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{row}: {error} in the regular expression") from None
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

    def check(
        self, variables: Sequence[tf.Variable], name: str, hint: str = ""
    ) -> None:
        """Raises ValueError, with a hint, for a row that fits no variable of `name`."""
        for pattern in self.unused(variables):
            paths = [path_of(variable) for variable in variables]
            raise ValueError(
                f"{name}: row {pattern!r} of the layout is in the name of none of "
                f"its {len(paths)} variables: {', '.join(paths[:8])}"
                f"{', ...' if len(paths) > 8 else ''}{hint}"
            )

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides.

        Raises:
          ValueError: its row has another number of dims, or no axes of the mesh.
        """
        for pattern, dims in self.rows.items():
            if re.search(pattern, path_of(variable)):
                try:
                    return Sharding.from_dims_mapping(mesh, dims, variable.shape.rank)
                except ValueError as error:
                    raise ValueError(
                        f"layout row {pattern!r} for variable {path_of(variable)!r} of "
                        f"shape {tuple(variable.shape)}: {error}"
                    ) from None
        return None


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Each device holds each variable."""

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding:
        """Splits no dim."""
        return Sharding.replicated(mesh, variable.shape.rank)


@dataclasses.dataclass(frozen=True)
class FullySharded:
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
