"""The rows of the table of faults that gathers and scatters meet."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.framework.compiler.repair import patterns
from meshwright.framework.compiler.repair.fault import (
    Chosen,
    Fault,
    Outcome,
    Smallest,
    evenly,
)
from meshwright.framework.compiler.repair.op_layout import (
    FactorKind,
    OpLayout,
    even_layout,
)


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


_PARALLEL, _REDUCED = FactorKind.PARALLEL, FactorKind.REDUCED
_INDEXED = (patterns.GATHER, patterns.SCATTER)

INDEX_FAULTS = (
    Fault(
        name="uneven indices",
        what="is a gather or scatter by indices in shards of unequal size",
        ops=_INDEXED,
        choose=_padded(patterns.uneven_indices),
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
        choose=evenly(patterns.split_coordinates, _PARALLEL, _REDUCED),
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
        what="is a gather or scatter in which an axis splits different dims, while "
        "other axes split some dim into more shards",
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
        name="batches split apart",
        what="is a gather whose operand and indices have a dim of the same size, as "
        "batches have, in numbers of shards neither of which divides the other",
        ops=(patterns.GATHER,),
        choose=evenly(patterns.batches_split_apart, _PARALLEL),
        repair="the operand's dim is not split",
        smallest={
            "gather_of_batches_split_apart": Smallest(
                Outcome.WRONG,
                """
                program: tf.gather(x, i, batch_dims=1)  on mesh (X=3, Y=2)
                  x: float32 [6, 2], arrives [_,_], annotated [X,_]
                  i: index int32 [6, 1] below 2, arrives [_,_], annotated [Y,_]
                  result: [6, 1], annotated [Y,_], leaves [_,_]
                """,
            ),
        },
    ),
    Fault(
        name="scatter of a single index",
        what="is a scatter of a single index into a split dim, which all shards write",
        ops=(patterns.SCATTER,),
        choose=evenly(patterns.single_index, _PARALLEL),
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
        choose=evenly(patterns.few_rows, _PARALLEL),
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
