"""The table of rewrites of ops, in any layout, that avoid faults of XLA.

A row is applied to every program, with each jaxlib that has its fault; all were seen
with jaxlib 0.10.2. The passes, the tests and `docs/internals/operators.md` read the
table.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.rewrites.branches import (
    open_results_in_regions,
)
from meshwright.framework.compiler.stablehlo.rewrites.crops import crop_images
from meshwright.framework.compiler.stablehlo.rewrites.empties import fold_empties
from meshwright.framework.compiler.stablehlo.rewrites.fourier import (
    keep_row_major,
    replicate_in_regions,
)
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    KnownFault,
    Outcome,
    Smallest,
)
from meshwright.framework.compiler.stablehlo.rewrites.rolls import rotate
from meshwright.framework.compiler.stablehlo.rewrites.roundings import fold_roundings
from meshwright.framework.compiler.stablehlo.rewrites.selections import compute_once
from meshwright.framework.compiler.stablehlo.rewrites.slices import drop_noop_strides
from meshwright.framework.compiler.stablehlo.rewrites.tuples import flatten_tuples
from meshwright.framework.compiler.xla.jax_bridge import JAXLIB


class Stage(enum.Enum):
    """When a rewrite is applied, in this order.

    `passes` names `SPLITTABLE` and `COMPUTED_ONCE`; the others are the beginning of
    `tidy`, and the beginning and the end of `write_for`.
    """

    TIDY = "before calls are inlined"
    SPLITTABLE = "before propagation, and in copies that only show what it does"
    COMPUTED_ONCE = "after that, in the program itself: it merges equal ops"
    WRITTEN = "before regions and annotations are written for a partitioner"
    SHARDY = "after they are written for Shardy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workaround(KnownFault):
    """A fault of ops in any layout, and the rewrite that avoids it.

    Args:
      stage: when the rewrite is applied.
      rewrite: changes a module in place; takes the mesh too in the stage `SHARDY`.
    """

    stage: Stage
    rewrite: Callable[..., None]


_DECOMPOSITION = """
    program: tf.linalg.qr(x)[1]  on mesh (X=2)
      with eager=False, tolerance=0.0001
      x: float32 [1, 1], arrives [_,_], annotated None
      result: [1, 1], annotated None, leaves [_,_]
"""
WORKAROUNDS = (
    Workaround(
        name="tuples",
        what="Shardy does not know tuples, which custom calls of QR and "
        "eigenvalue decompositions return; to look at such a program under GSPMD, "
        "which reads Shardy's rules, ends the process",
        repair="the calls return several results",
        stage=Stage.TIDY,
        rewrite=flatten_tuples,
        smallest={
            "decomposition_of_a_matrix": Smallest(
                Outcome.REFUSED,
                _DECOMPOSITION,
                gspmd=False,
            ),
            "decomposition_that_is_looked_at": Smallest(
                Outcome.ABORTED,
                _DECOMPOSITION,
                shardy=False,
            ),
        },
    ),
    Workaround(
        name="tensors without elements",
        what="the partitioner ends the process at some products and convolutions "
        "without elements; XLA's clean-up removes such operands of Shardy's manual "
        "regions, and what is left is refused",
        repair="tensors without elements, and products and convolutions that sum over "
        "none, are constants",
        stage=Stage.SPLITTABLE,
        rewrite=fold_empties,
        smallest={
            "convolution_without_a_batch": Smallest(
                Outcome.ABORTED,
                """
                program: tf.nn.conv1d(x, y, 1, 'SAME')  on mesh (X=2, Y=2)
                  in a region manual along Y
                  x: float32 [0, 4, 1], arrives [_,_,_], annotated None
                  y: float32 [3, 1, 1], arrives [_,_,_], annotated None
                  result: [0, 4, 1], annotated [_,X,_], leaves [_,_,_]
                """,
                shardy=False,
            ),
            "product_that_sums_over_nothing": Smallest(
                Outcome.REFUSED,
                """
                program: tf.einsum('ij,jk->ik', x, y)  on mesh (X=2, Y=2)
                  in a region manual along Y
                  x: float32 [1, 0], arrives [_,_], annotated None
                  y: float32 [0, 1], arrives [_,_], annotated None
                  result: [1, 1], annotated None, leaves [_,_]
                """,
                gspmd=False,
            ),
        },
    ),
    Workaround(
        name="roundings on each device",
        what="along a split dim each device computes its own part of the positions "
        "that `tf.image.resize` reads; XLA's kernels round a fraction next to a "
        "whole number to either side, so that rows get the weights of others",
        repair="rounded float32 and float64 values that follow from constants by "
        "plain arithmetic are constants, of up to 65,536 elements",
        stage=Stage.SPLITTABLE,
        rewrite=fold_roundings,
        smallest={
            "resized_image": Smallest(
                Outcome.WRONG,
                """
                program: tf.image.resize(x, [12, 2], 'bilinear')  on mesh (X=3, Y=2)
                  x: float32 [2, 4, 6, 1], arrives [_,_,Y,_], annotated None
                  result: [2, 12, 2, 1], annotated None, leaves [_,X,_,_]
                """,
                gspmd=False,
            ),
        },
    ),
    Workaround(
        name="steps of single elements",
        what="along a split dim the partitioner counts by the step of a slice of a "
        "single element, and refuses some; their repair, that of steps across "
        "shards, gathers the dim",
        repair="the step is 1",
        stage=Stage.SPLITTABLE,
        rewrite=drop_noop_strides,
        smallest={
            "single_element_by_a_step": Smallest(
                Outcome.SLOW,
                """
                program: x[3:4:3]  on mesh (X=4)
                  x: float32 [4], arrives [X], annotated [X]
                  result: [1], annotated None, leaves [X]
                """,
            ),
        },
    ),
    Workaround(
        name="cropped images",
        what="XLA's CPU backend reads beyond the image of a convolution that crops "
        "it on one side of a dim and pads it on the other, as in the gradient of one "
        "that is padded by more than its kernel; on one device too",
        repair="the convolution reads a slice of the image, which it only pads",
        stage=Stage.SPLITTABLE,
        rewrite=crop_images,
        smallest={
            "image_padded_beyond_the_kernel": Smallest(
                Outcome.WRONG,
                """
                program: tf.nn.conv2d(x, y, 1, [[0, 0], [2, 0], [3, 2], [0, 0]])  on mesh (X=2)
                  x: float32 [2, 4, 4, 2], arrives [_,_,_,_], annotated None
                  y: float32 [2, 2, 2, 3], arrives [_,_,_,_], annotated None
                  result: [2, 5, 8, 3], annotated None, leaves [_,_,_,_]
                """,  # noqa: E501
            ),
        },
    ),
    Workaround(
        name="gathered rolls",
        what="a `tf.roll` by a constant comes from TF as a window of the tensor behind "
        "itself, which the partitioner gathers along a split dim",
        repair="two slices in the other order: only rows that cross a border move",
        stage=Stage.SPLITTABLE,
        rewrite=rotate,
        smallest={
            "roll_of_a_split_dim": Smallest(
                Outcome.SLOW,
                """
                program: tf.roll(x, 1, 0)  on mesh (X=2)
                  x: float32 [4], arrives [X], annotated [X]
                  result: [4], annotated [X], leaves [X]
                """,
            ),
        },
    ),
    Workaround(
        name="values computed again",
        what="XLA's fusion computes an operand again in each kernel that reads it, and "
        "its CPU backend may round it differently there: no element equals the maximum "
        "that it is compared with; on one device too",
        repair="what is compared with its own maximum, minimum or k-th largest element "
        "is computed once",
        stage=Stage.COMPUTED_ONCE,
        rewrite=compute_once,
        smallest={
            "gradient_of_an_infinite_norm": Smallest(
                Outcome.WRONG,
                """
                program: tf.norm(x * y - 0.7 * x * x, ord=float('inf'), axis=1)  on mesh (X=2)
                  x: float32 [16, 24], arrives [_,_], annotated None
                  y: float32 [16, 24], arrives [_,_], annotated None
                  result: [16], annotated None, leaves [_]
                """,  # noqa: E501
            ),
        },
        links=(
            "https://github.com/openxla/xla/pull/44738",
            "https://github.com/openxla/xla/issues/41579",
        ),
    ),
    Workaround(
        name="order of transforms",
        what="the result of a Fourier transform takes the order of elements that its "
        "reader prefers, and XLA's CPU backend takes row-major order alone",
        repair="the result stays row-major",
        # Right after transforms, before what repairs add.
        stage=Stage.WRITTEN,
        rewrite=keep_row_major,
        smallest={
            "transform_that_is_split_anew": Smallest(
                Outcome.REFUSED,
                """
                program: tf.signal.fft(x)  on mesh (X=2)
                  x: complex64 [2, 2, 2], arrives [_,_,_], annotated [X,_,_]
                  result: [2, 2, 2], annotated [_,X,_], leaves [_,_,_]
                """,
            ),
        },
    ),
    Workaround(
        name="order of transforms in regions",
        what="in a manual region Shardy exchanges dims between a transform and the "
        "mark that keeps its result row-major",
        repair="the transform is replicated along the other axes",
        stage=Stage.SHARDY,
        rewrite=replicate_in_regions,
        smallest={
            "transform_that_is_split_anew_in_a_region": Smallest(
                Outcome.REFUSED,
                """
                program: tf.signal.fft(x)  on mesh (X=2, Y=2, Z=2)
                  in a region manual along Y
                  x: complex64 [2, 2, 2], arrives [_,_,_], annotated [_,X,_]
                  result: [2, 2, 2], annotated [_,Z,_], leaves [_,_,_]
                """,
                gspmd=False,
            ),
        },
    ),
    Workaround(
        name="branches split apart",
        what="XLA's verifier refuses branches in Shardy's manual regions that end in "
        "results which are annotated unlike those of the others; elsewhere XLA "
        "reshards them",
        repair="another annotation, of open dims, follows each result",
        stage=Stage.SHARDY,
        rewrite=open_results_in_regions,
        smallest={
            "branch_annotated_unlike_the_other": Smallest(
                Outcome.REFUSED,
                """
                program: tf.cond(p, lambda: lay(x + 1, 0), lambda: tf.cumsum(x))  on mesh (X=2, Y=2)
                  in a region manual along Y
                  x: float32 [2], arrives [_], annotated None
                  p: bool [], arrives [], annotated None
                  result: [2], annotated [_], leaves [_]
                  inside, 0: annotated [X]
                """,  # noqa: E501
                gspmd=False,
            ),
        },
    ),
)


def work_around(stage: Stage, module: ir.Operation, *of_stage) -> None:
    """Applies the rows of a stage whose faults this jaxlib has, in the table's order.

    Args:
      stage: the stage of the passes.
      module: changed in place.
      of_stage: what the rewrites of the stage take besides.
    """
    for row in WORKAROUNDS:
        if row.stage is stage and row.is_in(JAXLIB):
            row.rewrite(module, *of_stage)
