"""The table of what XLA's partitioner gets wrong, and of the layouts that repair it.

The pass that lays programs out (`check`), the tests and `docs/operators.md` read it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping

from meshwright.framework.compiler.repair import conv_layout, patterns
from meshwright.framework.compiler.repair.conv_rewrite import (
    CONVOLUTION,
    convolution_of,
)
from meshwright.framework.compiler.repair.op_layout import (
    EvenLayout,
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.windows import (
    REDUCE_WINDOW,
    SELECT_AND_SCATTER,
)

Chosen = EvenLayout | conv_layout.Layout
"""How an operation is to be laid out."""


class Outcome(enum.Enum):
    """What comes of a program that meets a fault and is not laid out otherwise."""

    WRONG = "wrong numbers"
    REFUSED = "XLA refuses its own program"
    ABORTED = "the process ends"
    SLOW = "right, at a cost"


@dataclasses.dataclass(frozen=True)
class Smallest:
    """The smallest program known to meet a fault.

    Args:
      outcome: what comes of it.
      program: an expression of TF, and how its tensors are sharded at the program's
        border and where they are annotated; as the operator matrix prints a case.
      shardy: whether Shardy's program meets it, as GSPMD's does.
    """

    outcome: Outcome
    program: str
    shardy: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table.

    Args:
      name: of the fault, in a few words.
      what: the operation and its layout, for messages and docs.
      ops: the operations that can meet it.
      choose: for an operation's completed layout the layout that XLA gets right; None
        if the operation does not meet the fault.
      repair: what `choose` does, for docs.
      smallest: programs that meet it, by name.
      until: the first jaxlib without it; None while there is none.
      link: to a report of it upstream, "" if none is known.
    """

    name: str
    what: str
    ops: tuple[str, ...]
    choose: Callable[[OpLayout], Chosen | None]
    repair: str
    smallest: Mapping[str, Smallest]
    until: tuple[int, ...] | None = None
    link: str = ""

    @property
    def is_slow(self) -> bool:
        """Whether XLA gets it right without the repair, and only takes longer."""
        return all(one.outcome is Outcome.SLOW for one in self.smallest.values())

    def is_in(self, jaxlib: tuple[int, ...]) -> bool:
        """Whether a version of jaxlib has it."""
        return self.until is None or jaxlib < self.until


def _even(
    meets: Callable[[OpLayout], bool], *kept: FactorKind
) -> Callable[[OpLayout], Chosen | None]:
    """Lays an operation that meets a fault out evenly, split by some factors only."""
    return lambda layout: even_layout(layout, kept) if meets(layout) else None


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


def _convolution(layout: OpLayout) -> Chosen | None:
    conv = convolution_of(layout.op)
    return conv_layout.layout(conv, layout.mesh, *layout.shardings)


_PARALLEL, _REDUCED = FactorKind.PARALLEL, FactorKind.REDUCED
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
        name="uneven steps",
        what="is a slice by steps, or its gradient, of a dim in unequal shards",
        ops=patterns.STEPPED,
        choose=_even(patterns.uneven_steps, _PARALLEL),
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
        },
    ),
    Fault(
        name="overlapping windows",
        what="is the gradient of a max pool whose windows overlap along a split dim: a "
        "maximum would be looked for in the shard's part of the window",
        ops=(SELECT_AND_SCATTER,),
        choose=_even(patterns.overlapping_windows, _PARALLEL),
        repair="the dim is not split",
        smallest={
            "max_pool_gradient": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.max_pool1d(x, 2, 1, 'SAME')  on mesh (X=2)
                  x: float32 [1, 4, 1], arrives [_,_,_], annotated [_,X,_]
                  result: [1, 4, 1], annotated [_,X,_], leaves [_,_,_]
                """,
            ),
        },
    ),
    Fault(
        name="far halos",
        what="has windows along several split dims, with strides, that reach beyond "
        "the neighbours' shards",
        ops=(CONVOLUTION, REDUCE_WINDOW),
        choose=_even(patterns.far_halos, _PARALLEL, _REDUCED),
        repair="dims of windows are not split",
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
        },
    ),
    Fault(
        name="windows of padding",
        what="has windows by strides along a split dim, the first of which read "
        "padding alone",
        ops=(CONVOLUTION, REDUCE_WINDOW),
        choose=_even(patterns.windows_of_padding, _PARALLEL, _REDUCED),
        repair="dims of windows are not split",
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
        choose=_even(patterns.regrouped_axes, _PARALLEL, _REDUCED),
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
