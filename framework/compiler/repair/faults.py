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
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.windows import (
    REDUCE_WINDOW,
    SELECT_AND_SCATTER,
)
from meshwright.framework.sharding.sharding import Sharding

Chosen = tuple[Sharding, ...] | conv_layout.Layout
"""Shardings of an operation's operands and results, or a convolution's layout."""


class Outcome(enum.Enum):
    """What comes of a program that meets a fault and is not laid out otherwise."""

    WRONG = "wrong numbers"
    REFUSED = "XLA refuses its own program"
    ABORTED = "the process ends"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smallest:
    """The smallest program known to meet a fault.

    Args:
      outcome: what comes of it.
      expression: Python over `tf` and the names of the inputs.
      shapes: of the inputs by name; `i` has indices below the size of dim `indexed` of
        x, the others are float32.
      annotated: dims_mapping by input name, and of the "result"; the others are left
        to completion. At the border all are replicated.
      mesh: its shape; the axes are X, Y, Z.
      indexed: see `shapes`.
      shardy: whether Shardy's program meets it, as GSPMD's does.
    """

    outcome: Outcome
    expression: str
    shapes: Mapping[str, tuple[int, ...]]
    annotated: Mapping[str, list]
    mesh: tuple[int, ...] = (2, 2)
    indexed: int = 0
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


def _even(
    meets: Callable[[OpLayout], bool], *kept: FactorKind
) -> Callable[[OpLayout], Chosen | None]:
    """Lays an operation that meets a fault out evenly, split by some factors only."""
    return lambda layout: even_layout(layout, kept) if meets(layout) else None


def _convolution(layout: OpLayout) -> Chosen | None:
    shardings = [tensor.sharding for tensor in layout.tensors]
    return conv_layout.layout(convolution_of(layout.op), layout.mesh, *shardings)


_PARALLEL, _REDUCED = FactorKind.PARALLEL, FactorKind.REDUCED
_INDEXED = (patterns.GATHER, patterns.SCATTER)
_IMAGE = [None, "X", "Y", None]
_ROWS = [None, "X", None]

FAULTS = (
    Fault(
        name="uneven indices",
        what="is a gather or scatter by indices in shards of unequal size",
        ops=_INDEXED,
        choose=_even(patterns.uneven_indices, _PARALLEL, _REDUCED),
        repair="the indices are split by what divides them",
        smallest={
            "gather_gradient_uneven_indices": Smallest(
                outcome=Outcome.WRONG,
                expression="tf.gather(x, i)",
                shapes={"x": (8,), "i": (2,)},
                annotated={"i": ["X"], "result": ["Y"]},
                mesh=(4, 2),
            ),
            "gather_of_uneven_indices": Smallest(
                outcome=Outcome.REFUSED,  # In the gradient, a gather.
                expression="tf.math.unsorted_segment_sum(x, i, 3)",
                shapes={"x": (3, 2, 2), "i": (3,)},
                annotated={
                    "x": [None, "Y", "X"],
                    "i": [("X", "Y")],
                    "result": [None, None, "X"],
                },
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
                outcome=Outcome.WRONG,
                expression="tf.tensor_scatter_nd_add(x, i, y)",
                shapes={"x": (2,), "i": (4, 1), "y": (4,)},
                annotated={"x": ["Y"], "i": ["X", "Y"], "y": ["X"]},
            ),
            "gather_of_split_coordinates": Smallest(
                outcome=Outcome.REFUSED,
                expression="tf.gather_nd(x, i)",
                shapes={"x": (4, 4), "i": (8, 2)},
                annotated={
                    "x": [None, "Y"],
                    "i": [None, ("X", "Y")],
                    "result": [("X", "Y")],
                },
                mesh=(4, 2),
            ),
        },
    ),
    Fault(
        name="rows split as indices",
        what="is a gather or scatter in which an axis splits indices and another dim",
        ops=_INDEXED,
        choose=_even(patterns.rows_split_as_indices, _PARALLEL, _REDUCED),
        repair="the axis splits what is largest, and nothing else",
        smallest={
            "gather_of_split_rows": Smallest(
                outcome=Outcome.REFUSED,
                expression="tf.gather(x, i)",
                shapes={"x": (4, 2), "i": (4,)},
                annotated={"x": [None, "X"], "i": ["X"], "result": ["Y", None]},
                mesh=(2, 4),
            ),
            "gather_of_split_columns": Smallest(
                outcome=Outcome.REFUSED,
                expression="tf.gather(x, i)",
                shapes={"x": (1, 4, 2), "i": (2,)},
                annotated={
                    "x": [None, None, "Y"],
                    "i": ["Y"],
                    "result": [None, "X", None],
                },
                mesh=(4, 2),
            ),
        },
    ),
    Fault(
        name="scatter of a single index",
        what="is a scatter of a single index into a split dim, which all shards write",
        ops=(patterns.SCATTER,),
        choose=_even(patterns.single_index),
        repair="nothing is split",
        smallest={
            "scatter_of_one_index": Smallest(
                outcome=Outcome.WRONG,
                expression="tf.tensor_scatter_nd_update(x, i, y)",
                shapes={"x": (4,), "i": (1, 1), "y": (1,)},
                annotated={"result": ["X"]},
                mesh=(2,),
            ),
        },
    ),
    Fault(
        name="uneven steps",
        what="is a slice by steps, or its gradient, of a dim in unequal shards",
        ops=("stablehlo.pad", "stablehlo.slice"),
        choose=_even(patterns.uneven_steps, _PARALLEL),
        repair="the dim is not split",
        smallest={
            "strided_slice_of_uneven_shards": Smallest(
                outcome=Outcome.WRONG,  # The gradient of x.
                expression="x[0:3:2]",
                shapes={"x": (3,)},
                annotated={"x": ["X"], "result": [None]},
                mesh=(4,),
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
                outcome=Outcome.WRONG,
                expression="tf.nn.max_pool1d(x, 2, 1, 'SAME')",
                shapes={"x": (1, 4, 1)},
                annotated={"x": _ROWS, "result": _ROWS},
                mesh=(2,),
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
                outcome=Outcome.ABORTED,
                expression="tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')",
                shapes={"x": (1, 3, 4, 1), "y": (1, 2, 1, 1)},
                annotated={"x": _IMAGE, "result": _IMAGE},
                mesh=(2, 3),
            ),
            "strided_convolution_with_halos_of_more": Smallest(
                outcome=Outcome.REFUSED,
                expression="tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')",
                shapes={"x": (1, 5, 5, 1), "y": (2, 2, 1, 1)},
                annotated={"x": _IMAGE, "result": _IMAGE},
                mesh=(2, 4),
            ),
            "strided_convolution_with_halos_and_rows_unread": Smallest(
                outcome=Outcome.WRONG,  # The gradient of x.
                expression="tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')",
                shapes={"x": (1, 5, 5, 1), "y": (1, 2, 1, 1)},
                annotated={"x": _IMAGE, "result": _IMAGE},
                mesh=(2, 4),
            ),
            "strided_average_with_far_halos_and_rows_unread": Smallest(
                outcome=Outcome.WRONG,  # The gradient of x.
                expression="tf.nn.pool(x, [2, 4], 'AVG', [2, 1], 'VALID')",
                shapes={"x": (1, 3, 6, 1)},
                annotated={"x": _IMAGE},
                mesh=(2, 4),
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
                outcome=Outcome.ABORTED,
                expression="tf.nn.conv2d(x, y, [1, 1, 2, 1], "
                "[[0, 0], [0, 0], [1, 0], [0, 0]])",
                shapes={"x": (1, 1, 3, 1), "y": (1, 1, 1, 1)},
                annotated={
                    "x": [None, None, "X", None],
                    "result": [None, None, "X", None],
                },
                mesh=(2,),
            ),
        },
    ),
    Fault(
        name="regrouped product",
        what="is a product with a dim that its tensors split by different axes",
        ops=("stablehlo.dot_general", "stablehlo.dot"),
        choose=_even(patterns.regrouped_axes, _PARALLEL, _REDUCED),
        repair="its tensors are split alike",
        smallest={
            "contraction_of_batches_split_apart": Smallest(
                outcome=Outcome.WRONG,  # The gradient of y.
                expression="tf.einsum('bij,bjk->bik', x, y)",
                shapes={"x": (4, 2, 4), "y": (4, 4, 1)},
                annotated={"x": ["Y", "X", None], "y": ["X", "Y", None]},
                mesh=(2, 4),
                shardy=False,
            ),
            "product_onto_regrouped_axes": Smallest(
                outcome=Outcome.WRONG,
                expression="x @ y",
                shapes={"x": (4, 2), "y": (2, 2)},
                annotated={
                    "x": ["X", "Z"],
                    "y": ["Z", None],
                    "result": [("Y", "X"), "Z"],
                },
                mesh=(2, 2, 2),
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
                outcome=Outcome.ABORTED,
                expression="tf.nn.depthwise_conv2d(x, y, [1, 1, 1, 1], 'SAME')",
                shapes={"x": (1, 1, 4, 2), "y": (1, 1, 2, 1)},
                annotated={
                    "x": [None, None, None, "X"],
                    "y": [None, None, "Y", None],
                },
                shardy=False,
            ),
            "kernel_gradient_of_split_rows": Smallest(
                outcome=Outcome.WRONG,  # The gradient of y doubles.
                expression="tf.nn.conv1d(x, y, 1, 'SAME')",
                shapes={"x": (2, 4, 1), "y": (3, 1, 1)},
                annotated={"x": _ROWS, "result": _ROWS},
            ),
        },
    ),
)
