"""Finds the operation of a program that an instruction was before XLA's clean-up.

Before GSPMD completes a program XLA may take dims of 1 out of a product, or move a
reshape that splits a dim past it; or fold an operand's padding into a convolution.
TPU's compiler also removes dims of 1, and names the convolution after the reshape that
did so in the program (conv1d's, which TF makes of conv2d); it splits channels that are
in groups into a dim of groups and a dim of the channels in a group; and it makes a
kernel that is larger than its image the image.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.lowering.sources import program_name
from meshwright.framework.compiler.repair.convolutions.conv_rewrite import (
    convolution_of,
    key_of,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of
from meshwright.framework.sharding.sharding import Sharding

Shape = tuple[int, ...]
Shardings = list[Sharding | None]
"""Shardings of operands and result; None where axes of the mesh cannot express one."""

_ORDERS = (0, 1, 2), (1, 0, 2)  # In the second, image and kernel are exchanged.


def originals(
    ops: Sequence, op_name: str, shapes: Sequence[Shape], shardings: Shardings
) -> Iterator[tuple[ir.Operation, Shardings]]:
    """The operations that a convolution may have been, if any.

    Args:
      ops: the program's convolutions.
      op_name: the name in its HLO metadata.
      shapes: the present shapes of image, kernel and result.
      shardings: the shardings of the same.

    Yields:
      An operation, and the shardings of its operands and its result.
    """
    for op in _alike(ops, op_name, shapes):
        for order in _orders(op, shapes) or _ORDERS[:1]:
            now = [(shardings[i], shapes[i]) for i in order]
            before = key_of(op)[1:]
            pairs = zip(now, before, strict=True)
            yield op, [_as_original(*present, original) for present, original in pairs]


def reshaped(op, shapes: Sequence[Shape], shardings: Shardings) -> Shardings | None:
    """The shardings of an operation's tensors before XLA reshaped them.

    Args:
      op: an operation of the program.
      shapes: the present shapes of its operands and results.
      shardings: the shardings of the same.

    Returns:
      The shardings of the original tensors, None for a tensor that was split within a
      dim; or None, if the reshapes do more than split dims or remove dims of 1.
    """
    before = [shape_of(value) for value in (*op.operands, *op.results)]
    if len(shapes) != len(before) or not _same_sizes(shapes, before):
        return None
    return list(map(_as_original, shardings, shapes, before))


def _alike(ops: Sequence, op_name: str, shapes: Sequence[Shape]) -> list:
    # XLA joins the names of ops that it merges; the last is the innermost.
    names = [program_name(part) for part in reversed(op_name.split(";"))]
    fitting = []
    for op in ops:
        name, *before = key_of(op)
        if name in names and tuple(before) == tuple(shapes):
            return [op]
        if _same_sizes(shapes[-1:], before[-1:]):
            fitting.append((name, bool(_orders(op, shapes)), op))
    scopes = {_scope(name) for name in names}
    for matches in (
        [candidate for candidate in fitting if candidate[0] in names],
        [
            candidate
            for candidate in fitting
            if {candidate[0], _scope(candidate[0])} & scopes
        ],
        [candidate for candidate in fitting if candidate[1]],
    ):
        if matches:
            sure = [op for _, same_operands, op in matches if same_operands]
            return sure or [op for *_, op in matches]
    return []


def _orders(op, shapes: Sequence[Shape]) -> list[tuple[int, int, int]]:
    """The orders in which operands and result have the sizes of an operation."""
    conv = convolution_of(op)
    image, kernel = (
        math.prod(shape[dim] for dim in dims)
        for shape, dims in ((conv.lhs, conv.lhs_window), (conv.rhs, conv.rhs_window))
    )
    return [
        order
        for order in _ORDERS[: 2 if kernel > image else 1]
        if _same_sizes([shapes[i] for i in order], key_of(op)[1:])
    ]


def _scope(name: str) -> str:
    return name.rpartition("/")[0]


def _same_sizes(shapes: Sequence[Shape], originals: Sequence[Shape]) -> bool:
    for shape, original in zip(shapes, originals, strict=True):
        parts = _parts(shape, original)
        if parts is None:
            return False
        sizes = (math.prod(shape[dim] for dim in dims) for dims in parts)
        if tuple(sizes) != original:
            return False
    return True


def _parts(shape: Shape, original: Shape) -> list[list[int]] | None:
    """For each dim of the original tensor, the dims that it is made of now."""
    if len(shape) == len(original):
        return [[dim] for dim in range(len(shape))]
    left = [dim for dim, size in enumerate(shape) if size > 1]
    if len(left) == sum(size > 1 for size in original):  # Perhaps of other sizes.
        return [[left.pop(0)] if size > 1 else [] for size in original]
    parts = []
    for size in original:
        taken: list[int] = []
        while left and math.prod(shape[dim] for dim in taken) < size:
            taken.append(left.pop(0))
        if math.prod(shape[dim] for dim in taken) != size:
            return None
        parts.append(taken)
    return parts


def _as_original(
    sharding: Sharding | None, shape: Shape, original: Shape
) -> Sharding | None:
    """A tensor's sharding before the clean-up; dims of 1 come back unsharded."""
    parts = _parts(shape, original)
    if sharding is None or parts is None:
        return None
    splits = sharding.splits()
    # A split dim must still be a dim, or the outer part of a dim.
    if any(
        splits[dim] > 1 and not any(dims[:1] == [dim] for dims in parts)
        for dim in range(len(shape))
    ):
        return None
    dims = tuple(sharding.dims[dims[0]] if dims else () for dims in parts)
    return dataclasses.replace(sharding, dims=dims)
