"""The rows of the table of faults that slices meet."""

from __future__ import annotations

from meshwright.framework.compiler.repair.op_layout import (
    EvenLayout,
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.table import patterns
from meshwright.framework.compiler.repair.table.fault import Chosen, Fault, evenly
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    Outcome,
    Smallest,
)
from meshwright.framework.compiler.stablehlo.rewrites.starts import (
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    Clamped,
    merging_dims,
    unclamped_dims,
)


def _kept_apart(layout: OpLayout) -> Chosen | None:
    """Annotates a slice and its operand with the operand's sharding, which copies both.

    A roll and its parts get the sharding of the larger part.
    """
    if layout.op.name == patterns.CONCATENATE:
        return _rolled_together(layout)
    if not patterns.cuts_no_shard(layout):
        return None
    (operand,), (result,) = layout.operands, layout.results
    if operand.sharding is None:
        return even_layout(layout, keep=())
    return EvenLayout(
        shardings=(operand.sharding,) * 2,
        shapes=(operand.shape, result.shape),
        copies=True,
    )


def _rolled_together(layout: OpLayout) -> Chosen | None:
    if not patterns.rolls_apart(layout):
        return None
    larger = max(layout.operands, key=lambda tensor: tensor.bytes)
    if larger.sharding is None:
        return even_layout(layout, keep=())
    if not patterns.has_equal_shards(layout, larger, *layout.results):
        return None
    return EvenLayout(
        shardings=(larger.sharding,) * 3,
        shapes=tuple(tensor.shape for tensor in layout.tensors),
    )


def _clamped(layout: OpLayout) -> Clamped | None:
    """Clamps the computed start of a slice, or of its update.

    The dim is split, or along it XLA may merge two slices or updates.
    """
    if layout.is_replaced:
        return None
    rank = len(layout.results[0].shape)
    tensors = [tensor for tensor in layout.tensors if len(tensor.shape) == rank]
    merging = merging_dims(layout.op)
    if not any(
        dim in merging or any(tensor.may_split(dim) for tensor in tensors)
        for dim in unclamped_dims(layout.op)
    ):
        return None
    return Clamped(shardings=tuple(layout.shardings))


SLICE_FAULTS = (
    Fault(
        name="starts out of range",
        what="is a slice, or an update of one, whose start the program computes and "
        "which may be out of range",
        more="along a split dim, or where XLA may make one slice or update of two",
        ops=(DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE),
        choose=_clamped,
        repair="the start is clamped first",
        smallest={
            "slice_that_starts_out_of_range": Smallest(
                Outcome.WRONG,
                """
                program: sliced(x, i, [4])  on mesh (X=2)
                  with eager=False, differentiable=False
                  x: int32 [6], arrives [_], annotated [X]
                  i: index int32 [1] below 99, arrives [_], annotated None
                  result: [4], annotated [X], leaves [_]
                """,
            ),
            "slice_of_a_slice_that_starts_out_of_range": Smallest(
                Outcome.WRONG,
                """
                program: sliced(x, i, [2])  on mesh (X=2)
                  with eager=False, differentiable=False
                  x: int32 [4], arrives [_], annotated [_]
                  i: index int32 [1] below 99, arrives [_], annotated None
                  result: [2], annotated [_], leaves [X]
                """,
            ),
            "update_that_starts_out_of_range": Smallest(
                Outcome.WRONG,
                """
                program: written(x, y, i)  on mesh (X=2)
                  with eager=False, differentiable=False
                  x: int32 [2], arrives [_], annotated [X]
                  y: int32 [1], arrives [_], annotated None
                  i: index int32 [1] below 99, arrives [_], annotated None
                  result: [2], annotated [X], leaves [_]
                """,
            ),
        },
        links=(
            "https://github.com/openxla/xla/issues/49122",
            "https://github.com/openxla/xla/issues/49118",
            "https://github.com/openxla/xla/issues/49121",
        ),
    ),
    Fault(
        name="steps across shards",
        what="is a slice by steps along a split dim, or the gradient of one, whose "
        "shards are not cut from the same shards of its operand",
        ops=patterns.STEPPED,
        choose=evenly(patterns.steps_across_shards, FactorKind.PARALLEL),
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
        name="slices that cut no shard",
        what="is a slice whose shards have the sizes of its operand's",
        more="XLA confuses the two tensors when it reshards both",
        ops=(patterns.SLICE, patterns.CONCATENATE),
        choose=_kept_apart,
        repair="the slice is a copy, split as its operand is",
        smallest={
            "slice_of_whole_shards_and_its_operand": Smallest(
                Outcome.REFUSED,
                """
                program: [x[0:3], tf.identity(x)]  on mesh (X=2, Y=2)
                  x: int32 [4, 4], arrives [_,_], annotated [X.Y,_]
                  result: [3, 4], annotated [_,X], leaves [_,_]
                  result: [4, 4], annotated [_,X], leaves [_,_]
                """,
            ),
            "roll_of_whole_shards_and_its_operand": Smallest(
                Outcome.WRONG,
                """
                program: [tf.roll(x, 1, 0), tf.identity(x)]  on mesh (X=2, Y=2, Z=2)
                  x: int32 [8, 2], arrives [_,_], annotated [Y.X.Z,_]
                  result: [8, 2], annotated [Z,Y], leaves [_,_]
                  result: [8, 2], annotated [X,Y], leaves [_,_]
                """,
                gspmd=False,
            ),
            "slices_of_whole_shards": Smallest(
                Outcome.WRONG,
                """
                program: [x[0:1], x[1:2]]  on mesh (X=2, Y=2, Z=2)
                  x: int32 [2, 5], arrives [_,_], annotated [Z.Y.X,_]
                  result: [1, 5], annotated [X,Z], leaves [_,_]
                  result: [1, 5], annotated [Z,X.Y], leaves [_,_]
                """,
            ),
        },
    ),
)
