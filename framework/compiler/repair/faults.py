"""The table of what XLA's partitioner gets wrong, and of the layouts that repair it.

The pass that lays programs out (`check`), the tests and `docs/operators.md` read it.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.framework.compiler.repair import conv_layout, halos, patterns
from meshwright.framework.compiler.repair.conv_rewrite import (
    CONVOLUTION,
    convolution_of,
)
from meshwright.framework.compiler.repair.fault import Chosen, Fault, Outcome, Smallest
from meshwright.framework.compiler.repair.op_layout import (
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.windows import (
    REDUCE_WINDOW,
    SELECT_AND_SCATTER,
)


def _even(
    meets: Callable[[OpLayout], bool], *kept: FactorKind
) -> Callable[[OpLayout], Chosen | None]:
    """Lays an operation that meets a fault out evenly, split by some factors only."""
    return lambda layout: even_layout(layout, kept) if meets(layout) else None


def _blocked(
    meets: Callable[[OpLayout], bool], *kept: FactorKind
) -> Callable[[OpLayout], Chosen | None]:
    """Leaves dims of windows split where these can have halos, else as `_even` does."""

    def choose(layout: OpLayout) -> Chosen | None:
        if not meets(layout):
            return None
        even = even_layout(layout, kept)
        return halos.in_blocks(layout, even) or even

    return choose


def _padded(meets: Callable[[OpLayout], bool]) -> Callable[[OpLayout], Chosen | None]:
    """Lays a gather or scatter out evenly, its indices padded if need be."""

    def choose(layout: OpLayout) -> Chosen | None:
        if not meets(layout):
            return None
        factors = patterns.index_factors(layout)
        pad = factors if len(layout.results) == 1 else ()
        return even_layout(layout, (_PARALLEL, _REDUCED), pad=pad)

    return choose


def _apart(layout: OpLayout) -> Chosen | None:
    """Lays a gather or scatter out evenly, and few rows as `few_rows` has them."""
    if not patterns.rows_split_as_indices(layout):
        return None
    is_scatter = layout.op.name == patterns.SCATTER
    few = is_scatter and patterns.few_rows(layout)
    return even_layout(layout, (_PARALLEL,) if few else (_PARALLEL, _REDUCED))


def _agreed(layout: OpLayout) -> Chosen | None:
    """Lays a product out evenly, so that what its tensors agree on stays split."""
    if not patterns.regrouped_axes(layout):
        return None
    return even_layout(layout, (_PARALLEL, _REDUCED), agreed=True)


def _convolution(layout: OpLayout) -> Chosen | None:
    conv = convolution_of(layout.op)
    return conv_layout.layout(conv, layout.mesh, *layout.shardings)


_PARALLEL, _REDUCED = FactorKind.PARALLEL, FactorKind.REDUCED
_HALOS = (
    "devices exchange the border rows (halos) of pools; other ops' dims, and those "
    "whose windows read as many rows as there are, are not split"
)
_INDEXED = (patterns.GATHER, patterns.SCATTER)

FAULTS = (
    Fault(
        name="uneven indices",
        what="is a gather or scatter by indices in shards of unequal size",
        ops=_INDEXED,
        choose=_padded(patterns.uneven_indices),
        repair="the indices are padded, or split by what divides them",
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
        choose=_even(patterns.split_coordinates, _PARALLEL, _REDUCED),
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
        name="rows split as indices",
        what="is a gather or scatter in which an axis splits indices and another dim",
        ops=_INDEXED,
        choose=_apart,
        repair="the axis splits what is largest, and nothing else",
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
        },
    ),
    Fault(
        name="scatter of a single index",
        what="is a scatter of a single index into a split dim, which all shards write",
        ops=(patterns.SCATTER,),
        choose=_even(patterns.single_index, _PARALLEL),
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
        ops=(patterns.SCATTER,),
        choose=_even(patterns.few_rows, _PARALLEL),
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
    Fault(
        name="steps across shards",
        what="is a slice by steps along a split dim, or the gradient of one, whose "
        "shards are not cut from the same shards of its operand",
        ops=patterns.STEPPED,
        choose=_even(patterns.steps_across_shards, _PARALLEL),
        repair="the dim is not split",
        smallest={
            "strided_slice_of_uneven_shards": Smallest(
                Outcome.WRONG,
                """
                program: x[0:3:2]  on mesh (X=4)
                  x: float32 [3], arrives [_], annotated [X]
                  result: [2], annotated [_], leaves [_]
                """,
            ),
            "strided_slice_of_dims_cut_unevenly": Smallest(
                Outcome.REFUSED,
                """
                program: x[1:4:2, 4:5]  on mesh (X=3, Y=2)
                  x: float32 [4, 12], arrives [_,_], annotated [Y,X]
                  result: [2, 1], annotated [Y,X], leaves [_,_]
                """,
            ),
        },
    ),
    Fault(
        name="split transform",
        what="is a Fourier transform along several dims, one of which is split",
        ops=(patterns.FOURIER,),
        choose=_even(patterns.split_transform, _PARALLEL),
        repair="the dims are not split",
        smallest={
            "transform_of_split_dims": Smallest(
                Outcome.REFUSED,
                """
                program: tf.signal.fft3d(x)  on mesh (X=2)
                  x: complex64 [1, 2, 2], arrives [_,_,_], annotated [_,X,_]
                  result: [1, 2, 2], annotated [_,_,X], leaves [_,_,_]
                """,
                gspmd=False,
            ),
        },
    ),
    Fault(
        name="overlapping windows",
        what="is the gradient of a max pool whose windows overlap along a split dim: a "
        "maximum would be looked for in the shard's part of the window",
        ops=(SELECT_AND_SCATTER,),
        choose=_blocked(patterns.overlapping_windows, _PARALLEL),
        repair=_HALOS,
        smallest={
            "max_pool_gradient": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.max_pool1d(x, 2, 1, 'SAME')  on mesh (X=2)
                  x: float32 [1, 4, 1], arrives [_,_,_], annotated [_,X,_]
                  result: [1, 4, 1], annotated [_,X,_], leaves [_,_,_]
                """,
            ),
            "max_pool_gradient_over_another_mesh": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.max_pool1d(x, 2, 1, 'SAME')  on mesh (X=8)
                  x: float32 [1, 2, 1], arrives [_,_,_], annotated [_,Y,_] over (X=2, Y=4) of devices [5, 2, 7, 0, 3, 6, 1, 4]
                  result: [1, 2, 1], annotated None, leaves [_,_,_]
                """,  # noqa: E501
            ),
        },
    ),
    Fault(
        name="far halos",
        what="has windows by strides that reach beyond the neighbours' shards, along "
        "one split dim (pools) or several (convolutions)",
        ops=(CONVOLUTION, REDUCE_WINDOW),
        choose=_blocked(patterns.far_halos, _PARALLEL, _REDUCED),
        repair=_HALOS,
        smallest={
            "strided_convolution_with_halos_of_a_shard": Smallest(
                Outcome.ABORTED,
                """
                program: tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')  on mesh (X=2, Y=3)
                  x: float32 [1, 3, 4, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
                  y: float32 [1, 2, 1, 1], arrives [_,_,_,_], annotated None
                  result: [1, 2, 3, 1], annotated [_,X,Y,_], leaves [_,_,_,_]
                """,
            ),
            "strided_convolution_with_halos_of_more": Smallest(
                Outcome.REFUSED,
                """
                program: tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')  on mesh (X=2, Y=4)
                  x: float32 [1, 5, 5, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
                  y: float32 [2, 2, 1, 1], arrives [_,_,_,_], annotated None
                  result: [1, 2, 4, 1], annotated [_,X,Y,_], leaves [_,_,_,_]
                """,
            ),
            "strided_convolution_with_halos_and_rows_unread": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')  on mesh (X=2, Y=4)
                  x: float32 [1, 5, 5, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
                  y: float32 [1, 2, 1, 1], arrives [_,_,_,_], annotated None
                  result: [1, 3, 4, 1], annotated [_,X,Y,_], leaves [_,_,_,_]
                """,
            ),
            "strided_average_with_far_halos_and_rows_unread": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.pool(x, [2, 4], 'AVG', [2, 1], 'VALID')  on mesh (X=2, Y=4)
                  x: float32 [1, 3, 6, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
                  result: [1, 1, 3, 1], annotated None, leaves [_,_,_,_]
                """,  # noqa: E501
            ),
            "strided_sum_of_fewer_rows_than_shards": Smallest(
                Outcome.WRONG,
                """
                program: window_reduced(x, [3], [2], [1], [[1, 0]], 'sum')  on mesh (X=4)
                  with eager=False, differentiable=False
                  x: float32 [3], arrives [X], annotated None
                  result: [1], annotated None, leaves [_]
                """,  # noqa: E501
            ),
        },
    ),
    Fault(
        name="windows of padding",
        what="has windows by strides along a split dim, the first of which read "
        "padding alone",
        ops=(CONVOLUTION, REDUCE_WINDOW),
        choose=_blocked(patterns.windows_of_padding, _PARALLEL, _REDUCED),
        repair=_HALOS,
        smallest={
            "strided_convolution_with_windows_of_padding": Smallest(
                Outcome.ABORTED,
                """
                program: tf.nn.conv2d(x, y, [1, 1, 2, 1], [[0, 0], [0, 0], [1, 0], [0, 0]])  on mesh (X=2)
                  x: float32 [1, 1, 3, 1], arrives [_,_,_,_], annotated [_,_,X,_]
                  y: float32 [1, 1, 1, 1], arrives [_,_,_,_], annotated None
                  result: [1, 1, 2, 1], annotated [_,_,X,_], leaves [_,_,_,_]
                """,  # noqa: E501
            ),
        },
    ),
    Fault(
        name="regrouped product",
        what="is a product with a dim that its tensors split by different axes",
        ops=patterns.PRODUCTS,
        choose=_agreed,
        repair="its tensors are split alike",
        smallest={
            "contraction_of_batches_split_apart": Smallest(
                Outcome.WRONG,
                """
                program: tf.einsum('bij,bjk->bik', x, y)  on mesh (X=2, Y=4)
                  x: float32 [4, 2, 4], arrives [_,_,_], annotated [Y,X,_]
                  y: float32 [4, 4, 1], arrives [_,_,_], annotated [X,Y,_]
                  result: [4, 2, 1], annotated None, leaves [_,_,_]
                """,
                shardy=False,
            ),
            "product_of_batches_split_in_its_result": Smallest(
                Outcome.WRONG,
                """
                program: tf.einsum('bjk,bk->bj', x, y)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 4, 2], arrives [_,_,_], annotated [_,X.Z,Y]
                  y: float32 [4, 2], arrives [_,_], annotated [_,Y]
                  result: [4, 4], annotated [Z.X,Y], leaves [_,_]
                """,
            ),
            "product_scattered_to_a_dim_of_other_axes": Smallest(
                Outcome.WRONG,
                """
                program: tf.einsum('ij,jk->ik', x, y)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 2], arrives [_,_], annotated [X.Y,Z]
                  y: float32 [2, 4], arrives [_,_], annotated [Z,Y]
                  result: [4, 4], annotated [X.Y,Z], leaves [_,_]
                """,
            ),
            "product_scattered_to_a_batch": Smallest(
                Outcome.WRONG,
                """
                program: tf.einsum('bj,bj->b', x, y)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 4], arrives [_,_], annotated [Z,Y.X]
                  y: float32 [4, 4], arrives [_,_], annotated [Z,Y.X]
                  result: [4], annotated [Z.X], leaves [_]
                """,
            ),
            "product_of_rows_split_by_two_others": Smallest(
                Outcome.WRONG,
                """
                program: tf.einsum('ij,jk->ik', x, y)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 2], arrives [_,_], annotated [X,Z]
                  y: float32 [2, 2], arrives [_,_], annotated [X,_]
                  result: [4, 2], annotated [Z.Y,X], leaves [_,_]
                """,
            ),
            "product_onto_regrouped_axes": Smallest(
                Outcome.WRONG,
                """
                program: x @ y  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 2], arrives [_,_], annotated [X,Z]
                  y: float32 [2, 2], arrives [_,_], annotated [Z,_]
                  result: [4, 2], annotated [Y.X,Z], leaves [_,_]
                """,
            ),
        },
    ),
    Fault(
        name="convolution summed twice",
        what="is a convolution whose parts XLA would add up over devices that hold the "
        "same",
        ops=(CONVOLUTION,),
        choose=_convolution,
        repair="axes that take no part in the sum are manual around it",
        smallest={
            "grouped_convolution_of_split_kernel": Smallest(
                Outcome.ABORTED,
                """
                program: tf.nn.depthwise_conv2d(x, y, [1, 1, 1, 1], 'SAME')  on mesh (X=2, Y=2)
                  x: float32 [1, 1, 4, 2], arrives [_,_,_,_], annotated [_,_,_,X]
                  y: float32 [1, 1, 2, 1], arrives [_,_,_,_], annotated [_,_,Y,_]
                  result: [1, 1, 4, 2], annotated None, leaves [_,_,_,_]
                """,  # noqa: E501
                shardy=False,
            ),
            "grouped_convolution_of_split_features": Smallest(
                Outcome.ABORTED,
                """
                program: tf.nn.conv1d(x, y, [1], 'SAME')  on mesh (X=2, Y=2)
                  with eager=False
                  x: float32 [1, 4, 4], arrives [_,_,_], annotated None
                  y: float32 [3, 2, 2], arrives [_,_,_], annotated [_,X,_]
                  result: [1, 4, 2], annotated [_,X,_], leaves [_,_,_]
                """,
                shardy=False,
            ),
            "kernel_gradient_of_split_rows": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.conv1d(x, y, 1, 'SAME')  on mesh (X=2, Y=2)
                  x: float32 [2, 4, 1], arrives [_,_,_], annotated [_,X,_]
                  y: float32 [3, 1, 1], arrives [_,_,_], annotated None
                  result: [2, 4, 1], annotated [_,X,_], leaves [_,_,_]
                """,
            ),
        },
    ),
)
