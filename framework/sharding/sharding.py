"""The sharding of a tensor over a device mesh (GSPMD 3.1)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.markup import axes_html, code_html, split_html
from meshwright.framework.sharding import xla_form
from meshwright.framework.sharding.mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The mesh axes that split each dim of a tensor.

    `dims[i]` are the axes splitting tensor dim i, major first; () leaves it unsharded.
    No axis at all is the paper's replicated, every axis its tiled, and some axes its
    partially tiled sharding (GSPMD 3.1). An axis may be a sub-axis, `Y:(1)2`.

    Args:
      mesh: the device mesh.
      dims: the axes that split each dim.
      unspecified: numbers of the dims that propagation may split, or split further
        (GSPMD 3.5, partial specification).
      manual: axes along which the tensor is manual: each device holds its own tensor of
        this very shape (GSPMD 3.4). Along all axes it is the paper's manual, along some
        its manual subgroups.
      unreduced: axes along which each device holds a part of an unreduced sum: the
        tensor is the sum of these parts.
      reduced: axes along which the tensor is replicated, and its gradient unreduced.

    Raises:
      ValueError: an unknown axis, or an axis used twice; a sum unreduced along a
        sub-axis, or of a tensor that is manual or has dims left to propagation.
    """

    mesh: DeviceMesh
    dims: tuple[tuple[str, ...], ...]
    unspecified: tuple[int, ...] = ()
    manual: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()

    def __post_init__(self):
        used: list[tuple[str, str]] = []
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                self._check_free(axis, f"on dim {dim}", used)
        for name in ("manual", "unreduced", "reduced"):
            for axis in getattr(self, name):
                self._check_free(axis, f"as {name}", used)
        self._check_unreduced()
        if not all(0 <= dim < self.rank for dim in self.unspecified):
            raise ValueError(
                f"unspecified dims {self.unspecified} of a tensor of rank {self.rank}"
            )
        object.__setattr__(self, "unspecified", tuple(sorted(set(self.unspecified))))

    def _check_unreduced(self) -> None:
        axes = (*self.unreduced, *self.reduced)
        if parts := [axis for axis in axes if self.mesh.part(axis).axis != axis]:
            raise ValueError(
                f"a sharding is unreduced or reduced along {parts[0]!r}, a part of a "
                "mesh axis: that works along full mesh axes"
            )
        if axes and (self.manual or self.unspecified):
            raise ValueError(
                f"a sharding is unreduced or reduced along {', '.join(axes)}, and also "
                "manual or left to propagation in some dims: give all its dims"
            )
        for name in ("unreduced", "reduced"):  # In the mesh's order.
            names = getattr(self, name)
            ordered = tuple(a for a in self.mesh.axis_names if a in names)
            object.__setattr__(self, name, ordered)

    def _check_free(self, axis: str, where: str, used: list[tuple[str, str]]) -> None:
        part = self.mesh.part(axis)
        for used_axis, there in used:
            taken = self.mesh.part(used_axis)
            if (
                part.axis == taken.axis
                and part.before < taken.end
                and taken.before < part.end
            ):
                raise ValueError(
                    f"mesh axis {axis!r} is used twice in one tensor: {there} and "
                    f"{where}; an axis can split one dim only"
                )
        used.append((axis, where))

    @classmethod
    def from_dims_mapping(
        cls,
        mesh: DeviceMesh,
        dims_mapping: Sequence,
        rank: int | None = None,
        *,
        unspecified_dims: Sequence[int] = (),
        unreduced: Sequence[str] = (),
        reduced: Sequence[str] = (),
    ) -> Sharding:
        """Reads the paper's `dims_mapping`.

        Args:
          mesh: the device mesh.
          dims_mapping: for each tensor dim a mesh axis, as its index or its name, -1 or
            None for no split, or a sequence of axes for a dim split by several.
          rank: the tensor's rank, to check the mapping against.
          unspecified_dims: numbers of the dims that propagation decides.
          unreduced, reduced: mesh axes, by index or name.

        Raises:
          ValueError: wrong length, a text, an unknown axis, or an axis used twice.
        """
        if isinstance(dims_mapping, str) or not isinstance(dims_mapping, Iterable):
            what = "a text" if isinstance(dims_mapping, str) else "no sequence"
            raise ValueError(
                f"dims_mapping {dims_mapping!r} is {what}: give a sequence with an "
                'entry for each dim, such as ["X", None]'
            )
        made = cls(  # An unknown axis is told of before a wrong number of dims.
            mesh,
            tuple(_axes(mesh, entry) for entry in dims_mapping),
            tuple(unspecified_dims),
            unreduced=_axes(mesh, unreduced),
            reduced=_axes(mesh, reduced),
        )
        if rank is not None and len(dims_mapping) != rank:
            raise ValueError(
                f"dims_mapping {list(dims_mapping)} is of rank {len(dims_mapping)}, "
                f"and the tensor of rank {rank}; give one entry for each dim"
            )
        return made

    @classmethod
    def replicated(cls, mesh: DeviceMesh, rank: int) -> Sharding:
        """Every device holds the entire tensor."""
        return cls(mesh, ((),) * rank)

    @property
    def is_typed(self) -> bool:
        """Whether the tensor or its gradient is unreduced along an axis."""
        return bool(self.unreduced or self.reduced)

    def dual(self) -> Sharding:
        """The sharding of the gradient of a tensor with this sharding.

        Split and replicated stay; unreduced becomes reduced and vice versa ("Replicate
        forwards, partial backwards").
        """
        return dataclasses.replace(self, unreduced=self.reduced, reduced=self.unreduced)

    def without_trivial_types(self) -> Sharding:
        """This sharding without unreduced and reduced axes of a single device."""
        size = self.mesh.axis_size
        return dataclasses.replace(
            self,
            unreduced=tuple(axis for axis in self.unreduced if size(axis) > 1),
            reduced=tuple(axis for axis in self.reduced if size(axis) > 1),
        )

    def untyped(self) -> Sharding:
        """This sharding with nothing unreduced: replicated along such axes."""
        return dataclasses.replace(self, unreduced=(), reduced=())

    def _repr_html_(self) -> str:
        """For notebooks: the split, drawn, and the axes of each dim in colour."""
        names = self.mesh.axis_names
        split = [
            (dim, names.index(self.mesh.part(axes[0]).axis), count)
            for dim, (axes, count) in enumerate(
                zip(self.dims, self.splits(), strict=True)
            )
            if count > 1
        ]
        is_last = bool(split) and split[-1][0] == self.rank - 1
        drawn = split_html([(axis, count) for _, axis, count in split], is_last)
        mesh = ", ".join(
            f"{axes_html([name], names)}={size}"
            for name, size in zip(names, self.mesh.shape, strict=True)
        )
        return f"<div>{drawn} {code_html(str(self))} over {mesh}</div>"

    @property
    def rank(self) -> int:
        return len(self.dims)

    def splits(self) -> tuple[int, ...]:
        """The number of shards of each dim."""
        return tuple(self.mesh.axes_size(axes) for axes in self.dims)

    def is_replicated(self) -> bool:
        """Whether every device holds the entire tensor."""
        per_device = (*self.manual, *self.unreduced)
        varies = self.unspecified or self.mesh.axes_size(per_device) > 1
        return not varies and all(n == 1 for n in self.splits())

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """`shape` with each dim raised to a multiple of its number of shards."""
        pairs = zip(shape, self.splits(), strict=True)
        return tuple(-(-size // n) * n for size, n in pairs)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a device's shard, to which the last shards are padded."""
        pairs = zip(shape, self.splits(), strict=True)
        return tuple(-(-size // n) for size, n in pairs)

    def shard_offsets(self, shape: Sequence[int]) -> np.ndarray:
        """The offset of each device's shard in a tensor of `shape`.

        Returns:
          int [*mesh.shape, rank]; a shard whose offset is past the end is all padding.
        """
        places = [self._shard_number(dim) for dim in range(self.rank)]
        if not places:
            return np.zeros((*self.mesh.shape, 0), int)
        return np.stack(places, axis=-1) * np.array(self.shard_shape(shape), int)

    def _shard_number(self, dim: int) -> np.ndarray:
        """The number of each device's shard along `dim`, of the mesh's shape."""
        return xla_form.place_along(self.mesh, self.dims[dim])

    def opened(self, dims: Sequence[int], *, but: Sequence[str] = ()) -> Sharding:
        """This sharding with `dims` left to propagation, if an axis is free for them.

        If none is free, other than `but`, there is nothing to decide, and GSPMD ends
        the process where such a tensor meets a region that is manual along all axes.
        """
        used = {*but, *(axis for axes in self.dims for axis in axes)}
        left = [axis for axis in self.mesh.axis_names if axis not in used]
        if self.mesh.axes_size(left) == 1:
            return self
        return dataclasses.replace(self, unspecified=tuple(dims))

    def even(self, shape: Sequence[int]) -> Sharding:
        """This sharding without the axes of dims that these do not divide."""
        dims = tuple(
            axes if size % n == 0 else ()
            for axes, size, n in zip(self.dims, shape, self.splits(), strict=True)
        )
        return dataclasses.replace(self, dims=dims)

    def __str__(self) -> str:
        """The text: a dim's axes joined by `.`, `_` for none, `?` left to propagation.

        `[X,_,Y]`, `[X.Y,_]`, `[X,?]`, `[X?]`, `[_,Y] manual{X}`; `[]` is a scalar's.
        `{U:X}` follows where a sum is unreduced, `{R:X}` where the gradient's will be.
        """
        entries = [
            (".".join(axes) + ("?" if dim in self.unspecified else "")) or "_"
            for dim, axes in enumerate(self.dims)
        ]
        manual = f" manual{{{','.join(self.manual)}}}" if self.manual else ""
        return f"[{','.join(entries)}]{manual}{self.types_text()}"

    def types_text(self) -> str:
        """`{U:tp}`, `{R:dp,tp}`, `{U:dp}{R:tp}`; "" if the sharding is not typed."""
        kinds = (("U", self.unreduced), ("R", self.reduced))
        return "".join(f"{{{k}:{','.join(axes)}}}" for k, axes in kinds if axes)

    @classmethod
    def parse(cls, mesh: DeviceMesh, text: str) -> Sharding:
        """Reads the text form.

        Raises:
          ValueError: the text is no sharding, or names an unknown axis.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no sharding such as '[X,_,Y.Z]'")
        entries = match["dims"].split(",") if match["dims"] else []
        names = [entry.removesuffix("?") for entry in entries]
        if "" in entries:
            raise ValueError(f"{text!r} has a dim without a word: `_` is for unsplit")
        names = ["" if name == "_" else name for name in names]
        return cls(
            mesh,
            tuple(tuple(name.split(".")) if name else () for name in names),
            tuple(dim for dim, entry in enumerate(entries) if entry.endswith("?")),
            *(
                tuple(match[name].split(",")) if match[name] else ()
                for name in ("manual", "unreduced", "reduced")
            ),
        )

    def to_op_sharding(self) -> xla_data_pb2.OpSharding:
        """XLA's OpSharding over the mesh's device ids.

        It cannot express unspecified dims; XLA keeps those beside it.
        """
        return xla_form.to_op_sharding(self)

    @classmethod
    def from_op_sharding(
        cls, mesh: DeviceMesh, proto: xla_data_pb2.OpSharding, rank: int
    ) -> Sharding:
        """Reads an OpSharding back into mesh axes; see `from_hlo`."""
        return cls(**xla_form.from_op_sharding(mesh, proto, rank))

    def to_hlo(self) -> str:
        """HLO's text form over the mesh's device ids."""
        return xla_form.to_hlo(self)

    @classmethod
    def from_hlo(cls, mesh: DeviceMesh, text: str, rank: int) -> Sharding:
        """Reads an HLO sharding (`{devices=[2,1,4]0,1,...}`) back into mesh axes.

        A device order that the axes of `mesh` cannot give is kept: the result is then
        over a mesh of the same axes and devices in another order.

        Raises:
          ValueError: it spans devices other than the mesh's, or a single device.
        """
        return cls(**xla_form.from_hlo(mesh, text, rank))

    def to_sdy(self) -> str:
        """Shardy's dim shardings over the mesh's axes: `[{"X"}, {}, {"Y", ?}]`."""
        return xla_form.to_sdy(self)

    @classmethod
    def from_sdy(cls, mesh: DeviceMesh, text: str) -> Sharding:
        """Reads Shardy's dim shardings, alone or in an `#sdy.sharding<...>`.

        Raises:
          ValueError: there are none, or an axis is unknown.
        """
        return cls(**xla_form.from_sdy(mesh, text))


_TEXT = re.compile(
    r"\[(?P<dims>[^\]]*)\](?: manual\{(?P<manual>[^}]*)\})?"
    r"(?:\{U:(?P<unreduced>[^}]+)\})?(?:\{R:(?P<reduced>[^}]+)\})?"
)


def _axes(mesh: DeviceMesh, entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (int, np.integer)):
        if entry == -1:
            return ()
        if not 0 <= entry < len(mesh.shape):
            raise ValueError(
                f"dims_mapping entry {entry} is no axis of the mesh ({mesh}): use "
                f"0..{len(mesh.shape) - 1}, -1 for unsplit, or an axis name"
            )
        return (mesh.axis_names[entry],)
    if not isinstance(entry, Iterable):
        raise ValueError(
            f"dims_mapping entry {entry!r} is no axis of the mesh ({mesh}): name an "
            "axis, or several as a tuple, and None for a dim that is not split"
        )
    return tuple(axis for element in entry for axis in _axes(mesh, element))
