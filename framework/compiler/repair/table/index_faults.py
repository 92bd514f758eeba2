"""The rows of the table of faults that ops with computed indices meet."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.framework.compiler.repair.op_layout import (
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.table.fault import Chosen, Fault, evenly
from meshwright.framework.compiler.repair.table.index_patterns import (
    batches_split_apart,
    few_rows,
    index_factors,
    regrouped_alike,
    regrouped_in_region,
    single_index_apart,
    single_row,
    split_coordinates,
    uneven_indices,
)
from meshwright.framework.compiler.repair.table.patterns import GATHER, SCATTER
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    Outcome,
    Smallest,
)


def _padded(meets: Callable[[OpLayout], bool]) -> Callable[[OpLayout], Chosen | None]:
    """Lays a gather or scatter out evenly, its indices padded if necessary."""

    def choose(layout: OpLayout) -> Chosen | None:
        if not meets(layout):
            return None
        factors = index_factors(layout)
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
        choose=_padded(uneven_indices),
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
        choose=evenly(split_coordinates, _PARALLEL, _REDUCED),
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
        name="regrouped in a region",
        what="is a gather or scatter in a manual region, whose tensors split a dim "
        "differently, or several dims by one axis",
        more="or a gather of whose table a dim of rows is split after another dim",
        ops=_INDEXED,
        choose=regrouped_in_region,
        repair="its tensors are split alike, each dim by other axes",
        smallest={
            "gather_by_indices_split_as_rows_in_a_region": Smallest(
                Outcome.ABORTED,
                """
                program: tf.gather(x, i)  on mesh (X=2, Y=2, Z=2)
                  in a region manual along X
                  x: float32 [2, 1], arrives [_,_], annotated [Y,_]
                  i: index int32 [2] below 2, arrives [_], annotated [Y]
                  result: [2, 1], annotated [Y,_], leaves [_,_]
                """,
                gspmd=False,
            ),
            "gather_of_columns_before_rows_in_a_region": Smallest(
                Outcome.ABORTED,
                """
                program: tf.gather(x, i, axis=1)  on mesh (X=2, Y=2, Z=2)
                  in a region manual along X
                  x: float32 [2, 2], arrives [_,_], annotated [Y,Z]
                  i: index int32 [2] below 2, arrives [_], annotated [_]
                  result: [2, 2], annotated [Y,_], leaves [_,_]
                """,
                gspmd=False,
            ),
            "gather_of_uneven_columns_before_rows_in_a_region": Smallest(
                Outcome.ABORTED,
                """
                program: tf.gather(x, i, axis=1)  on mesh (X=2, Y=2, Z=2)
                  in a region manual along X
                  x: float32 [3, 2], arrives [_,_], annotated [Y,Z]
                  i: index int32 [2] below 2, arrives [_], annotated [_]
                  result: [3, 2], annotated [Y,_], leaves [_,_]
                """,
                gspmd=False,
            ),
            "gather_of_a_split_batch_in_a_region": Smallest(
                Outcome.ABORTED,
                """
                program: tf.gather(x, i, batch_dims=1)  on mesh (X=2, Y=2, Z=2)
                  in a region manual along X
                  x: float32 [2, 2], arrives [_,_], annotated [Y,Z]
                  i: index int32 [2, 2] below 2, arrives [_,_], annotated [_,_]
                  result: [2, 2], annotated [_,_], leaves [_,_]
                """,
                gspmd=False,
            ),
            "scatter_of_indices_split_as_columns_in_a_region": Smallest(
                Outcome.ABORTED,
                """
                program: tf.minimum(tf.math.unsorted_segment_min(x, i, 2), 9)  on mesh (X=2, Y=2, Z=2)
                  in a region manual along X
                  x: float32 [2, 2], arrives [_,_], annotated [_,Y]
                  i: index int32 [2] below 2, arrives [_], annotated [Y]
                  result: [2, 2], annotated [_,Y], leaves [_,_]
                """,  # noqa: E501
                gspmd=False,
            ),
        },
    ),
    Fault(
        name="regrouped gather",
        what="is a gather whose tensors split a dim of the indices, or of columns, by "
        "different axes",
        more="over three axes or more, where an axis splits several dims, or over "
        "devices in another order than the mesh's; or a gather several of whose column "
        "dims are split",
        ops=(GATHER,),
        choose=regrouped_alike,
        repair="its tensors are split alike, or not at all",
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
            "gather_of_columns_before_and_after_rows": Smallest(
                Outcome.REFUSED,
                """
                program: tf.gather(x, i, axis=1)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [2, 2, 2], arrives [_,_,_], annotated [_,_,Z]
                  i: index int32 [2] below 2, arrives [_], annotated [Y]
                  result: [2, 2, 2], annotated [X,Y,_], leaves [_,_,_]
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
        choose=evenly(batches_split_apart, _PARALLEL),
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
        choose=evenly(single_row, _PARALLEL, _REDUCED),
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
        choose=single_index_apart,
        repair="the dim is not split",
        smallest={
            "scatter_of_one_index_into_rows": Smallest(
                Outcome.WRONG,
                """
                program: tf.tensor_scatter_nd_update(x, i, y)  on mesh (X=2, Y=2)
                  x: float32 [4, 2], arrives [_,_], annotated None
                  i: index int32 [1, 1] below 4, arrives [_,_], annotated None
                  y: float32 [1, 2], arrives [_,_], annotated None
                  result: [4, 2], annotated [X,Y], leaves [_,_]
                """,
            ),
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
        choose=evenly(few_rows, _PARALLEL),
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
