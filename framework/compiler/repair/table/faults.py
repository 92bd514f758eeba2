"""The table of operations that XLA's partitioner gets wrong, and of their repairs.

The pass that lays programs out (`check`), the tests and `docs/internals/operators.md`
read it.
"""

from __future__ import annotations

from meshwright.framework.compiler.repair.convolutions import conv_layout
from meshwright.framework.compiler.repair.convolutions.conv_rewrite import (
    CONVOLUTION,
    convolution_of,
)
from meshwright.framework.compiler.repair.op_layout import (
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.table import patterns
from meshwright.framework.compiler.repair.table.fault import Chosen, Fault, evenly
from meshwright.framework.compiler.repair.table.index_faults import INDEX_FAULTS
from meshwright.framework.compiler.repair.table.product_patterns import regrouped_axes
from meshwright.framework.compiler.repair.table.slice_faults import SLICE_FAULTS
from meshwright.framework.compiler.repair.table.window_faults import WINDOW_FAULTS
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    Outcome,
    Smallest,
)


def _agreed(layout: OpLayout) -> Chosen | None:
    """Lays a product out evenly, so that dims that its tensors agree on stay split."""
    if layout.op.name == CONVOLUTION:
        layout = conv_layout.as_product(convolution_of(layout.op), layout)
    if layout is None or not regrouped_axes(layout):
        return None
    return even_layout(layout, (_PARALLEL, _REDUCED), agreed=True)


def _convolution(layout: OpLayout) -> Chosen | None:
    conv = convolution_of(layout.op)
    return conv_layout.layout(conv, layout.mesh, *layout.shardings)


_PARALLEL, _REDUCED = FactorKind.PARALLEL, FactorKind.REDUCED

FAULTS = (
    *INDEX_FAULTS,
    *SLICE_FAULTS,
    Fault(
        name="uneven reshape",
        what="is a reshape to fewer dims that makes a split dim shorter, in shards of "
        "unequal size",
        more="or one that merges such a dim, and has a split dim of size 1 before it",
        ops=(patterns.RESHAPE,),
        choose=evenly(patterns.shrinks_unevenly, _PARALLEL),
        repair="the dim is not split",
        smallest={
            "reshape_to_a_dim_of_less_than_an_element_a_shard": Smallest(
                Outcome.ABORTED,
                """
                program: tf.reshape(x, [1, 4])  on mesh (X=4)
                  x: float32 [2, 2, 1], arrives [_,_,_], annotated [X,_,_]
                  result: [1, 4], annotated [X,_], leaves [_,_]
                """,
            ),
            "reshape_of_a_split_dim_of_1": Smallest(
                Outcome.ABORTED,
                """
                program: tf.reshape(x, [6, 1])  on mesh (X=2, Y=2, Z=2)
                  x: float32 [2, 3, 1, 1], arrives [_,_,_,_], annotated [_,X,_,Z]
                  result: [6, 1], annotated [X.Y.Z,_], leaves [_,_]
                """,
            ),
            "reshape_of_a_split_dim_of_1_and_an_uneven_dim": Smallest(
                Outcome.ABORTED,
                """
                program: tf.reshape(x, [2, 6])  on mesh (X=2, Y=2, Z=2)
                  x: float32 [2, 1, 3, 2], arrives [_,_,_,_], annotated [X,Y,Z,_]
                  result: [2, 6], annotated [_,X], leaves [_,_]
                """,
            ),
            "reshapes_that_merge": Smallest(
                Outcome.ABORTED,
                """
                program: tf.reshape(tf.reshape(x, [8]), [2, 4])  on mesh (X=8)
                  x: float32 [4, 2, 1], arrives [_,_,_], annotated [X,_,_]
                  result: [2, 4], annotated [X,_], leaves [_,_]
                """,
                # The pins that Shardy's layouts get keep XLA from merging the two.
                shardy=False,
            ),
        },
    ),
    Fault(
        name="split transform",
        what="is a Fourier transform along a split dim",
        more="one of several dims that it transforms; or the last of three dims or "
        "more, which all devices split, of a forward transform of complex numbers",
        ops=(patterns.FOURIER,),
        choose=evenly(patterns.split_transform, _PARALLEL),
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
            "transform_of_a_dim_that_all_devices_split": Smallest(
                Outcome.ABORTED,
                """
                program: tf.signal.fft(x)  on mesh (X=8)
                  x: complex64 [1, 1, 8], arrives [_,_,_], annotated [_,_,X]
                  result: [1, 1, 8], annotated None, leaves [_,_,_]
                """,
                gspmd=False,
            ),
            "transform_of_complex128": Smallest(
                Outcome.REFUSED,
                """
                program: tf.signal.fft(tf.cast(x, tf.complex128))  on mesh (X=2)
                  with differentiable=False
                  x: complex64 [1, 1, 4], arrives [_,_,_], annotated [_,_,X]
                  result: [1, 1, 4], annotated [_,_,X], leaves [_,_,_]
                """,
                gspmd=False,
            ),
            "transform_to_a_dim_split_in_another_order": Smallest(
                Outcome.WRONG,
                """
                program: tf.signal.fft(x)  on mesh (X=2, Y=2)
                  x: complex64 [1, 1, 16], arrives [_,_,_], annotated [_,_,X.Y]
                  result: [1, 1, 16], annotated [_,_,Y.X], leaves [_,_,_]
                """,
                gspmd=False,
            ),
            "transform_to_a_dim_that_all_devices_split": Smallest(
                Outcome.WRONG,
                """
                program: tf.signal.fft(x)  on mesh (X=8)
                  x: complex64 [1, 1, 8], arrives [_,_,_], annotated [_,_,_]
                  result: [1, 1, 8], annotated [_,_,X], leaves [_,_,_]
                """,
                gspmd=False,
            ),
        },
        links=(
            "https://github.com/openxla/xla/pull/45402",
            "https://github.com/jax-ml/jax/issues/39291",
        ),
    ),
    Fault(
        name="reduction by another function",
        what="is a reduction along a split dim by another function than a sum, a "
        "product, a maximum or a minimum",
        more="of one tensor, or of several of which one alone is used",
        ops=(patterns.REDUCE,),
        choose=evenly(patterns.reduced_across_shards, _PARALLEL),
        repair="the dim is not split",
        smallest={
            "exclusive_or_of_a_split_dim": Smallest(
                Outcome.REFUSED,
                """
                program: reduced(x, [0], 'exclusive or')  on mesh (X=2)
                  with eager=False, differentiable=False
                  x: int32 [2], arrives [_], annotated [X]
                  result: [], annotated None, leaves []
                """,
            ),
            "largest_without_its_place": Smallest(
                Outcome.REFUSED,
                """
                program: tf.math.approx_max_k(x, 1)[0]  on mesh (X=2)
                  with eager=False, differentiable=False
                  x: float32 [2], arrives [_], annotated [X]
                  result: [1], annotated None, leaves [_]
                """,
            ),
        },
    ),
    *WINDOW_FAULTS,
    Fault(
        name="regrouped product",
        what="is a product whose tensors group or order the axes that split a dim "
        "differently",
        more="also where they split one dim that is summed over alike, and each "
        "another by itself; convolutions no window of which moves along a split dim "
        "are products",
        ops=(*patterns.PRODUCTS, CONVOLUTION),
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
            "convolution_scattered_to_a_dim_of_other_axes": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.conv1d(x, y, 1, 'SAME')  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 1, 2], arrives [_,_,_], annotated [X.Y,_,Z]
                  y: float32 [1, 2, 4], arrives [_,_,_], annotated [_,Z,Y]
                  result: [4, 1, 4], annotated [X.Y,_,Z], leaves [_,_,_]
                """,
            ),
            "kernel_gradient_summed_over_dims_split_apart": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.conv2d(x, y, 1, 'SAME')  on mesh (X=2, Y=2)
                  x: float32 [2, 2, 2, 1], arrives [_,_,_,_], annotated [X,Y,_,_]
                  y: float32 [1, 1, 1, 1], arrives [_,_,_,_], annotated None
                  result: [2, 2, 2, 1], annotated [X,_,Y,_], leaves [_,_,_,_]
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
            "product_scattered_beside_axes_out_of_order": Smallest(
                Outcome.WRONG,
                """
                program: tf.einsum('ij,jk->ik', x, y)  on mesh (X=2, Y=2, Z=2)
                  x: float32 [4, 2], arrives [_,_], annotated [_,Y]
                  y: float32 [2, 2], arrives [_,_], annotated [Y,_]
                  result: [4, 2], annotated [Z.X,Y], leaves [_,_]
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
        what="is a convolution whose partial sums XLA would add up wrongly",
        more="over devices that hold the same shards too, or whose shards are empty",
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
            "kernel_gradient_with_an_empty_shard": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.conv2d(x, y, [1, 3, 1, 1], [[0, 0], [1, 0], [0, 0], [0, 0]])  on mesh (X=4)
                  with eager=False
                  x: float32 [1, 13, 2, 3], arrives [_,_,_,_], annotated [_,X,_,_]
                  y: float32 [1, 1, 3, 4], arrives [_,_,_,_], annotated None
                  result: [1, 5, 2, 4], annotated [_,X,_,_], leaves [_,_,_,_]
                """,  # noqa: E501
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
