"""The smallest programs that XLA gets wrong, as the matrix prints them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.framework.compiler.program import Partitioner
from tests.operators.apart import Outcome
from tests.operators.cases import Case
from tests.operators.printed import case_of


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """A program of one operator that XLA gets wrong.

    Args:
      outcome: how it fails.
      text: the case, as it prints.
      partitioners: that fail.
    """

    outcome: Outcome
    text: str
    partitioners: Sequence[Partitioner] = tuple(Partitioner)

    @property
    def case(self) -> Case:
        return case_of(self.text)


KNOWN_FAILURES = {
    "grouped_convolution_of_split_kernel": KnownFailure(
        Outcome.ENDED,
        """
        program: tf.nn.depthwise_conv2d(x, y, [1, 1, 1, 1], 'SAME')  on mesh (X=2, Y=2)
          x: float32 [1, 1, 4, 2], arrives [_,_,_,_], annotated [_,_,_,X]
          y: float32 [1, 1, 2, 1], arrives [_,_,_,_], annotated [_,_,Y,_]
          result: [1, 1, 4, 2], annotated None, leaves [_,_,_,_]
        """,
        [Partitioner.GSPMD],
    ),
    "strided_convolution_with_windows_of_padding": KnownFailure(
        Outcome.ENDED,
        """
        program: tf.nn.conv2d(x, y, [1, 1, 2, 1], [[0, 0], [0, 0], [1, 0], [0, 0]])  on mesh (X=2)
          x: float32 [1, 1, 3, 1], arrives [_,_,_,_], annotated [_,_,X,_]
          y: float32 [1, 1, 1, 1], arrives [_,_,_,_], annotated None
          result: [1, 1, 2, 1], annotated [_,_,X,_], leaves [_,_,_,_]
        """,  # noqa: E501
    ),
    "strided_convolution_with_halos_of_a_shard": KnownFailure(
        Outcome.ENDED,
        """
        program: tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')  on mesh (X=2, Y=3)
          x: float32 [1, 3, 4, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
          y: float32 [1, 2, 1, 1], arrives [_,_,_,_], annotated None
          result: [1, 2, 3, 1], annotated [_,X,Y,_], leaves [_,_,_,_]
        """,
    ),
    "strided_convolution_with_halos_of_more": KnownFailure(
        Outcome.REFUSED,
        """
        program: tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')  on mesh (X=2, Y=4)
          x: float32 [1, 5, 5, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
          y: float32 [2, 2, 1, 1], arrives [_,_,_,_], annotated None
          result: [1, 2, 4, 1], annotated [_,X,Y,_], leaves [_,_,_,_]
        """,
    ),
    "strided_convolution_with_halos_and_rows_unread": KnownFailure(
        Outcome.WRONG,
        """
        program: tf.nn.conv2d(x, y, [1, 2, 1, 1], 'VALID')  on mesh (X=2, Y=4)
          x: float32 [1, 5, 5, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
          y: float32 [1, 2, 1, 1], arrives [_,_,_,_], annotated None
          result: [1, 3, 4, 1], annotated [_,X,Y,_], leaves [_,_,_,_]
        """,
    ),
    "strided_average_with_far_halos_and_rows_unread": KnownFailure(
        Outcome.WRONG,
        """
        program: tf.nn.pool(x, [2, 4], 'AVG', [2, 1], 'VALID')  on mesh (X=2, Y=4)
          x: float32 [1, 3, 6, 1], arrives [_,_,_,_], annotated [_,X,Y,_]
          result: [1, 1, 3, 1], annotated None, leaves [_,_,_,_]
        """,
    ),
    "strided_slice_of_uneven_shards": KnownFailure(
        Outcome.WRONG,
        """
        program: x[0:3:2]  on mesh (X=4)
          x: float32 [3], arrives [_], annotated [X]
          result: [2], annotated [_], leaves [_]
        """,
    ),
    "max_pool_gradient": KnownFailure(
        Outcome.WRONG,
        """
        program: tf.nn.max_pool1d(x, 2, 1, 'SAME')  on mesh (X=2)
          x: float32 [1, 4, 1], arrives [_,_,_], annotated [_,X,_]
          result: [1, 4, 1], annotated [_,X,_], leaves [_,_,_]
        """,
    ),
    "scatter_of_one_index": KnownFailure(
        Outcome.WRONG,
        """
        program: tf.tensor_scatter_nd_update(x, i, y)  on mesh (X=2)
          x: float32 [4], arrives [_], annotated None
          i: index int32 [1, 1] below 4, arrives [_,_], annotated None
          y: float32 [1], arrives [_], annotated None
          result: [4], annotated [X], leaves [_]
        """,
    ),
    "gather_gradient_uneven_indices": KnownFailure(
        Outcome.WRONG,
        """
        program: tf.gather(x, i)  on mesh (X=4, Y=2)
          x: float32 [8], arrives [_], annotated None
          i: index int32 [2] below 8, arrives [_], annotated [X]
          result: [2], annotated [Y], leaves [_]
        """,
    ),
    "gather_of_uneven_indices": KnownFailure(
        Outcome.REFUSED,
        """
        program: tf.math.unsorted_segment_sum(x, i, 3)  on mesh (X=2, Y=2)
          x: float32 [3, 2, 2], arrives [_,_,_], annotated [_,Y,X]
          i: index int32 [3] below 3, arrives [_], annotated [X.Y]
          result: [3, 2, 2], annotated [_,_,X], leaves [_,_,_]
        """,
    ),
    "scatter_of_split_coordinates": KnownFailure(
        Outcome.WRONG,
        """
        program: tf.tensor_scatter_nd_add(x, i, y)  on mesh (X=2, Y=2)
          x: float32 [2], arrives [_], annotated [Y]
          i: index int32 [4, 1] below 2, arrives [_,_], annotated [X,Y]
          y: float32 [4], arrives [_], annotated [X]
          result: [2], annotated None, leaves [_]
        """,
    ),
    "gather_of_split_coordinates": KnownFailure(
        Outcome.REFUSED,
        """
        program: tf.gather_nd(x, i)  on mesh (X=4, Y=2)
          x: float32 [4, 4], arrives [_,_], annotated [_,Y]
          i: index int32 [8, 2] below 4, arrives [_,_], annotated [_,X.Y]
          result: [8], annotated [X.Y], leaves [_]
        """,
    ),
    "gather_of_split_rows": KnownFailure(
        Outcome.REFUSED,
        """
        program: tf.gather(x, i)  on mesh (X=2, Y=4)
          x: float32 [4, 2], arrives [_,_], annotated [_,X]
          i: index int32 [4] below 4, arrives [_], annotated [X]
          result: [4, 2], annotated [Y,_], leaves [_,_]
        """,
    ),
    "gather_of_split_columns": KnownFailure(
        Outcome.REFUSED,
        """
        program: tf.gather(x, i)  on mesh (X=4, Y=2)
          x: float32 [1, 4, 2], arrives [_,_,_], annotated [_,_,Y]
          i: index int32 [2] below 1, arrives [_], annotated [Y]
          result: [2, 4, 2], annotated [_,X,_], leaves [_,_,_]
        """,
    ),
    "contraction_of_batches_split_apart": KnownFailure(
        Outcome.WRONG,
        """
        program: tf.einsum('bij,bjk->bik', x, y)  on mesh (X=2, Y=4)
          x: float32 [4, 2, 4], arrives [_,_,_], annotated [Y,X,_]
          y: float32 [4, 4, 1], arrives [_,_,_], annotated [X,Y,_]
          result: [4, 2, 1], annotated None, leaves [_,_,_]
        """,
        [Partitioner.GSPMD],
    ),
    "product_onto_regrouped_axes": KnownFailure(
        Outcome.WRONG,
        """
        program: x @ y  on mesh (X=2, Y=2, Z=2)
          x: float32 [4, 2], arrives [_,_], annotated [X,Z]
          y: float32 [2, 2], arrives [_,_], annotated [Z,_]
          result: [4, 2], annotated [Y.X,Z], leaves [_,_]
        """,
    ),
}
