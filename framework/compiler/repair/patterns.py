"""The layouts in which XLA's partitioner gets an operation wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.op_layout import (
    FactorKind,
    OpLayout,
    Tensor,
)
from meshwright.framework.compiler.repair.windows import (
    REDUCE_WINDOW,
    split_windows,
)
from meshwright.framework.compiler.stable_hlo import is_annotation, shape_of

SLICE, CONCATENATE = "stablehlo.slice", "stablehlo.concatenate"
_SHARDY_ANNOTATIONS = ("sdy.sharding_constraint", "sdy.reshard")
STEPPED = ("stablehlo.pad", SLICE)
PRODUCTS = ("stablehlo.dot_general", "stablehlo.dot")
GATHER, SCATTER = "stablehlo.gather", "stablehlo.scatter"
FOURIER = "stablehlo.fft"


def uneven_indices(layout: OpLayout) -> bool:
    """A gather or scatter of indices, or rows for them, in shards of unequal size."""
    return any(
        not _divides(tensor, dim)
        for factor in index_factors(layout)
        for tensor, dim, _ in layout.places(factor)
    )


def split_coordinates(layout: OpLayout) -> bool:
    """A gather or scatter by indices of several coordinates, these split."""
    indices = _indices(layout)
    dim = _coordinates(layout)
    return dim is not None and indices.may_split(dim)


def rows_split_as_indices(layout: OpLayout) -> bool:
    """A gather or scatter in which an axis splits indices and also columns.

    It does no harm where what is read or written is split as the indices are, as in an
    embedding of a batch; where nothing is split by other axes into more shards; nor do
    the rows that are indexed.
    """
    indices = index_factors(layout)
    alike = {factor for factor in indices if len(layout.groups(factor)) == 1}
    harmless = alike | _row_factors(layout)
    groups = {axes for t in layout.tensors for axes in t.splitting() if axes}
    sizes = layout.mesh.axes_size
    return any(
        (len(factors) > 2 or not (factors & indices and factors & harmless))
        and any(axis not in axes and sizes(axes) > sizes([axis]) for axes in groups)
        for axis, factors in _by_axis(layout, layout.tensors).items()
        if len(factors) > 1
    )


def batches_split_apart(layout: OpLayout) -> bool:
    """A gather whose operand and indices split a dim of one size by unlike counts.

    XLA takes a coordinate that counts along a dim of the indices, as those of
    `batch_dims` do, for a batch, and cuts the operand by both counts in turn. Where
    one is a multiple of the other it aligns them first. Whether a coordinate counts is
    not looked at here: dims of one size are rare otherwise.
    """
    table, indices = layout.operands
    coordinates = _coordinates(layout)
    sizes = layout.op.attributes["slice_sizes"]
    counts = layout.mesh.axes_size
    unknown = None in (table.sharding, indices.sharding)
    return any(
        size == table.shape[row]
        and (
            unknown
            or counts(indices.axes(dim)) % counts(table.axes(row))
            and counts(table.axes(row)) % counts(indices.axes(dim))
        )
        for row in _indexed_dims(layout)
        if sizes[row] == 1
        for dim, size in enumerate(indices.shape)
        if dim != coordinates
    )


def single_index(layout: OpLayout) -> bool:
    """A scatter of one index into a dim that is split.

    Splits of the slice that is written do no harm: loops write a step's rows so.
    """
    indices, coordinates = _indices(layout), _coordinates(layout)
    count = math.prod(n for d, n in enumerate(indices.shape) if d != coordinates)
    return count == 1 and any(
        tensor.may_split(dim)
        for tensor in (*layout.operands[: len(layout.results)], *layout.results)
        for dim in _indexed_dims(layout)
    )


def few_rows(layout: OpLayout) -> bool:
    """A scatter into a table split by rows, whose indices are split too.

    Of rows that take less to gather than the table's shard takes to add up: a ring does
    that in two rounds.
    """
    if len(layout.results) > 1 or not layout.is_even:
        return False
    table, indices, updates = layout.operands
    over = {f for f in index_factors(layout) if layout.groups(f) - {()}}
    rows = (
        d for d, factor in enumerate(table.factors) if factor not in updates.factors
    )
    if not over or not any(layout.results[0].axes(dim) for dim in rows):
        return False
    gathered = updates.bytes + indices.bytes
    return gathered < 2 * layout.results[0].shard_bytes()


def stepped_dims(op) -> list[int]:
    """The dims that a slice takes by steps, or that a pad puts padding into."""
    if op.name == "stablehlo.pad":
        return [d for d, n in enumerate(op.attributes["interior_padding"]) if n > 0]
    return [d for d, n in enumerate(op.attributes["strides"]) if n > 1]


def steps_across_shards(layout: OpLayout) -> bool:
    """A slice by steps, or its gradient's padding between elements, not shard by shard.

    Along a split dim of steps each shard of the shorter tensor has to be what the same
    shard of the longer one is cut to. Other dims that change have to be even.
    """
    stepped = stepped_dims(layout.op)
    split = [d for d in range(len(layout.results[0].shape)) if _is_split(layout, d)]
    return any(d in stepped for d in split) and any(
        not _steps_in_shards(layout, d) if d in stepped else _is_cut_unevenly(layout, d)
        for d in split
    )


def _steps_in_shards(layout: OpLayout, dim: int) -> bool:
    """Whether a shard of a dim of steps is made of the same shard alone."""
    operand, result = layout.operands[0], layout.results[0]
    shards = {tensor.sharding and tensor.axes(dim) for tensor in (operand, result)}
    if len(shards) > 1 or not (_divides(operand, dim) and _divides(result, dim)):
        return False
    if layout.op.name == "stablehlo.pad":
        step = layout.op.attributes["interior_padding"][dim] + 1
        start = layout.op.attributes["edge_padding_low"][dim]
        short, long = operand, result
    else:
        step = layout.op.attributes["strides"][dim]
        start = layout.op.attributes["start_indices"][dim]
        short, long = result, operand
    return short.shape[dim] * step == long.shape[dim] and 0 <= start < step


def _is_cut_unevenly(layout: OpLayout, dim: int) -> bool:
    operand, result = layout.operands[0], layout.results[0]
    return operand.shape[dim] != result.shape[dim] and not (
        _divides(operand, dim) and _divides(result, dim)
    )


def _is_split(layout: OpLayout, dim: int) -> bool:
    """Whether a dim of the operand and of the result is split, or may be."""
    return any(t.may_split(dim) for t in (layout.operands[0], layout.results[0]))


def may_cut_no_shard(op) -> bool:
    """A slice that takes the first elements along the dims that it cuts.

    Not one that is annotated, of an argument or annotation that nothing else reads, as
    of arguments that arrive padded: it is a copy, and there is nothing to mix up. Of
    other tensors XLA may find out that they are copies of one that is read elsewhere.
    """
    (operand,), (result,) = op.operands, op.results
    maker, readers = operand.owner, _readers(result)
    is_apart = isinstance(maker, ir.Block) or _is_annotation(maker)
    is_alone = is_apart and len(list(operand.uses)) == 1
    is_copy = is_alone and all(map(_is_annotation, readers))
    return (
        shape_of(operand) != shape_of(result)
        and not any(op.attributes["start_indices"])
        and set(op.attributes["strides"]) <= {1}
        and not (len(readers) == 1 and is_copy)
    )


def is_roll(op) -> bool:
    """Whether an op puts the first part of a tensor behind the other."""
    if op.name != CONCATENATE or len(op.operands) != 2:
        return False
    makers = [_maker(part) for part in op.operands]
    if any(isinstance(m, ir.Block) or m.name != SLICE for m in makers):
        return False
    last, first = (list(maker.attributes["start_indices"]) for maker in makers)
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    return (
        makers[0].operands[0] == makers[1].operands[0]
        and shape_of(op.results[0]) == shape_of(makers[0].operands[0])
        and not any(first)
        and last[dim] == shape_of(op.operands[1])[dim]
    )


def is_of_roll(op) -> bool:
    """Whether an op is a roll, or a part of one."""
    if op.name == SLICE:
        readers = _readers(op.results[0])
        return len(readers) == 1 and is_roll(readers[0])
    return is_roll(op)


def rolls_apart(layout: OpLayout) -> bool:
    """A roll or a part of one that reshards, so that XLA takes it for no roll."""
    shardings = layout.shardings
    return not layout.is_replaced and (
        None in shardings or any(sharding != shardings[0] for sharding in shardings)
    )


def _readers(value) -> list:
    """The ops that read a value, past reshapes to its own shape, which TF makes."""
    return [
        reader
        for use in value.uses
        for reader in (
            _readers(use.owner.results[0]) if _is_no_op(use.owner) else [use.owner]
        )
    ]


def _maker(value):
    """The op that makes a value, or the block that has it, past the same reshapes."""
    while not isinstance(value.owner, ir.Block) and _is_no_op(value.owner):
        value = value.owner.operands[0]
    return value.owner


def _is_no_op(op) -> bool:
    return op.name == "stablehlo.reshape" and (
        shape_of(op.operands[0]) == shape_of(op.results[0])
    )


def _is_annotation(op) -> bool:
    """Whether an op is an annotation, for either partitioner; Shardy reshards by it."""
    return op.name in _SHARDY_ANNOTATIONS or is_annotation(op.operation)


def cuts_no_shard(layout: OpLayout) -> bool:
    """A slice whose shards have the sizes of its operand's, as `x[:-1]` of a split dim.

    Nothing is to be done, so XLA has one instruction for both, and confuses the
    resharded copies of the two. But not in a roll that is sharded as its tensor is.
    """
    operand, result = layout.operands[0], layout.results[0]
    if not may_cut_no_shard(layout.op) or layout.is_replaced:
        return False
    if is_of_roll(layout.op) and not rolls_apart(layout):
        return False
    return None in layout.shardings or any(
        sharding.shard_shape(operand.shape) == sharding.shard_shape(result.shape)
        for sharding in layout.shardings
    )


def split_transform(layout: OpLayout) -> bool:
    """A Fourier transform along several dims, one of which is split."""
    count = len(layout.op.attributes["fft_length"])
    return count > 1 and any(
        tensor.may_split(dim)
        for tensor in layout.tensors
        for dim in range(len(tensor.shape) - count, len(tensor.shape))
    )


def overlapping_windows(layout: OpLayout) -> bool:
    """A max pool's gradient whose windows overlap along a split dim."""
    return any(window.size > window.stride for window, _ in split_windows(layout))


def far_halos(layout: OpLayout) -> bool:
    """Windows by strides along split dims that reach beyond neighbours.

    Those of a convolution along a single dim were not seen to go wrong.
    """
    split = split_windows(layout)
    strided = any(w.stride > 1 or w.base_dilation > 1 for w, _ in split)
    several = len(split) > 1 or layout.op.name == REDUCE_WINDOW
    return several and strided and any(w.is_far(n) for w, n in split)


def windows_of_padding(layout: OpLayout) -> bool:
    """Windows by strides along a split dim, the first of which read padding alone.

    Or whose own elements are apart too.
    """
    return any(
        (w.low - (w.size - 1) > 0 and (w.low - (w.size - 1)) % w.stride)
        or (w.base_dilation > 1 and w.low < 0)
        or (w.stride > 1 and w.dilation > 1)
        for w, _ in split_windows(layout)
    )


def regrouped_axes(layout: OpLayout) -> bool:
    """A product whose tensors group axes otherwise for the same dim.

    - X splits a dim in a tensor, Y and X in another (`[X]`, `[Y.X]`); or different axes
      do, and it is a batch dim, or one of them is of a group for another dim (`[X.Y,Z]`
      by `[Z,Y]`, scattered to `[X.Y,Z]`).
    - Several axes split a dim of the result, otherwise than an operand's, while some
      axis splits one dim here and another there (`[X,Z]` by `[X,_]` to `[Z.Y,X]`).
    - Several axes split a dim in another order than the mesh's, not in all tensors that
      have it, while some axis splits one dim here and another there (`[_,Y]` by `[Y,_]`
      to `[Z.X,Y]`); or one of these axes does.
    - Some of its tensors are over another mesh, so that nothing is known of them.
    """
    if None in layout.shardings:
        return not layout.is_replaced
    part = layout.mesh.part
    return any(
        one[: len(other)] != other[: len(one)]
        and (
            {part(axis).axis for axis in one} & {part(axis).axis for axis in other}
            or _is_batch(layout, factor)
            or _is_of_group(layout, {*one, *other}, factor)
        )
        for factor in range(len(layout.kinds))
        for one, other in itertools.combinations(layout.groups(factor), 2)
    ) or any(
        _regroups_result(layout, factor) or _is_out_of_order(layout, factor)
        for factor in range(len(layout.kinds))
    )


def _is_out_of_order(layout: OpLayout, factor: int) -> bool:
    """Whether axes split a factor in another order than the mesh's, and may do harm."""
    part, groups = layout.mesh.part, layout.groups(factor)
    factors = _by_axis(layout, layout.tensors)
    shared = {axis for axis, of in factors.items() if len(of) > 1}
    for axes in groups:
        strides = [layout.mesh.stride(axis) for axis in axes]
        if strides != sorted(strides, reverse=True):
            own = {part(axis).axis for axis in axes}
            return bool(shared if len(groups) > 1 else shared & own)
    return False


def _is_of_group(layout: OpLayout, axes: Iterable[str], factor: int) -> bool:
    """Whether one of these axes splits another dim, together with others."""
    part = layout.mesh.part
    names = {part(axis).axis for axis in axes}
    return any(
        len(group) > 1 and not names.isdisjoint(part(axis).axis for axis in group)
        for other in range(len(layout.kinds))
        if other != factor
        for group in layout.groups(other)
    )


def _regroups_result(layout: OpLayout, factor: int) -> bool:
    """Whether several axes split a dim of the result, and an operand's otherwise.

    And an axis splits different dims. Axes that split a dim which both operands are
    summed over may split another of the result, to which the sum is scattered, unless
    that is a batch dim.
    """
    result = layout.results[0]
    dim = result.dim_of(factor)
    if dim is None or len(layout.groups(factor)) == 1 or len(result.axes(dim)) < 2:
        return False
    lhs, rhs = (_by_axis(layout, [operand]) for operand in layout.operands)
    summed = {f for f, kind in enumerate(layout.kinds) if kind is FactorKind.REDUCED}
    scattered = {
        axis
        for axis in lhs.keys() & rhs.keys()
        if lhs[axis] == rhs[axis] and lhs[axis] <= summed
    }
    return any(
        len(factors) > 1 and (axis not in scattered or _is_batch(layout, factor))
        for axis, factors in _by_axis(layout, layout.tensors).items()
    )


def may_regroup(layout: OpLayout) -> bool:
    """Whether a product is near `regrouped_axes`.

    A dim of it is split by several axes, or a batch dim not alike by all its tensors.
    """
    return any(len(axes) > 1 for t in layout.tensors for axes in t.splitting()) or any(
        len(layout.groups(factor)) > 1
        for factor in range(len(layout.kinds))
        if _is_batch(layout, factor)
    )


def _is_batch(layout: OpLayout, factor: int) -> bool:
    """Whether a factor of a product is a dim of both operands and of the result."""
    return len(list(layout.places(factor))) == 3


def _divides(tensor: Tensor, dim: int) -> bool:
    if tensor.sharding is None:
        return False
    return tensor.shape[dim] % tensor.sharding.splits()[dim] == 0


def _by_axis(layout: OpLayout, tensors: Iterable[Tensor]) -> dict[str, set[int | None]]:
    """The factors that each axis splits, in any of these tensors."""
    found: dict[str, set[int | None]] = {}
    for tensor in tensors:
        for dim, factor in enumerate(tensor.factors):
            for axis in tensor.axes(dim):
                found.setdefault(layout.mesh.part(axis).axis, set()).add(factor)
    return found


def _indices(layout: OpLayout) -> Tensor:
    return layout.operands[len(layout.results) if layout.op.name == SCATTER else 1]


def _numbers(layout: OpLayout):
    if layout.op.name == SCATTER:
        return stablehlo.ScatterDimensionNumbers(
            layout.op.attributes["scatter_dimension_numbers"]
        )
    return stablehlo.GatherDimensionNumbers(layout.op.attributes["dimension_numbers"])


def _coordinates(layout: OpLayout) -> int | None:
    """The dim of the indices that has the coordinates, None if there is none."""
    dim = _numbers(layout).index_vector_dim
    return dim if dim < len(_indices(layout).shape) else None


def _indexed_dims(layout: OpLayout) -> list[int]:
    """The dims of the table that indices have coordinates for."""
    numbers = _numbers(layout)
    if layout.op.name == SCATTER:
        return numbers.scattered_dims_to_operand_dims
    return numbers.start_index_map


def _row_factors(layout: OpLayout) -> set[int | None]:
    """The factors that only the table has, in dims that are indexed."""
    table, count = layout.operands[0], len(layout.results)
    is_scatter = layout.op.name == SCATTER
    rows = layout.operands[-count:] if is_scatter else layout.results
    elsewhere = {factor for tensor in rows for factor in tensor.factors}
    return {table.factors[dim] for dim in _indexed_dims(layout)} - elsewhere - {None}


def index_factors(layout: OpLayout) -> set[int]:
    """The factors of the indices, but for the one of their coordinates."""
    coordinates = _coordinates(layout)
    return {
        factor
        for dim, factor in enumerate(_indices(layout).factors)
        if dim != coordinates and factor is not None
    }
