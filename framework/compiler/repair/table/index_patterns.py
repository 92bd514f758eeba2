"""The layouts in which XLA gets an operation with computed indices wrong."""

from __future__ import annotations

import dataclasses
import itertools
import math

from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.op_layout import (
    EvenLayout,
    FactorKind,
    OpLayout,
    Tensor,
    even_layout,
)
from meshwright.framework.compiler.repair.table.patterns import SCATTER


def uneven_indices(layout: OpLayout) -> bool:
    """A gather or scatter of indices, or rows for them, in shards of unequal size."""
    return any(
        not tensor.divides(dim)
        for factor in index_factors(layout)
        for tensor, dim, _ in layout.places(factor)
    )


def split_coordinates(layout: OpLayout) -> bool:
    """A gather or scatter by indices whose coordinates are split."""
    indices = _indices(layout)
    dim = _coordinates(layout)
    return dim is not None and indices.may_split(dim)


def regrouped(layout: OpLayout) -> bool:
    """A gather whose tensors split dims of the indices, or columns, by different axes.

    XLA takes a gather apart by one kind of dim after another, columns of the table and
    dims of the indices among them, and reshards the inner gather's result as if it were
    the outer gather's. Columns do harm only where other columns are split too, or where
    rows are and the columns come before the dims of the indices. Over two axes all this
    is right unless one of them splits different dims. A tensor over devices other than
    the mesh's, or in another order, matches no other.
    """
    if None in layout.shardings:
        return True
    if not (_is_over_three_axes(layout) or _is_split_twice(layout)):
        return False
    unlike = {f for f in range(len(layout.kinds)) if len(layout.groups(f)) > 1}
    rows, indices = _row_factors(layout), index_factors(layout)
    columns = set(layout.operands[0].factors) - rows - {None}

    def split(factors: set[int]) -> set[int]:
        return {factor for factor in factors if layout.groups(factor) - {()}}

    factors = layout.results[0].factors
    last = max((d for d, f in enumerate(factors) if f in split(indices)), default=0)
    first = unlike & columns & set(factors[:last])
    return bool(
        unlike & indices
        or (unlike & columns and len(split(columns)) > 1)
        or (first and split(rows))
    )


def _is_split_twice(layout: OpLayout) -> bool:
    """Whether an axis splits different dims, and others split a dim into more shards.

    An axis may split indices and rows, or dims of the indices that all tensors split
    alike, as in an embedding of a batch.
    """
    indices = index_factors(layout)
    alike = {factor for factor in indices if len(layout.groups(factor)) == 1}
    harmless = alike | _row_factors(layout)
    groups = {axes for t in layout.tensors for axes in t.splitting() if axes}
    sizes = layout.mesh.axes_size
    return any(
        (len(factors) > 2 or not (factors & indices and factors & harmless))
        and any(axis not in axes and sizes(axes) > sizes([axis]) for axes in groups)
        for axis, factors in layout.by_axis(layout.tensors).items()
        if len(factors) > 1
    )


def _is_over_three_axes(layout: OpLayout) -> bool:
    """Whether three or more axes split tensors, or two if they are replicated too."""
    groups = (axes for tensor in layout.tensors for axes in tensor.splitting())
    axes = set(itertools.chain.from_iterable(groups))
    return len(axes) + (layout.mesh.axes_size(tuple(axes)) < layout.mesh.size) > 2


def regrouped_alike(layout: OpLayout) -> EvenLayout | None:
    """Lays out such a gather with its tensors split alike, or not split."""
    if not regrouped(layout):
        return None
    kept = FactorKind.PARALLEL, FactorKind.REDUCED
    even = even_layout(layout, kept, agreed=True)
    then = layout.with_shardings(even.shardings)
    still = regrouped(then) or batches_split_apart(then)
    return even_layout(layout, keep=()) if still else even


def regrouped_in_region(layout: OpLayout) -> EvenLayout | None:
    """Lays out a gather or scatter in a manual region as XLA can take it apart.

    XLA groups the devices by one kind of dim after another, within the groups that the
    region has already made, and a collective among these does not cover a group. There
    is no such collective where all tensors are split alike, each axis splits one dim,
    and a gather's rows are split alone or before all other dims of the table.
    """
    if not layout.manual or _is_simple_in_region(layout):
        return None
    even = even_layout(layout, (FactorKind.PARALLEL, FactorKind.REDUCED), agreed=True)
    if _is_simple_in_region(layout.with_shardings(even.shardings)):
        return even
    return even_layout(layout, (FactorKind.PARALLEL,))


def _is_simple_in_region(layout: OpLayout) -> bool:
    return (
        None not in layout.shardings
        and all(len(layout.groups(f)) < 2 for f in range(len(layout.kinds)))
        and all(len(fs) < 2 for fs in layout.by_axis(layout.tensors).values())
        and (layout.op.name == SCATTER or _has_rows_first(layout))
    )


def _has_rows_first(layout: OpLayout) -> bool:
    """Whether a gather's table has at most one split dim of rows, its first split dim.

    With several coordinates, indices may not be split beside rows either: one of the
    coordinates may count along a batch, by which XLA groups.
    """
    table, rows = layout.operands[0], _row_factors(layout)
    split = [factor for dim, factor in enumerate(table.factors) if table.axes(dim)]
    if any(factor in rows for factor in split[1:]):
        return False
    several = len(_indexed_dims(layout)) > 1 and rows & set(split)
    return not several or all(
        layout.groups(factor) == {()} for factor in index_factors(layout)
    )


def batches_split_apart(layout: OpLayout) -> bool:
    """A gather whose operand and indices split a dim of the same size differently.

    XLA takes a coordinate that counts along a dim of the indices, as those of
    `batch_dims` do, for a batch, and cuts the operand by both counts in turn. Where one
    count is a multiple of the other it aligns them first, but not over three axes or
    more. Whether a coordinate counts is not examined here: other dims of the same size
    are rare.
    """
    table, indices = layout.operands
    coordinates = _coordinates(layout)
    sizes = layout.op.attributes["slice_sizes"]
    counts = layout.mesh.axes_size
    unknown = None in (table.sharding, indices.sharding)
    three = _is_over_three_axes(layout)

    def apart(table_axes: tuple[str, ...], index_axes: tuple[str, ...]) -> bool:
        few, many = sorted(map(counts, (table_axes, index_axes)))
        return bool(many % few) or (
            three and few > 1 and set(table_axes) != set(index_axes)
        )

    return any(
        size == table.shape[row]
        and (unknown or apart(table.axes(row), indices.axes(dim)))
        for row in _indexed_dims(layout)
        if sizes[row] == 1
        for dim, size in enumerate(indices.shape)
        if dim != coordinates
    )


def single_row(layout: OpLayout) -> bool:
    """A gather along several split dims, one of which has a single element."""
    table = layout.operands[0]
    split = [dim for dim in _indexed_dims(layout) if table.may_split(dim)]
    return len(split) > 1 and any(table.shape[dim] == 1 for dim in split)


def single_index(layout: OpLayout) -> bool:
    """A scatter of a single index into a split dim.

    Splits of the written slice do no harm: loops write a step's rows so.
    """
    indices, coordinates = _indices(layout), _coordinates(layout)
    count = math.prod(n for d, n in enumerate(indices.shape) if d != coordinates)
    return count == 1 and any(
        tensor.may_split(dim)
        for tensor in (*layout.operands[: len(layout.results)], *layout.results)
        for dim in _indexed_dims(layout)
    )


def single_index_apart(layout: OpLayout) -> EvenLayout | None:
    """Lays out a scatter of a single index with the indexed dims not split."""
    if not single_index(layout):
        return None
    kinds = list(layout.kinds)
    for tensor in (*layout.operands[: len(layout.results)], *layout.results):
        for dim in _indexed_dims(layout):
            if (factor := tensor.factors[dim]) is not None:
                kinds[factor] = FactorKind.NEED_REPLICATION
    return even_layout(dataclasses.replace(layout, kinds=tuple(kinds)))


def few_rows(layout: OpLayout) -> bool:
    """A scatter into a table split by rows, whose indices are split too.

    Gathering the rows costs less than adding up the table's shard, which takes a ring
    two rounds.
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
    """The factors of the indices, except that of their coordinates."""
    coordinates = _coordinates(layout)
    return {
        factor
        for dim, factor in enumerate(_indices(layout).factors)
        if dim != coordinates and factor is not None
    }
