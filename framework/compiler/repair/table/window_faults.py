"""The rows of the table of faults that ops with windows meet."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.framework.compiler.repair.convolutions.conv_rewrite import CONVOLUTION
from meshwright.framework.compiler.repair.halos import halos
from meshwright.framework.compiler.repair.halos.windows import (
    REDUCE_WINDOW,
    SELECT_AND_SCATTER,
)
from meshwright.framework.compiler.repair.op_layout import (
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.table import patterns
from meshwright.framework.compiler.repair.table.fault import Chosen, Fault
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    Outcome,
    Smallest,
)


def _blocked(
    meets: Callable[[OpLayout], bool], *kept: FactorKind
) -> Callable[[OpLayout], Chosen | None]:
    """Leaves window dims split where they can have halos; else does as `evenly`."""

    def choose(layout: OpLayout) -> Chosen | None:
        if not meets(layout):
            return None
        even = even_layout(layout, kept)
        return halos.in_blocks(layout, even) or even

    return choose


_PARALLEL, _REDUCED = FactorKind.PARALLEL, FactorKind.REDUCED
_HALOS = (
    "pools exchange border rows (halos); for other ops, and where a window reads a "
    "full dim, the dim is not split"
)

WINDOW_FAULTS = (
    Fault(
        name="overlapping windows",
        what="is the gradient of a max pool whose windows overlap along a split dim",
        more="each device would look for a maximum in its own part of the window",
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
        what="has strided windows that reach beyond the neighbours' shards",
        more="along one split dim (a pool, or a convolution's gradient) or one of "
        "several (a convolution)",
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
            "gradient_of_a_strided_convolution_with_far_halos": Smallest(
                Outcome.REFUSED,
                """
                program: tf.nn.conv2d(x, y, [1, 2, 1, 1], [[0, 0], [2, 2], [0, 0], [0, 0]])  on mesh (X=4)
                  x: float32 [1, 4, 1, 1], arrives [_,_,_,_], annotated [_,X,_,_]
                  y: float32 [4, 1, 1, 1], arrives [_,_,_,_], annotated None
                  result: [1, 3, 1, 1], annotated [_,X,_,_], leaves [_,_,_,_]
                """,  # noqa: E501
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
        name="shifted windows",
        what="is a pool whose result alone is split along a dim of windows, and whose "
        "devices read as many rows as shards of the image have, shifted by padding",
        ops=(REDUCE_WINDOW,),
        choose=_blocked(patterns.shifted_windows, _PARALLEL, _REDUCED),
        repair=_HALOS,
        smallest={
            "sum_of_rows_shifted_by_padding": Smallest(
                Outcome.WRONG,
                """
                program: window_reduced(x, [2], [2], [1], [[1, 0]], 'sum')  on mesh (X=2)
                  with eager=False, differentiable=False
                  x: float32 [8], arrives [_], annotated [_]
                  result: [4], annotated [X], leaves [_]
                """,  # noqa: E501
                shardy=False,
            ),
        },
    ),
    Fault(
        name="windows of padding",
        what="has strided windows along a split dim that begin in padding alone, have "
        "holes, or begin inside a dilated image",
        ops=(CONVOLUTION, REDUCE_WINDOW),
        choose=_blocked(patterns.windows_of_padding, _PARALLEL, _REDUCED),
        repair=_HALOS,
        smallest={
            "strided_convolution_with_windows_of_padding": Smallest(
                Outcome.ABORTED,
                """
                program: tf.nn.conv2d(x, y, [1, 1, 2, 1], [[0, 0], [0, 0], [1, 1], [0, 0]])  on mesh (X=2)
                  x: float32 [1, 1, 3, 1], arrives [_,_,_,_], annotated [_,_,X,_]
                  y: float32 [1, 1, 1, 1], arrives [_,_,_,_], annotated None
                  result: [1, 1, 3, 1], annotated [_,_,X,_], leaves [_,_,_,_]
                """,  # noqa: E501
            ),
        },
    ),
)
