"""The layouts in which XLA's partitioner gets an operation wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.halos.windows import (
    REDUCE_WINDOW,
    split_windows,
)
from meshwright.framework.compiler.repair.op_layout import (
    OpLayout,
    Tensor,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    OUT_OF_MANUAL,
    PREFIX,
    call_target,
    element_type,
    is_annotation,
    reduced_dims,
    shape_of,
)
from meshwright.framework.sharding.mesh import DeviceMesh

SLICE, CONCATENATE = "stablehlo.slice", "stablehlo.concatenate"
_SHARDY_ANNOTATIONS = ("sdy.sharding_constraint", "sdy.reshard")
STEPPED = ("stablehlo.pad", SLICE)
PRODUCTS = ("stablehlo.dot_general", "stablehlo.dot")
GATHER, SCATTER = "stablehlo.gather", "stablehlo.scatter"
FOURIER, RESHAPE = "stablehlo.fft", "stablehlo.reshape"
REDUCE = "stablehlo.reduce"
# The functions that collectives of every backend have; the latter of booleans only.
_COLLECTIVES = {f"stablehlo.{n}" for n in ("add", "multiply", "maximum", "minimum")}
_OF_FLAGS = {"stablehlo.and", "stablehlo.or"}


def stepped_dims(op) -> list[int]:
    """The dims that a slice takes by steps, or that a pad puts padding into."""
    if op.name == "stablehlo.pad":
        return [d for d, n in enumerate(op.attributes["interior_padding"]) if n > 0]
    return [d for d, n in enumerate(op.attributes["strides"]) if n > 1]


def steps_across_shards(layout: OpLayout) -> bool:
    """A slice by steps, or its gradient's padding between elements, not shard by shard.

    Along a split dim of steps each shard of the shorter tensor has to be cut from the
    same shard of the longer tensor. Other dims that change have to be even.
    """
    stepped = stepped_dims(layout.op)
    split = [d for d in range(len(layout.results[0].shape)) if _is_split(layout, d)]
    return any(d in stepped for d in split) and any(
        not _steps_in_shards(layout, d) if d in stepped else _is_cut_unevenly(layout, d)
        for d in split
    )


def _steps_in_shards(layout: OpLayout, dim: int) -> bool:
    """Whether each shard of a dim of steps is made of the same shard alone."""
    operand, result = layout.operands[0], layout.results[0]
    shards = {tensor.sharding and tensor.axes(dim) for tensor in (operand, result)}
    if len(shards) > 1 or not (operand.divides(dim) and result.divides(dim)):
        return False
    if layout.op.name == "stablehlo.pad":
        step = layout.op.attributes["interior_padding"][dim] + 1
        start = layout.op.attributes["edge_padding_low"][dim]
        short, long = operand, result
    else:
        step = layout.op.attributes["strides"][dim]
        start = layout.op.attributes["start_indices"][dim]
        short, long = result, operand
    return short.shape[dim] * step == long.shape[dim] and 0 <= start < step


def _is_cut_unevenly(layout: OpLayout, dim: int) -> bool:
    operand, result = layout.operands[0], layout.results[0]
    return operand.shape[dim] != result.shape[dim] and not (
        operand.divides(dim) and result.divides(dim)
    )


def _is_split(layout: OpLayout, dim: int) -> bool:
    """Whether a dim of the operand and of the result is split, or may be."""
    return any(t.may_split(dim) for t in (layout.operands[0], layout.results[0]))


def may_cut_no_shard(op) -> bool:
    """A slice that takes the first elements along the dims that it cuts.

    An annotated slice is left out if it is of an argument, an annotation or a manual
    region's result that nothing else reads, such as arguments that arrive padded: it is
    a copy, and there is nothing to confuse. Other tensors XLA may find to be copies of
    a tensor that is read elsewhere.
    """
    (operand,), (result,) = op.operands, op.results
    origin, readers = _origin(operand), _readers(result)
    is_alone = _is_apart(origin.owner) and len(_readers(origin)) == 1
    is_copy = is_alone and all(map(_is_annotation, readers))
    return (
        shape_of(operand) != shape_of(result)
        and not any(op.attributes["start_indices"])
        and set(op.attributes["strides"]) <= {1}
        and not (len(readers) == 1 and is_copy)
    )


def _is_apart(maker) -> bool:
    """Whether XLA cannot find a value to be a copy of another, given its maker."""
    return (
        isinstance(maker, ir.Block)
        or _is_annotation(maker)
        or call_target(maker) == PREFIX + OUT_OF_MANUAL
    )


def is_roll(op) -> bool:
    """Whether an op puts the first part of a tensor after the other part."""
    if op.name != CONCATENATE or len(op.operands) != 2:
        return False
    makers = _makers(op)
    if any(isinstance(m, ir.Block) or m.name != SLICE for m in makers):
        return False
    if any(set(maker.attributes["strides"]) > {1} for maker in makers):
        return False
    last, first = (list(maker.attributes["start_indices"]) for maker in makers)
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    return (
        makers[0].operands[0] == makers[1].operands[0]
        and shape_of(op.results[0]) == shape_of(makers[0].operands[0])
        and not any(first)
        and last[dim] == shape_of(op.operands[1])[dim]
    )


def _makers(op) -> list:
    """The ops that make an op's operands, or the blocks that they are arguments of."""
    return [_origin(operand).owner for operand in op.operands]


def is_of_roll(op) -> bool:
    """Whether an op is a roll, or a part of a roll."""
    return _roll_of(op) is not None


def _roll_of(op):
    """The roll that an op is, or is a part of; None if there is none."""
    if op.name == SLICE:
        readers = _readers(op.results[0])
        if len(readers) != 1:
            return None
        (op,) = readers
    return op if is_roll(op) else None


def rolls_apart(layout: OpLayout) -> bool:
    """A roll or its part that reshards, so that XLA does not recognize the roll.

    It is left alone if nothing else reads the tensor that is rolled.
    """
    shardings = layout.shardings
    if layout.is_replaced or _is_read_by_roll_alone(_roll_of(layout.op)):
        return False
    return None in shardings or any(s != shardings[0] for s in shardings)


def _is_read_by_roll_alone(roll) -> bool:
    """Whether only a roll's two parts read its tensor, or a copy of the tensor.

    This is unknown for a roll in which something has been annotated since (None).
    """
    if roll is None:
        return False
    origin = _origin(_makers(roll)[0].operands[0])
    return _is_apart(origin.owner) and len(_readers(origin)) == 2


def _readers(value) -> list:
    """The ops that read a value, past reshapes to the same shape, which TF makes."""
    return [
        reader
        for use in value.uses
        for reader in (
            _readers(use.owner.results[0]) if _is_no_op(use.owner) else [use.owner]
        )
    ]


def _origin(value):
    """A value before reshapes to the same shape, which TF makes."""
    while not isinstance(value.owner, ir.Block) and _is_no_op(value.owner):
        value = value.owner.operands[0]
    return value


def _is_no_op(op) -> bool:
    return op.name == "stablehlo.reshape" and (
        shape_of(op.operands[0]) == shape_of(op.results[0])
    )


def _is_annotation(op) -> bool:
    """Whether an op is an annotation, for either partitioner; Shardy reshards by it."""
    return op.name in _SHARDY_ANNOTATIONS or is_annotation(op.operation)


def cuts_no_shard(layout: OpLayout) -> bool:
    """A slice whose shards have the sizes of its operand's, as `x[:-1]` of a split dim.

    There is nothing to do, so XLA has one instruction for both, and confuses the
    resharded copies of the two; but not in a roll that is sharded like its tensor.
    """
    operand, result = layout.operands[0], layout.results[0]
    if not may_cut_no_shard(layout.op) or layout.is_replaced:
        return False
    if is_of_roll(layout.op) and not rolls_apart(layout):
        return False
    return has_equal_shards(layout, operand, result)


def has_equal_shards(layout: OpLayout, first: Tensor, second: Tensor) -> bool:
    """Whether shards of two tensors have equal sizes, in one of the op's shardings."""
    return None in layout.shardings or any(
        sharding.shard_shape(first.shape) == sharding.shard_shape(second.shape)
        for sharding in layout.shardings
    )


def split_transform(layout: OpLayout) -> bool:
    """A Fourier transform along several dims, one of which is split.

    Or a transform along one dim, the last of three or more, that all devices split. XLA
    has a separate method for these, which is right for complex64 where operand and
    result are split alike, in the order of the devices, into shards whose size the
    number of devices divides. It does not use it for inverses, nor for real numbers.
    """
    rank, count = len(layout.results[0].shape), len(layout.op.attributes["fft_length"])
    if count == 1:
        return rank > 2 and _is_transformed_in_shards(layout, rank - 1)
    return any(
        tensor.may_split(dim)
        for tensor in layout.tensors
        for dim in range(rank - count, rank)
    )


def _is_transformed_in_shards(layout: OpLayout, dim: int) -> bool:
    """Whether XLA transforms a dim by its separate method, and may be wrong."""
    (operand,), (result,) = layout.operands, layout.results
    sizes = layout.mesh.axes_size
    devices = layout.mesh.size // sizes(layout.manual)
    kind = stablehlo.FftTypeAttr(layout.op.attributes["fft_type"]).value
    if kind != "FFT" or devices == 1:
        return False
    if None in layout.shardings:
        return True
    axes = operand.axes(dim)
    if sizes(axes) != devices:
        return sizes(result.axes(dim)) == devices
    return (
        operand.itemsize > 8  # complex128, by factors of complex64
        or operand.shape[dim] % devices**2 != 0
        or axes != result.axes(dim)
        or not is_in_order(layout.mesh, axes)
    )


def shrunk_dims(
    before: tuple[int, ...], after: tuple[int, ...]
) -> list[tuple[int, int]]:
    """The dims that a reshape to fewer dims makes shorter, or that have one element.

    Each comes with the result's dim that begins at the same element and divides it.
    """
    if len(before) <= len(after) or math.prod(before) < 2:
        return []
    return [
        (i, j)
        for i, size in enumerate(before)
        for j, part in enumerate(after)
        if math.prod(before[:i]) == math.prod(after[:j])
        and size % part == 0
        and (size > part or size == 1)
    ]


def merges_after_one(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a reshape merges dims, and a dim of size 1 comes before them."""
    merged = [n for n in before if n > 1] != [n for n in after if n > 1]
    return merged and len(before) > len(after) and 1 in before[:-2]


def reshaped(op):
    """The operand of a reshape once XLA has merged the reshapes before it.

    Transposes that move only dims of size 1 are reshapes too.
    """
    (value,) = op.operands
    while not isinstance(value.owner, ir.Block) and (
        value.owner.name == RESHAPE or _moves_ones(value.owner)
    ):
        value = value.owner.operands[0]
    return value


def _moves_ones(op) -> bool:
    """Whether an op is a transpose that keeps the order of all dims larger than 1."""
    if op.name != "stablehlo.transpose":
        return False
    shape = shape_of(op.operands[0])
    kept = [dim for dim in op.attributes["permutation"] if shape[dim] > 1]
    return kept == sorted(kept)


def shrinks_unevenly(layout: OpLayout) -> bool:
    """A reshape that XLA gets wrong with the shardings of its operand and its result.

    XLA merges it with reshapes before it, but not past an annotation or a pin, and
    GSPMD is examined after that: reshapes that it merged wrongly have no known layout.
    """
    if layout.is_replaced:
        return False
    return None in layout.shardings or is_shrunk_unevenly(*layout.tensors)


def is_shrunk_unevenly(operand: Tensor, result: Tensor) -> bool:
    """Whether fewer dims make a split dim shorter, in unequal shards.

    XLA describes its exchange of rows by a window with a dim for each of the result's,
    and reads a dim for each of the operand's: beyond the end. It may first split the
    result as the operand is split, even where the dim is not to be split.
    """
    return _recurses(operand, result) or any(
        operand.may_split(i)
        and not (operand.shape[i] > 1 and _goes_elsewhere(operand, result, j))
        # In shards of equal size XLA reshapes shard by shard.
        and not (
            operand.divides(i, result.shape[j])
            and (result.divides(j) or not result.may_split(j))
        )
        for i, j in shrunk_dims(operand.shape, result.shape)
    )


def _recurses(operand: Tensor, result: Tensor) -> bool:
    """Whether a dim of size 1 is split, and a later dim in unequal shards.

    Where a split dim is made of the later dim and others, XLA's rule for reshapes may
    call itself until the stack is full.
    """
    split = [i for i in range(len(operand.shape)) if operand.may_split(i)]
    first = next((i for i in split if operand.shape[i] == 1), len(operand.shape))
    return (
        merges_after_one(operand.shape, result.shape)
        and any(map(result.may_split, range(len(result.shape))))
        and any(
            i > first and operand.shape[i] > 1 and not operand.divides(i) for i in split
        )
    )


def _goes_elsewhere(operand: Tensor, result: Tensor, dim: int) -> bool:
    """Whether a dim of the result has a single element, and no shards go there."""
    return operand.is_even and result.shape[dim] == 1 and not result.may_split(dim)


def overlapping_windows(layout: OpLayout) -> bool:
    """A max pool's gradient whose windows overlap along a split dim."""
    return any(window.size > window.stride for window, _ in split_windows(layout))


def far_halos(layout: OpLayout) -> bool:
    """Windows by strides along split dims that reach beyond neighbours.

    Windows of a convolution along a single dim, its image not dilated, were not seen to
    go wrong.
    """
    split = split_windows(layout)
    dilated = any(w.base_dilation > 1 for w, _ in split)
    several = len(split) > 1 or layout.op.name == REDUCE_WINDOW
    at_risk = dilated or (several and any(w.stride > 1 for w, _ in split))
    return at_risk and any(w.is_far(n) for w, n in split)


def windows_of_padding(layout: OpLayout) -> bool:
    """Strided windows along a split dim that begin in padding alone, or have holes.

    Or that begin inside a dilated image.
    """
    return any(
        (w.low - (w.size - 1) > 0 and (w.low - (w.size - 1)) % w.stride)
        or (w.base_dilation > 1 and w.low < 0)
        or (w.stride > 1 and w.dilation > 1)
        for w, _ in split_windows(layout)
    )


def shifted_windows(layout: OpLayout) -> bool:
    """Windows of which a device reads as many rows as its shard has, but other rows.

    If only the result is split, or by other axes, each device takes its shard's rows.
    """
    image, out = layout.operands[0], layout.results[0]
    return any(
        w.low != 0
        and w.rows_read(shards) == -(-w.image // shards)
        and image.axes(w.dim) != out.axes(w.out_dim)
        for w, shards in split_windows(layout)
    )


def is_in_order(mesh: DeviceMesh, axes: Iterable[str]) -> bool:
    """Whether axes that split a dim are in the order of the mesh's axes."""
    strides = [mesh.stride(axis) for axis in axes]
    return strides == sorted(strides, reverse=True)


def combines_otherwise(op) -> bool:
    """Whether XLA reduces one tensor, by a function that no collective has.

    XLA drops tensors that no result in use depends on. If several are left, it gathers
    what each device has reduced, and reduces that; else it needs a collective.
    """
    (block,) = op.regions[0].blocks
    *inner, end = (each.operation for each in block.operations)
    count = len(op.results)
    # The tensors that each value of the function depends on.
    read = {argument: {i % count} for i, argument in enumerate(block.arguments)}
    for each in inner:
        of = set().union(*(read.get(value, ()) for value in each.operands))
        read |= dict.fromkeys(each.results, of)
    used = [i for i, result in enumerate(op.results) if any(True for _ in result.uses)]
    if len({*used, *(tensor for i in used for tensor in read[end.operands[i]])}) != 1:
        return False
    (tensor,) = used
    last = end.operands[tensor].owner
    is_flag = element_type(op.results[tensor]) == ir.IntegerType.get_signless(1)
    common = _COLLECTIVES | _OF_FLAGS if is_flag else _COLLECTIVES
    pair = {block.arguments[tensor], block.arguments[tensor + count]}
    return last not in inner or last.name not in common or set(last.operands) != pair


def reduced_across_shards(layout: OpLayout) -> bool:
    """A reduction along a split dim, by a function that collectives do not have."""
    return combines_otherwise(layout.op) and any(
        tensor.may_split(dim)
        for tensor in layout.operands
        for dim in reduced_dims(layout.op)
        if tensor.shape
    )
