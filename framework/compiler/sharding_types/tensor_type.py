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
      rule: why not, in a few words.
      remedy: what to do about it.
    """

    def __init__(self, rule: str, remedy: str):
        super().__init__(f"{rule}; {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialValue:
    """Along a mesh axis devices hold parts of a result, which are not combined yet.

    Args:
      axis: the axis, or part of one.
      kind: how the parts are to be combined: "sum", or "max", "min", "and", ... after a
        reduction over a dim that the axis splits; "halo" after a window that reaches
        into the neighbours' shards.
      decided: whether the program annotates the tensor as unreduced; otherwise it still
        has to annotate the tensor's sharding.
      origins: the ops that left the value partial.
      lenient: annotations that decided so, and may reduce it instead.
    """

    axis: str
    kind: str = SUM
    decided: bool = False
    origins: tuple[Any, ...] = dataclasses.field(default=(), compare=False)
    lenient: frozenset[Any] = dataclasses.field(default=frozenset(), compare=False)

    def merged(self, other: PartialValue) -> PartialValue:
        """Of two tensors that are partial along the axis, as of the terms of a sum."""
        kept = self if self.decided or not other.decided else other
        origins = tuple(dict.fromkeys((*self.origins, *other.origins)))
        lenient = self.lenient | other.lenient
        if (origins, lenient) == (kept.origins, kept.lenient):
            return kept
        return dataclasses.replace(kept, origins=origins, lenient=lenient)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorType:
    """What each device holds of a tensor.

    Args:
      mesh: the device mesh.
      element: element type in HLO's words: "f32", "s32", "pred", ...
      shape: the shape of the full tensor.
      dims: for each dim the axes that split it, major first.
      partial: its partial values, one for each axis along which it has any.
      reduced: axes along which it is replicated, and its gradient unreduced.
      names: for each dim the user's name for it, or None.
      free: whether it is made from constants alone, so that each device has what it
        needs of it.
      zero: whether it is also zero everywhere, so that it may be a part of any sum.

    Raises:
      IllTypedError: an axis would be used twice.
    """

    mesh: DeviceMesh
    element: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[PartialValue, ...] = ()
    reduced: tuple[str, ...] = ()
    names: tuple[str | None, ...] = dataclasses.field(default=(), compare=False)
    free: bool = False
    zero: bool = False

    def __post_init__(self):
        size = self.mesh.axis_size  # An axis of one device has no effect.
        dims = tuple(tuple(a for a in axes if size(a) > 1) for axes in self.dims)
        partial = [part for part in self.partial if size(part.axis) > 1]
        reduced = [axis for axis in self.reduced if size(axis) > 1]
        partial.sort(key=lambda part: self._number(part.axis))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "partial", tuple(partial))
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
            for earlier, there in used[:i]:
                if overlap(self.mesh, axis, earlier):
                    raise IllTypedError(
                        f"its result would be {there} and {where}",
                        "an axis has one use in a tensor: mesh_split or reshard an "
                        "operand so that it has",
                    )

    def _uses(self) -> Iterator[tuple[str, str]]:
        for dim, axes in enumerate(self.dims):
            yield from ((axis, f"split by {axis} in dim {dim}") for axis in axes)
        for part in self.partial:
            yield part.axis, f"a partial {part.kind} along {part.axis}"
        for axis in self.reduced:
            yield axis, f"reduced along {axis}"

    @classmethod
    def of(
        cls, value: ir.Value, mesh: DeviceMesh, dims: Sequence | None = None, **how: Any
    ) -> TensorType:
        """The type of a value of a module, unsharded by default."""
        shape = tuple(ir.RankedTensorType(value.type).shape)
        split = ((),) * len(shape) if dims is None else tuple(map(tuple, dims))
        element = dtype_of(value)
        return cls(mesh=mesh, element=element, shape=shape, dims=split, **how)

    @classmethod
    def from_annotation(
        cls, value: ir.Value, sharding: Sharding, names: Sequence[str | None] = ()
    ) -> TensorType:
        """The type that an annotation of `value` states."""
        partial = [PartialValue(axis=axis, decided=True) for axis in sharding.unreduced]
        return cls.of(
            value,
            sharding.mesh,
            sharding.dims,
            partial=tuple(partial),
            reduced=sharding.reduced,
            names=tuple(names),
        )

    @property
    def is_float(self) -> bool:
        return "f" in self.element or self.element in ("c64", "c128")

    @property
    def unreduced(self) -> tuple[str, ...]:
        """The axes along which the program annotates a sum as unreduced."""
        return tuple(part.axis for part in self.partial if part.decided)

    @property
    def undecided(self) -> tuple[PartialValue, ...]:
        """The partial values without an annotation for it."""
        return tuple(part for part in self.partial if not part.decided)

    @property
    def sharding(self) -> Sharding:
        """The sharding to annotate it with, without undecided parts."""
        return Sharding(
            self.mesh, self.dims, unreduced=self.unreduced, reduced=self.reduced
        )

    def is_as(self, other: Any) -> bool:
        """Whether another type is equal, where its partial values come from too."""
        if self is other:
            return True
        pairs = zip(self.partial, getattr(other, "partial", ()), strict=False)
        return self == other and all(
            (a.origins, a.lenient) == (b.origins, b.lenient) for a, b in pairs
        )

    def only_decided(self) -> TensorType:
        """The same type, once undecided parts are combined."""
        partial = tuple(part for part in self.partial if part.decided)
        if len(partial) == len(self.partial):
            return self
        return dataclasses.replace(self, partial=partial)

    def without_origins(self) -> TensorType:
        """The same type, without references to ops of a module."""
        partial = [
            dataclasses.replace(p, origins=(), lenient=frozenset())
            for p in self.partial
        ]
        return dataclasses.replace(self, partial=tuple(partial))

    def sharding_text(self, dims: Sequence[tuple[str, ...]]) -> str:
        """The text of its sharding, with other axes for its dims."""
        return str(dataclasses.replace(self.sharding, dims=tuple(dims)))

    def partial_along(self, axis: str) -> PartialValue | None:
        """The partial value along an axis, or along a part of the axis."""
        along = (p for p in self.partial if overlap(self.mesh, p.axis, axis))
        return next(along, None)

    def splits(self, axis: str) -> bool:
        """Whether an axis, or a part of it, splits a dim."""
        return any(overlap(self.mesh, used, axis) for d in self.dims for used in d)

    def __str__(self) -> str:
        """`f32[seq, batch@dp, 16]{U:tp}`; `{sum?:tp}` is for the program to decide."""
        dims = [
            (name or str(size)) + (f"@{'.'.join(axes)}" if axes else "")
            for name, size, axes in zip(self.names, self.shape, self.dims, strict=True)
        ]
        groups: dict[str, list[str]] = {}
        for part in self.partial:
            mark = "U" if part.decided else f"{part.kind}?"
            groups.setdefault(mark, []).append(part.axis)
        if self.reduced:
            groups["R"] = list(self.reduced)
        marks = "".join(f"{{{mark}:{','.join(axes)}}}" for mark, axes in groups.items())
        return f"{self.element}[{', '.join(dims)}]{marks}"


def overlap(mesh: DeviceMesh, axis: str, other: str) -> bool:
    """Whether two axes, or parts of axes, have steps in common."""
    a, b = mesh.part(axis), mesh.part(other)
    return a.axis == b.axis and a.before < b.end and b.before < a.end
