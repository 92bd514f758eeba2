"""Linear ops on partial sums, computed part by part."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    dot_dims,
    element_type,
    integers,
    keep_precision,
    shape_of,
    short_name,
    tensor_type,
)

Lead = tuple[int, ...]
"""Sizes of the leading dims."""


def part_by_part(
    op: ir.Operation, lead: Lead, parts: Mapping[int, ir.Value]
) -> ir.Value:
    """The result of an op with leading dims, at the current insertion point.

    Args:
      op: the op, linear in its unreduced operands.
      lead: sizes of the leading dims.
      parts: its unreduced operands by number, with leading dims.
    """
    return _BUILDERS.get(short_name(op), _elementwise)(op, lead, parts)


def widened(value: ir.Value, lead: Lead) -> ir.Value:
    """A tensor repeated along leading dims, at the current insertion point."""
    shape = shape_of(value)
    dims = [len(lead) + dim for dim in range(len(shape))]
    type_ = tensor_type(value.type, (*lead, *shape))
    return stablehlo.broadcast_in_dim(type_, value, ir.DenseI64ArrayAttr.get(dims))


def _shifted(dims: Sequence[int], lead: Lead) -> list[int]:
    return [len(lead) + dim for dim in dims]


def _filled(numbers: Sequence[int], lead: Lead, number: int = 0) -> list[int]:
    return [*[number] * len(lead), *numbers]


# By attribute its numbers with those of leading dims.
_LED = {
    "broadcast_dimensions": lambda n, lead: [*range(len(lead)), *_shifted(n, lead)],
    "dimensions": _shifted,
    "edge_padding_high": _filled,
    "edge_padding_low": _filled,
    "interior_padding": _filled,
    "limit_indices": lambda n, lead: [*lead, *n],
    "permutation": lambda n, lead: [*range(len(lead)), *_shifted(n, lead)],
    "slice_sizes": lambda n, lead: [*lead, *n],
    "start_indices": _filled,
    "strides": functools.partial(_filled, number=1),
}


def _clone(op, lead: Lead, operands: Mapping[int, ir.Value]) -> ir.Operation:
    """A copy of an op at the insertion point, with leading dims in its result.

    Attributes that list numbers have those of the leading dims too.
    """
    copy = op.clone(ir.InsertionPoint.current)
    for number, value in operands.items():
        copy.operands[number] = value
    result = op.results[0]
    copy.results[0].set_type(tensor_type(result.type, (*lead, *shape_of(result))))
    for name, led in _LED.items():
        if name in op.attributes:
            numbers = led(integers(op, name), lead)
            copy.attributes[name] = ir.DenseI64ArrayAttr.get(numbers)
    return copy


def _elementwise(op, lead: Lead, parts) -> ir.Value:
    operands = dict(parts)
    for number, value in enumerate(op.operands):
        one_for_all = short_name(op) == "select" and not shape_of(value)
        if number not in parts and not one_for_all:
            operands[number] = widened(value, lead)
    return _clone(op, lead, operands).results[0]


def _of_dims(op, lead: Lead, parts) -> ir.Value:
    """An op that says what to do with each dim; its other operands stay as they are."""
    return _clone(op, lead, parts).results[0]


def _of_one_dim(op, lead: Lead, parts) -> ir.Value:
    copy, name = _clone(op, lead, parts), "dimension"
    dim = ir.IntegerAttr(op.attributes[name])
    copy.attributes[name] = ir.IntegerAttr.get(dim.type, dim.value + len(lead))
    return copy.results[0]


def _starts(op, first: int, lead: Lead) -> list[ir.Value]:
    starts = list(op.operands)[first:]
    zero = ir.IntegerAttr.get(element_type(starts[0]), 0)
    zero = stablehlo.constant(ir.DenseElementsAttr.get_splat(starts[0].type, zero))
    return [zero] * len(lead) + starts


def _dynamic_slice(op, lead: Lead, parts) -> ir.Value:
    sizes = [*lead, *integers(op, "slice_sizes")]
    return stablehlo.DynamicSliceOp(parts[0], _starts(op, 1, lead), sizes).result


def _update_slice(op, lead: Lead, parts) -> ir.Value:
    starts = _starts(op, 2, lead)
    return stablehlo.DynamicUpdateSliceOp(parts[0], parts[1], starts).result


def _dot(op, lead: Lead, parts) -> ir.Value:
    """The leading dims are free dims of the unreduced operand, and come first again."""
    (side,) = parts
    more = len(lead)
    # What a loop carries has its leading dims already.
    ranks = [len(shape_of(operand)) for operand in op.operands]
    ranks[side] = len(shape_of(parts[side])) - more
    batch, contracting = dot_dims(op, ranks[0])
    for dims in (batch, contracting):
        dims[side] = [dim + more for dim in dims[side]]
    operands = [parts.get(i, operand) for i, operand in enumerate(op.operands)]
    free = ranks[0] - len(batch[0]) - len(contracting[0])
    place = len(batch[0]) + (free if side == 1 else 0)
    shape = list(shape_of(op.results[0]))
    shape[place:place] = lead
    product = stablehlo.dot_general(
        tensor_type(op.results[0].type, shape),
        *operands,
        stablehlo.DotDimensionNumbers.get(*batch, *contracting),
    )
    keep_precision(op, product)
    return _first(product, place, more)


def _first(value: ir.Value, place: int, count: int) -> ir.Value:
    """A tensor with its `count` dims from `place` on moved to the front."""
    if not place:
        return value
    moved = range(place, place + count)
    rest = [dim for dim in range(len(shape_of(value))) if dim not in moved]
    return stablehlo.transpose(value, ir.DenseI64ArrayAttr.get([*moved, *rest]))


def _gather(op, lead: Lead, parts) -> ir.Value:
    """Gathers the same rows of each part: slices span the leading dims."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    copy = _clone(op, lead, parts)
    copy.attributes["dimension_numbers"] = stablehlo.GatherDimensionNumbers.get(
        [*range(len(lead)), *_shifted(numbers.offset_dims, lead)],
        _shifted(numbers.collapsed_slice_dims, lead),
        _shifted(numbers.operand_batching_dims, lead),
        list(numbers.start_indices_batching_dims),
        _shifted(numbers.start_index_map, lead),
        numbers.index_vector_dim,
    )
    return copy.results[0]


def _scatter(op, lead: Lead, parts) -> ir.Value:
    name = "scatter_dimension_numbers"
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes[name])
    copy = _clone(op, lead, parts)
    copy.attributes[name] = stablehlo.ScatterDimensionNumbers.get(
        [*range(len(lead)), *_shifted(numbers.update_window_dims, lead)],
        _shifted(numbers.inserted_window_dims, lead),
        _shifted(numbers.input_batching_dims, lead),
        list(numbers.scatter_indices_batching_dims),
        _shifted(numbers.scattered_dims_to_operand_dims, lead),
        numbers.index_vector_dim,
    )
    return copy.results[0]


def _convolution(op, lead: Lead, parts) -> ir.Value:
    """Parts of an image join its batch, parts of a kernel its output channels."""
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    (side,) = parts
    merged_dim, out = (
        (numbers.input_batch_dimension, numbers.output_batch_dimension),
        (numbers.kernel_output_feature_dimension, numbers.output_feature_dimension),
    )[side]
    count, shape = math.prod(lead), list(shape_of(op.results[0]))
    copy = op.clone(ir.InsertionPoint.current)
    with ir.InsertionPoint(copy):
        copy.operands[side] = _merged(parts[side], len(lead), merged_dim)
    merged_shape = list(shape)
    merged_shape[out] *= count
    copy.results[0].set_type(tensor_type(op.results[0].type, merged_shape))
    shape[out:out] = lead
    apart = stablehlo.reshape(tensor_type(op.results[0].type, shape), copy.results[0])
    return _first(apart, out, len(lead))


def _merged(value: ir.Value, count: int, dim: int) -> ir.Value:
    """A tensor whose first `count` dims become the major part of another dim."""
    rest = list(range(count, len(shape_of(value))))
    order = [*rest[:dim], *range(count), *rest[dim:]]
    value = stablehlo.transpose(value, ir.DenseI64ArrayAttr.get(order))
    shape = list(shape_of(value))
    shape[dim : dim + count + 1] = [math.prod(shape[dim : dim + count + 1])]
    return stablehlo.reshape(tensor_type(value.type, shape), value)


_BUILDERS = {
    "broadcast_in_dim": _of_dims,
    "concatenate": _of_one_dim,
    "convolution": _convolution,
    "dot": _dot,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    "pad": _of_dims,
    "reduce": _of_dims,
    "reshape": _of_dims,
    "reverse": _of_dims,
    "scatter": _scatter,
    "set_dimension_size": _of_one_dim,
    "slice": _of_dims,
    "transpose": _of_dims,
}
