"""The sharding type of a tensor: what each device holds of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import dtype_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

SUM = "sum"


class IllTypedError(Exception):
    """An op that the types of its operands do not allow.

    Args:
      rule: why not, in few words.
      remedy: what would make it right.
    """

    def __init__(self, rule: str, remedy: str):
        super().__init__(f"{rule}; {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uncombined:
    """Along a mesh axis each device holds a part, which are not combined yet.

    Args:
      axis: the axis, or part of one.
      kind: how they are to be combined: "sum", or "max", "min", "and", ... of a
        reduction over a dim that the axis splits; "halo" of a window that reaches over
        into the neighbours' shards.
      decided: whether the program says that it is unreduced: the tensor is unreduced.
        Else it is for the program to say where the tensor lies.
      origins: the ops that left it so.
    """

    axis: str
    kind: str = SUM
    decided: bool = False
    origins: tuple[Any, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorType:
    """What each device holds of a tensor.

    Args:
      mesh: the device mesh.
      element: element type in HLO's words: "f32", "s32", "pred", ...
      shape: of the whole tensor.
      dims: for each dim the axes that split it, major first.
      uncombined: along which axes it is not combined yet.
      reduced: axes along which it is replicated, and its gradient unreduced.
      names: for each dim the user's name for it, None without one.
      free: whether it is made of constants alone: of it each device has what it needs.
      zero: whether it is also zero everywhere, so that it is a part of any sum.

    Raises:
      IllTypedError: an axis would be used twice.
    """

    mesh: DeviceMesh
    element: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    uncombined: tuple[Uncombined, ...] = ()
    reduced: tuple[str, ...] = ()
    names: tuple[str | None, ...] = dataclasses.field(default=(), compare=False)
    free: bool = False
    zero: bool = False

    def __post_init__(self):
        size = self.mesh.axis_size  # An axis of one device is of no effect.
        dims = tuple(tuple(a for a in axes if size(a) > 1) for axes in self.dims)
        uncombined = [one for one in self.uncombined if size(one.axis) > 1]
        reduced = [axis for axis in self.reduced if size(axis) > 1]
        uncombined.sort(key=lambda one: self._number(one.axis))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "uncombined", tuple(uncombined))
        object.__setattr__(self, "reduced", tuple(sorted(reduced, key=self._number)))
        if not self.names:
            object.__setattr__(self, "names", (None,) * len(self.shape))
        self._check_once()

    def _number(self, axis: str) -> int:
        """The place of an axis, or a part of one, in the mesh."""
        return self.mesh.axis_names.index(self.mesh.part(axis).axis)

    def _check_once(self) -> None:
        used = list(self._uses())
        for i, (axis, where) in enumerate(used):
            for other, there in used[:i]:
                if overlap(self.mesh, axis, other):
                    raise IllTypedError(
                        f"its result would be {there} and {where}",
                        "an axis has one use in a tensor: mesh_split or reshard an "
                        "operand so that it has",
                    )

    def _uses(self) -> Iterator[tuple[str, str]]:
        for dim, axes in enumerate(self.dims):
            yield from ((axis, f"split by {axis} in dim {dim}") for axis in axes)
        for one in self.uncombined:
            yield one.axis, f"a partial {one.kind} along {one.axis}"
        for axis in self.reduced:
            yield axis, f"reduced along {axis}"

    @classmethod
    def of(
        cls, value: ir.Value, mesh: DeviceMesh, dims: Sequence | None = None, **how: Any
    ) -> TensorType:
        """Of a value of a module, unsplit by default."""
        shape = tuple(ir.RankedTensorType(value.type).shape)
        given = ((),) * len(shape) if dims is None else tuple(map(tuple, dims))
        element = dtype_of(value)
        return cls(mesh=mesh, element=element, shape=shape, dims=given, **how)

    @classmethod
    def said(
        cls, value: ir.Value, sharding: Sharding, names: Sequence[str | None] = ()
    ) -> TensorType:
        """What an annotation of `value` says."""
        uncombined = [
            Uncombined(axis=axis, decided=True) for axis in sharding.unreduced
        ]
        return cls.of(
            value,
            sharding.mesh,
            sharding.dims,
            uncombined=tuple(uncombined),
            reduced=sharding.reduced,
            names=tuple(names),
        )

    @property
    def is_float(self) -> bool:
        return "f" in self.element or self.element in ("c64", "c128")

    @property
    def unreduced(self) -> tuple[str, ...]:
        """The axes along which the program says that a sum is unreduced."""
        return tuple(one.axis for one in self.uncombined if one.decided)

    @property
    def undecided(self) -> tuple[Uncombined, ...]:
        """What is unreduced without that the program says so."""
        return tuple(one for one in self.uncombined if not one.decided)

    @property
    def sharding(self) -> Sharding:
        """As one would annotate it, nothing undecided."""
        return Sharding(
            self.mesh, self.dims, unreduced=self.unreduced, reduced=self.reduced
        )

    def without_origins(self) -> TensorType:
        """The same, of no module."""
        uncombined = [dataclasses.replace(one, origins=()) for one in self.uncombined]
        return dataclasses.replace(self, uncombined=tuple(uncombined))

    def said_text(self, dims: Sequence[tuple[str, ...]]) -> str:
        """How one would annotate it with other dims."""
        return str(dataclasses.replace(self.sharding, dims=tuple(dims)))

    def pending_along(self, axis: str) -> Uncombined | None:
        """What is unreduced along an axis, or a part of it."""
        found = (p for p in self.uncombined if overlap(self.mesh, p.axis, axis))
        return next(found, None)

    def splits(self, axis: str) -> bool:
        """Whether an axis, or a part of it, splits a dim."""
        return any(overlap(self.mesh, own, axis) for d in self.dims for own in d)

    def __str__(self) -> str:
        """`f32[seq, batch@dp, 16]{U:tp}`; `{sum?:tp}` is for the program to decide."""
        dims = [
            (name or str(size)) + (f"@{'.'.join(axes)}" if axes else "")
            for name, size, axes in zip(self.names, self.shape, self.dims, strict=True)
        ]
        groups: dict[str, list[str]] = {}
        for one in self.uncombined:
            mark = "U" if one.decided else f"{one.kind}?"
            groups.setdefault(mark, []).append(one.axis)
        if self.reduced:
            groups["R"] = list(self.reduced)
        marks = "".join(f"{{{mark}:{','.join(axes)}}}" for mark, axes in groups.items())
        return f"{self.element}[{', '.join(dims)}]{marks}"


def overlap(mesh: DeviceMesh, axis: str, other: str) -> bool:
    """Whether two axes, or parts of axes, have steps in common."""
    one, two = mesh.part(axis), mesh.part(other)
    return one.axis == two.axis and one.before < two.end and two.before < one.end
