"""The rows of the table of faults that ops with computed indices meet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.op_layout import (
    FactorKind,
    OpLayout,
    Tensor,
    even_layout,
)
from meshwright.framework.compiler.repair.table.fault import (
    Chosen,
    Fault,
    Outcome,
    Smallest,
    evenly,
)
from meshwright.framework.compiler.repair.table.patterns import GATHER, SCATTER


def _uneven_indices(layout: OpLayout) -> bool:
    """A gather or scatter of indices, or rows for them, in shards of unequal size."""
    return any(
        not tensor.divides(dim)
        for factor in _index_factors(layout)
        for tensor, dim, _ in layout.places(factor)
    )


def _split_coordinates(layout: OpLayout) -> bool:
    """A gather or scatter by indices of several coordinates, these split."""
    indices = _indices(layout)
    dim = _coordinates(layout)
    return dim is not None and indices.may_split(dim)


def _regrouped(layout: OpLayout) -> bool:
    """A gather whose tensors split dims of the indices, or columns, by unlike axes.

    XLA takes a gather apart by one kind of dim after another, columns of the table and
    dims of the indices among them, and reshards what the inner gather gives as if it
    were the outer one's. Columns do harm only where the table is split by others too,
    or by rows and they come before the dims of the indices. Over two axes all that is
    right but where one of them splits different dims. A tensor over other devices than
    the mesh's, or in another order, is like none.
    """
    if None in layout.shardings:
        return True
    if not (_is_over_three_axes(layout) or _is_split_twice(layout)):
        return False
    unlike = {f for f in range(len(layout.kinds)) if len(layout.groups(f)) > 1}
    rows, indices = _row_factors(layout), _index_factors(layout)
    columns = set(layout.operands[0].factors) - rows - {None}

    def split(factors: set[int]) -> set[int]:
        return {factor for factor in factors if layout.groups(factor) - {()}}

    factors = layout.results[0].factors
    last = max((d for d, f in enumerate(factors) if f in split(indices)), default=0)
    first = unlike & columns & set(factors[:last])
    return bool(
        unlike & indices
        or (unlike & columns and split(columns) - unlike)
        or (first and split(rows))
    )


def _is_split_twice(layout: OpLayout) -> bool:
    """Whether an axis splits different dims, and others some dim into more shards.

    But for indices and rows, and dims of the indices that all tensors split alike, as
    in an embedding of a batch.
    """
    indices = _index_factors(layout)
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
    """Whether three axes or more split its tensors, or two and it is replicated too."""
    groups = (axes for tensor in layout.tensors for axes in tensor.splitting())
    axes = set(itertools.chain.from_iterable(groups))
    return len(axes) + (layout.mesh.axes_size(tuple(axes)) < layout.mesh.size) > 2


def _batches_split_apart(layout: OpLayout) -> bool:
    """A gather whose operand and indices split a dim of one size otherwise.

    XLA takes a coordinate that counts along a dim of the indices, as those of
    `batch_dims` do, for a batch, and cuts the operand by both counts in turn. Where
    one is a multiple of the other it aligns them first, but not over three axes or
    more. Whether a coordinate counts is not looked at here: dims of one size are rare
    otherwise.
    """
    table, indices = layout.operands
    coordinates = _coordinates(layout)
    sizes = layout.op.attributes["slice_sizes"]
    counts = layout.mesh.axes_size
    unknown = None in (table.sharding, indices.sharding)
    three = _is_over_three_axes(layout)

    def apart(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
        few, many = sorted(map(counts, (one, other)))
        return bool(many % few) or (three and few > 1 and set(one) != set(other))

    return any(
        size == table.shape[row]
        and (unknown or apart(table.axes(row), indices.axes(dim)))
        for row in _indexed_dims(layout)
        if sizes[row] == 1
        for dim, size in enumerate(indices.shape)
        if dim != coordinates
    )


def _single_row(layout: OpLayout) -> bool:
    """A gather along several split dims, one of which has a single element."""
    table = layout.operands[0]
    split = [dim for dim in _indexed_dims(layout) if table.may_split(dim)]
    return len(split) > 1 and any(table.shape[dim] == 1 for dim in split)


def _single_index(layout: OpLayout) -> bool:
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


def _few_rows(layout: OpLayout) -> bool:
    """A scatter into a table split by rows, whose indices are split too.

    Of rows that take less to gather than the table's shard takes to add up: a ring does
    that in two rounds.
    """
    if len(layout.results) > 1 or not layout.is_even:
        return False
    table, indices, updates = layout.operands
    over = {f for f in _index_factors(layout) if layout.groups(f) - {()}}
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


def _index_factors(layout: OpLayout) -> set[int]:
    """The factors of the indices, but for the one of their coordinates."""
    coordinates = _coordinates(layout)
    return {
        factor
        for dim, factor in enumerate(_indices(layout).factors)
        if dim != coordinates and factor is not None
    }


def _padded(meets: Callable[[OpLayout], bool]) -> Callable[[OpLayout], Chosen | None]:
    """Lays a gather or scatter out evenly, its indices padded if need be."""

    def choose(layout: OpLayout) -> Chosen | None:
        if not meets(layout):
            return None
        factors = _index_factors(layout)
        pad = factors if len(layout.results) == 1 else ()
        return even_layout(layout, (_PARALLEL, _REDUCED), pad=pad)

    return choose


_PARALLEL, _REDUCED = FactorKind.PARALLEL, FactorKind.REDUCED
_INDEXED = (GATHER, SCATTER)

INDEX_FAULTS = (
    Fault(
        name="uneven indices",
        what="is a gather or scatter by indices in shards of unequal size",
        ops=_INDEXED,
        choose=_padded(_uneven_indices),
        repair="the indices are padded, or split by fewer axes, which divide them",
        smallest={
            "gather_gradient_uneven_indices": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather(x, i)  on mesh (X=4, Y=2)
                  x: float32 [8], arrives [_], annotated None
                  i: index int32 [2] below 8, arrives [_], annotated [X]
                  result: [2], annotated [Y], leaves [_]
                """,
            ),
            "gather_of_uneven_indices": Smallest(
                Outcome.REFUSED,
                """
                program: tf.math.unsorted_segment_sum(x, i, 3)  on mesh (X=2, Y=2)
                  x: float32 [3, 2, 2], arrives [_,_,_], annotated [_,Y,X]
                  i: index int32 [3] below 3, arrives [_], annotated [X.Y]
                  result: [3, 2, 2], annotated [_,_,X], leaves [_,_,_]
                """,
            ),
        },
    ),
    Fault(
        name="split coordinates",
        what="is a gather or scatter by indices whose coordinates are split",
        ops=_INDEXED,
        choose=evenly(_split_coordinates, _PARALLEL, _REDUCED),
        repair="the coordinates are not split",
        smallest={
            "scatter_of_split_coordinates": Smallest(
                Outcome.WRONG,
                """
                program: tf.tensor_scatter_nd_add(x, i, y)  on mesh (X=2, Y=2)
                  x: float32 [2], arrives [_], annotated [Y]
                  i: index int32 [4, 1] below 2, arrives [_,_], annotated [X,Y]
                  y: float32 [4], arrives [_], annotated [X]
                  result: [2], annotated None, leaves [_]
                """,
            ),
            "gather_of_split_coordinates": Smallest(
                Outcome.REFUSED,
                """
                program: tf.gather_nd(x, i)  on mesh (X=4, Y=2)
                  x: float32 [4, 4], arrives [_,_], annotated [_,Y]
                  i: index int32 [8, 2] below 4, arrives [_,_], annotated [_,X.Y]
                  result: [8], annotated [X.Y], leaves [_]
                """,
            ),
        },
    ),
    Fault(
        name="regrouped gather",
        what="is a gather whose tensors split a dim of the indices, or of columns, by "
        "different axes",
        more="over three axes or more, where an axis splits several dims, or over "
        "devices in another order than the mesh's; of several split dims of columns",
        ops=(GATHER,),
        choose=evenly(_regrouped, _PARALLEL, _REDUCED, agreed=True),
        repair="its tensors are split alike",
        smallest={
            "gather_of_split_rows": Smallest(
                Outcome.REFUSED,
                """
                program: tf.gather(x, i)  on mesh (X=2, Y=4)
                  x: float32 [4, 2], arrives [_,_], annotated [_,X]
                  i: index int32 [4] below 4, arrives [_], annotated [X]
                  result: [4, 2], annotated [Y,_], leaves [_,_]
                """,
            ),
            "gather_of_split_columns": Smallest(
                Outcome.REFUSED,
                """
                program: tf.gather(x, i)  on mesh (X=4, Y=2)
                  x: float32 [1, 4, 2], arrives [_,_,_], annotated [_,_,Y]
                  i: index int32 [2] below 1, arrives [_], annotated [Y]
                  result: [2, 4, 2], annotated [_,X,_], leaves [_,_,_]
                """,
            ),
            "gather_of_indices_split_further": Smallest(
                Outcome.REFUSED,
                """
                program: tf.gather(x, i)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 2], arrives [_,_], annotated [_,Y]
                  i: index int32 [4] below 4, arrives [_], annotated [X]
                  result: [4, 2], annotated [Z.X,Y], leaves [_,_]
                """,
            ),
            "gather_of_indices_split_further_by_rows": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather_nd(x, i)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [2, 8], arrives [_,_], annotated [_,X]
                  i: index int32 [4, 2] below 2, arrives [_,_], annotated [Z,_]
                  result: [4], annotated [Z.X], leaves [_]
                """,
            ),
            "gather_of_indices_split_less": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather(x, i)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [8, 2], arrives [_,_], annotated [X,_]
                  i: index int32 [4] below 8, arrives [_], annotated [Z.X]
                  result: [4, 2], annotated [Z,_], leaves [_,_]
                """,
            ),
            "gather_of_columns_split_as_rows_were": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather(x, i, axis=1)  on mesh (X=2, Y=4)
                  x: float32 [2, 8], arrives [_,_], annotated [_,X]
                  i: index int32 [4] below 8, arrives [_], annotated [Y]
                  result: [2, 4], annotated [X,Y], leaves [_,_]
                """,
            ),
            "gather_from_devices_in_another_order": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather(x, i)  on mesh (X=2, Y=2, Z=2)
                  with differentiable=False
                  x: float32 [2, 8], arrives [_,_], annotated [X,_] over (X=4, Y=2) of devices [6, 1, 4, 5, 3, 2, 7, 0]
                  i: index int32 [8] below 2, arrives [_], annotated None
                  result: [8, 8], annotated [Y.X,Z], leaves [_,_]
                """,  # noqa: E501
            ),
            "gather_of_columns_split_further": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather(x, i)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [2, 2], arrives [_,_], annotated [X,_]
                  i: index int32 [2, 2] below 2, arrives [_,_], annotated [_,_]
                  result: [2, 2, 2], annotated [Y,X,Z], leaves [_,_,_]
                """,
            ),
        },
    ),
    Fault(
        name="batches split apart",
        what="is a gather whose operand and indices split a batch dim differently",
        more="any dim that has one size in both, in numbers of shards neither of which "
        "divides the other; or split by other axes, where there are three",
        ops=(GATHER,),
        choose=evenly(_batches_split_apart, _PARALLEL),
        repair="the operand's dim is not split",
        smallest={
            "gather_of_batches_split_apart": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather(x, i, batch_dims=1)  on mesh (X=3, Y=2)
                  x: float32 [6, 3], arrives [_,_], annotated [X,_]
                  i: index int32 [6, 3] below 3, arrives [_,_], annotated [Y,_]
                  result: [6, 3], annotated [Y,_], leaves [_,_]
                """,
            ),
        },
    ),
    Fault(
        name="gather from a single row",
        what="is a gather along several split dims, one of which has a single element",
        ops=(GATHER,),
        choose=evenly(_single_row, _PARALLEL, _REDUCED),
        repair="that dim is not split",
        smallest={
            "windows_of_a_single_column": Smallest(
                Outcome.ABORTED,
                """
                program: tf.image.resize(x, [8, 2], 'bilinear')  on mesh (X=4, Y=2)
                  with differentiable=False
                  x: float32 [1, 8, 1, 2], arrives [_,_,_,_], annotated [_,X,Y,_]
                  result: [1, 8, 2, 2], annotated [_,X,_,_], leaves [_,_,_,_]
                """,
                gspmd=False,
            ),
        },
    ),
    Fault(
        name="scatter of a single index",
        what="is a scatter of a single index into a split dim, which all shards write",
        ops=(SCATTER,),
        choose=evenly(_single_index, _PARALLEL),
        repair="the dim is not split",
        smallest={
            "scatter_of_one_index": Smallest(
                Outcome.WRONG,
                """
                program: tf.tensor_scatter_nd_update(x, i, y)  on mesh (X=2)
                  x: float32 [4], arrives [_], annotated None
                  i: index int32 [1, 1] below 4, arrives [_,_], annotated None
                  y: float32 [1], arrives [_], annotated None
                  result: [4], annotated [X], leaves [_]
                """,
            ),
        },
    ),
    Fault(
        name="few rows",
        what="is a scatter of few rows, split, into a table that is split by rows",
        ops=(SCATTER,),
        choose=evenly(_few_rows, _PARALLEL),
        repair="the rows are gathered and no part of the table is added up",
        smallest={
            "rows_into_a_split_table": Smallest(
                Outcome.SLOW,
                """
                program: tf.tensor_scatter_nd_add(x, i, y)  on mesh (X=2, Y=2)
                  x: float32 [64, 2], arrives [X,_], annotated [X,_]
                  i: index int32 [4, 1] below 64, arrives [Y,_], annotated [Y,_]
                  y: float32 [4, 2], arrives [Y,_], annotated [Y,_]
                  result: [64, 2], annotated [X,_], leaves [X,_]
                """,
            ),
        },
    ),
)
