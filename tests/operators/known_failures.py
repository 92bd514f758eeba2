"""What XLA gets wrong: the smallest programs known, each kept as an expected failure.

What a use may not draw (`Use.unsplit` and `Use.even`) is here for a reason each.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from meshwright.framework.compiler.program import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.cases import Case
from tests.operators.use import Input, Kind, Use


class Outcome(enum.Enum):
    WRONG = enum.auto()  # Other numbers than on one device.
    REFUSED = enum.auto()  # XLA's verifier refuses what its partitioner made.
    ABORTED = enum.auto()  # The process ends.


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """A program of one operator that XLA gets wrong.

    Args:
      outcome: how it fails.
      expression: as in a use.
      shapes: of the inputs by name; `i` is of indices below the size of dim `indexed`
        of x.
      annotated: dims_mapping by input name, and of the "result"; what is not here is
        left to completion. At the border all is replicated.
      mesh: its shape; axes X, Y, Z.
      partitioners: that fail.
    """

    outcome: Outcome
    expression: str
    shapes: Mapping[str, tuple[int, ...]]
    annotated: Mapping[str, list]
    mesh: tuple[int, ...] = (2, 2)
    indexed: int = 0
    partitioners: Sequence[Partitioner] = tuple(Partitioner)

    def case(self) -> Case:
        mesh = DeviceMesh(("X", "Y", "Z")[: len(self.mesh)], self.mesh)
        limit = self.shapes["x"][self.indexed]
        inputs = {
            name: Input(shape, Kind.INDEX, limit) if name == "i" else Input(shape)
            for name, shape in self.shapes.items()
        }
        use = Use(self.expression, inputs)

        def annotated(name):
            mapping = self.annotated.get(name)
            return mapping and Sharding.from_dims_mapping(mesh, mapping)

        def whole(shapes):
            return tuple(Sharding.replicated(mesh, len(shape)) for shape in shapes)

        return Case(
            operator="known failure",
            use=use,
            mesh=mesh,
            arrives=whole(self.shapes.values()),
            annotated=tuple(annotated(name) for name in self.shapes),
            result=(annotated("result"),),
            leaves=whole(use.result_shapes),
        )


_ROWS = [None, "X", None]
_IMAGE = [None, "X", "Y", None]

KNOWN_FAILURES = {
    "grouped_convolution_of_split_kernel": KnownFailure(
        Outcome.ABORTED,
        "tf.nn.depthwise_conv2d(x, y, [1, 1, 1, 1], 'SAME')",
        {"x": (1, 1, 4, 2), "y": (1, 1, 2, 1)},
        {"x": [None, None, None, "X"], "y": [None, None, "Y", None]},
        partitioners=[Partitioner.GSPMD],
    ),
    "strided_convolution_with_windows_of_padding": KnownFailure(
        Outcome.ABORTED,
        "tf.nn.conv2d(x, y, [1, 1, 2, 1], [[0, 0], [0, 0], [1, 0], [0, 0]])",
        {"x": (1, 1, 3, 1), "y": (1, 1, 1, 1)},
        {"x": [None, None, "X", None], "result": [None, None, "X", None]},
        mesh=(2,),
    ),
    "strided_convolution_with_halos_of_a_shard": KnownFailure(
        Outcome.ABORTED,
        "tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')",
        {"x": (1, 3, 4, 1), "y": (1, 2, 1, 1)},
        {"x": _IMAGE, "result": _IMAGE},
        mesh=(2, 3),
    ),
    "strided_convolution_with_halos_of_more": KnownFailure(
        Outcome.REFUSED,
        "tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')",
        {"x": (1, 5, 5, 1), "y": (2, 2, 1, 1)},
        {"x": _IMAGE, "result": _IMAGE},
        mesh=(2, 4),
    ),
    "strided_convolution_with_halos_and_rows_unread": KnownFailure(
        Outcome.WRONG,  # The gradient of x.
        "tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')",
        {"x": (1, 5, 5, 1), "y": (1, 2, 1, 1)},
        {"x": _IMAGE, "result": _IMAGE},
        mesh=(2, 4),
    ),
    "strided_average_with_far_halos_and_rows_unread": KnownFailure(
        Outcome.WRONG,  # The gradient of x.
        "tf.nn.pool(x, [2, 4], 'AVG', [2, 1], 'VALID')",
        {"x": (1, 3, 6, 1)},
        {"x": _IMAGE},
        mesh=(2, 4),
    ),
    "strided_slice_of_uneven_shards": KnownFailure(
        Outcome.WRONG,  # The gradient of x.
        "x[0:3:2]",
        {"x": (3,)},
        {"x": ["X"], "result": [None]},
        mesh=(4,),
    ),
    "max_pool_gradient": KnownFailure(
        Outcome.WRONG,
        "tf.nn.max_pool1d(x, 2, 1, 'SAME')",
        {"x": (1, 4, 1)},
        {"x": _ROWS, "result": _ROWS},
        mesh=(2,),
    ),
    "scatter_of_one_index": KnownFailure(
        Outcome.WRONG,
        "tf.tensor_scatter_nd_update(x, i, y)",
        {"x": (4,), "i": (1, 1), "y": (1,)},
        {"result": ["X"]},
        mesh=(2,),
    ),
    "gather_gradient_uneven_indices": KnownFailure(
        Outcome.WRONG,
        "tf.gather(x, i)",
        {"x": (8,), "i": (2,)},
        {"i": ["X"], "result": ["Y"]},
        mesh=(4, 2),
    ),
    "gather_of_uneven_indices": KnownFailure(
        Outcome.REFUSED,  # In the gradient, a gather.
        "tf.math.unsorted_segment_sum(x, i, 3)",
        {"x": (3, 2, 2), "i": (3,)},
        {"x": [None, "Y", "X"], "i": [("X", "Y")], "result": [None, None, "X"]},
    ),
    "scatter_of_split_coordinates": KnownFailure(
        Outcome.WRONG,
        "tf.tensor_scatter_nd_add(x, i, y)",
        {"x": (2,), "i": (4, 1), "y": (4,)},
        {"x": ["Y"], "i": ["X", "Y"], "y": ["X"]},
    ),
    "gather_of_split_coordinates": KnownFailure(
        Outcome.REFUSED,
        "tf.gather_nd(x, i)",
        {"x": (4, 4), "i": (8, 2)},
        {"x": [None, "Y"], "i": [None, ("X", "Y")], "result": [("X", "Y")]},
        mesh=(4, 2),
    ),
    "gather_of_split_rows": KnownFailure(
        Outcome.REFUSED,
        "tf.gather(x, i)",
        {"x": (4, 2), "i": (4,)},
        {"x": [None, "X"], "i": ["X"], "result": ["Y", None]},
        mesh=(2, 4),
    ),
    "gather_of_split_columns": KnownFailure(
        Outcome.REFUSED,
        "tf.gather(x, i)",
        {"x": (1, 4, 2), "i": (2,)},
        {"x": [None, None, "Y"], "i": ["Y"], "result": [None, "X", None]},
        mesh=(4, 2),
    ),
    "contraction_of_batches_split_apart": KnownFailure(
        Outcome.WRONG,  # The gradient of y.
        "tf.einsum('bij,bjk->bik', x, y)",
        {"x": (4, 2, 4), "y": (4, 4, 1)},
        {"x": ["Y", "X", None], "y": ["X", "Y", None]},
        mesh=(2, 4),
        partitioners=[Partitioner.GSPMD],
    ),
    "product_onto_regrouped_axes": KnownFailure(
        Outcome.WRONG,
        "x @ y",
        {"x": (4, 2), "y": (2, 2)},
        {"x": ["X", "Z"], "y": ["Z", None], "result": [("Y", "X"), "Z"]},
        mesh=(2, 2, 2),
    ),
}
