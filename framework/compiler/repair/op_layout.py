"""How the tensors of one operation are sharded, by the operation's own factors.

In terms of the factors of Shardy's rules the compiler can check whether the tensors of
any operation agree, and give it another layout, without knowing what it computes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.framework.compiler.hlo.hlo_text import itemsize
from meshwright.framework.compiler.stablehlo.shardy.op_rules import FactorKind, rule_of
from meshwright.framework.compiler.stablehlo.stable_hlo import dtype_of, shape_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An operand or a result.

    Args:
      shape: its logical shape.
      factors: for each dim its factor; None for a dim of several factors or none.
      sharding: the completed sharding; None if mesh axes cannot express it.
      itemsize: bytes of an element.
    """

    shape: tuple[int, ...]
    factors: tuple[int | None, ...]
    sharding: Sharding | None
    itemsize: int

    def axes(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dim."""
        return self.sharding.dims[dim] if self.sharding else ()

    def may_split(self, dim: int) -> bool:
        """Whether axes split a dim, or may, as its sharding is unknown."""
        return self.sharding is None or bool(self.sharding.dims[dim])

    def splitting(self) -> tuple[tuple[str, ...], ...]:
        """The axes that split each dim, as far as is known."""
        return self.sharding.dims if self.sharding else ()

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same size."""
        if self.sharding is None:
            return False
        pairs = zip(self.shape, self.sharding.splits(), strict=True)
        return all(size % shards == 0 for size, shards in pairs)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def shard_bytes(self) -> int:
        """Bytes of a shard, or of the tensor if its sharding is unknown."""
        shape = self.sharding.shard_shape(self.shape) if self.sharding else self.shape
        return math.prod(shape) * self.itemsize

    def bytes_received(self, held: Sharding | None, needed: Sharding | None) -> int:
        """Bytes that a device receives to have another shard of the tensor.

        Args:
          held: the sharding that devices hold; None if unknown, or they hold none.
          needed: the sharding that they are to hold; None if it is unknown.

        Returns:
          The bytes for the device that receives the most; 0 if `needed` is unknown.
        """
        if needed is None:
            return 0
        first, last = self._shards(needed)
        missing = np.maximum(last - first, 0).prod(-1)
        if held is not None:
            begin, end = self._shards(held)
            common = np.minimum(last, end) - np.maximum(first, begin)
            missing = missing - np.maximum(common, 0).prod(-1)
        return int(missing.max()) * self.itemsize

    def _shards(self, sharding: Sharding) -> tuple[np.ndarray, np.ndarray]:
        """The offsets where all devices' shards begin and end, without padding."""
        first = sharding.shard_offsets(self.shape)
        last = first + np.array(sharding.shard_shape(self.shape), int)
        return first, np.minimum(last, self.shape)

    def divides(self, dim: int, size: int | None = None) -> bool:
        """Whether the shards along a dim are known, and of equal size.

        Args:
          dim: a dim of the tensor.
          size: the size of a dim to be split like it; by default its own.
        """
        if self.sharding is None:
            return False
        size = self.shape[dim] if size is None else size
        return size % self.sharding.splits()[dim] == 0

    def dim_of(self, factor: int) -> int | None:
        """The dim that a factor is in this tensor, None if it is none."""
        return self.factors.index(factor) if factor in self.factors else None

    def axes_of(self, factor: int) -> tuple[str, ...] | None:
        """The axes that split a factor, None if it is no dim of this tensor."""
        dim = self.dim_of(factor)
        return None if dim is None else self.axes(dim)


@dataclasses.dataclass(frozen=True, eq=False)
class OpLayout:
    """An operation, and how its tensors are sharded.

    Args:
      op: the operation, in a completed module.
      mesh: the program's mesh.
      operands, results: its tensors.
      kinds: the kinds of its factors, by number.
      manual: the manual axes of the regions around it.
      is_replaced: whether XLA replaced it by operations of another kind, or removed
        it, before propagation.
    """

    op: Any
    mesh: DeviceMesh
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    kinds: tuple[FactorKind, ...]
    manual: tuple[str, ...] = ()
    is_replaced: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands + self.results

    def with_shardings(self, shardings: Sequence[Sharding | None]) -> OpLayout:
        """The same with other shardings, of the operands and then the results."""
        tensors = tuple(
            dataclasses.replace(tensor, sharding=sharding)
            for tensor, sharding in zip(self.tensors, shardings, strict=True)
        )
        count = len(self.operands)
        return dataclasses.replace(
            self, operands=tensors[:count], results=tensors[count:]
        )

    @property
    def shardings(self) -> list[Sharding | None]:
        """The shardings of the operands, then of the results."""
        return [tensor.sharding for tensor in self.tensors]

    @property
    def is_even(self) -> bool:
        return all(tensor.is_even for tensor in self.tensors)

    def groups(self, factor: int) -> set[tuple[str, ...]]:
        """The groups of axes by which its tensors split a factor."""
        return {axes for *_, axes in self.places(factor)}

    def by_axis(self, tensors: Iterable[Tensor]) -> dict[str, set[int | None]]:
        """The factors that each axis of the mesh splits, in any of these tensors."""
        factors: dict[str, set[int | None]] = {}
        for tensor in tensors:
            for dim, factor in enumerate(tensor.factors):
                for axis in tensor.axes(dim):
                    factors.setdefault(self.mesh.part(axis).axis, set()).add(factor)
        return factors

    def places(self, factor: int) -> Iterator[tuple[Tensor, int, tuple[str, ...]]]:
        """(tensor, dim, axes) where a factor is."""
        for tensor in self.tensors:
            dim = tensor.dim_of(factor)
            if dim is not None:
                yield tensor, dim, tensor.axes(dim)


def layout_of(
    op,
    mesh: DeviceMesh,
    shardings: Sequence[Sharding | None],
    manual: tuple[str, ...] = (),
) -> OpLayout:
    """The layout of an operation that has its sharding rule as an attribute.

    Args:
      op: the operation.
      mesh: the program's mesh.
      shardings: the shardings of its operands, then its results.
      manual: the manual axes of the regions around it.
    """
    values = [*op.operands, *op.results]
    rule = rule_of(op)
    mappings = [*rule.operands, *rule.results]
    tensors = tuple(
        Tensor(shape_of(value), factors, _split(sharding), itemsize(dtype_of(value)))
        for value, factors, sharding in zip(values, mappings, shardings, strict=True)
    )
    count = len(op.operands)
    return OpLayout(op, mesh, tensors[:count], tensors[count:], rule.kinds, manual)


def _split(sharding: Sharding | None) -> Sharding | None:
    """A sharding without the axes of size 1, which split nothing."""
    if sharding is None:
        return None
    size = sharding.mesh.axis_size
    dims = tuple(tuple(a for a in axes if size(a) > 1) for axes in sharding.dims)
    return dataclasses.replace(sharding, dims=dims)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvenLayout:
    """A layout in which all tensors of an operation agree and are split evenly.

    Args:
      shardings: the shardings of the operands, then of the results.
      shapes: their shapes, larger where tensors are to be padded.
      copies: whether annotations alone repair the operation, by the copies that XLA
        makes for them, though its layout does not change.
    """

    shardings: tuple[Sharding, ...]
    shapes: tuple[tuple[int, ...], ...]
    copies: bool = False

    def is_of(self, layout: OpLayout) -> bool:
        """Whether an operation has this layout."""
        return layout.shardings == list(self.shardings)


def even_layout(
    layout: OpLayout,
    keep: Collection[FactorKind] = (FactorKind.PARALLEL,),
    *,
    pad: Collection[int] = (),
    agreed: bool = False,
) -> EvenLayout:
    """An even layout near the completed one.

    The largest tensors keep their splits first. As many of the axes that split a dim
    are kept, major ones first, as divide the factor in each tensor.

    Args:
      layout: the operation and its completed layout.
      keep: the kinds of factors that may be split.
      pad: factors that are padded rather than split by fewer axes, if there is an
        element for each shard.
      agreed: whether factors that all tensors split alike come before others.
    """
    places = [
        (tensor, dim, factor)
        for tensor in layout.tensors
        for dim, factor in enumerate(tensor.factors)
        if factor is not None and layout.kinds[factor] in keep
    ]
    places.sort(key=lambda of: (agreed and len(layout.groups(of[2])) > 1, -of[0].bytes))
    chosen: dict[int, tuple[str, ...]] = {}
    for tensor, dim, factor in places:
        if factor in chosen:
            continue
        if axes := _kept(layout, factor, tensor.axes(dim), chosen, factor in pad):
            chosen[factor] = axes
    shardings = tuple(
        Sharding(
            layout.mesh,
            tuple(chosen.get(factor, ()) for factor in tensor.factors),
            manual=layout.manual,
        )
        for tensor in layout.tensors
    )
    shapes = (
        sharding.padded_shape(tensor.shape)
        for tensor, sharding in zip(layout.tensors, shardings, strict=True)
    )
    return EvenLayout(shardings=shardings, shapes=tuple(shapes))


def _kept(
    layout: OpLayout,
    factor: int,
    wanted: Sequence[str],
    chosen: Mapping[int, tuple[str, ...]],
    pad: bool,
) -> tuple[str, ...]:
    """The wanted axes that may split a factor."""
    mesh = layout.mesh
    taken = {mesh.part(axis).axis for axes in chosen.values() for axis in axes}
    untaken = itertools.takewhile(lambda a: mesh.part(a).axis not in taken, wanted)
    free = tuple(untaken)
    sizes = {tensor.shape[dim] for tensor, dim, _ in layout.places(factor)}
    if pad and len(sizes) == 1 and max(sizes) >= mesh.axes_size(free):
        return free
    while free and any(size % mesh.axes_size(free) for size in sizes):
        free = free[:-1]
    return free
