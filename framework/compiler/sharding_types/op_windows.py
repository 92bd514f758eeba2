"""How dims correspond in ops that read or write slices, and in windows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.sharding_types.combine import HALO, Labels, OpDims
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    adds,
    integers,
    shape_of,
)


def _but(value: ir.Value, touched: Collection[int]) -> Labels:
    """Labels of a value's dims; the touched ones are unsharded."""
    return tuple(None if d in touched else d for d in range(len(shape_of(value))))


def _resized(op) -> list[int]:
    """The dims that are longer or shorter in the result than in the first operand."""
    pairs = zip(shape_of(op.operands[0]), shape_of(op.results[0]), strict=True)
    return [dim for dim, (size, new) in enumerate(pairs) if size != new]


def _sliced(op) -> OpDims:
    """A slice, with starts that the program computes or that are constant."""
    touched = _resized(op)
    numbers = len(op.operands) - 1
    return OpDims(
        operands=[_but(op.operands[0], touched), *[()] * numbers],
        results=[_but(op.results[0], touched)],
        moves=True,
    )


def _update(op) -> OpDims:
    stack, part, *numbers = op.operands
    pairs = zip(shape_of(stack), shape_of(part), strict=True)
    touched = [dim for dim, (size, new) in enumerate(pairs) if size != new]
    labels = _but(stack, touched)
    return OpDims(
        operands=[labels, labels, *[()] * len(numbers)],
        results=[labels],
        moves=True,
    )


def _pad(op) -> OpDims:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    padded = zip(*(integers(op, name) for name in names), strict=True)
    labels = _but(op.operands[0], [d for d, by in enumerate(padded) if any(by)])
    return OpDims(operands=[labels, ()], results=[labels])


def _concatenate(op) -> OpDims:
    labels = _but(op.results[0], [ir.IntegerAttr(op.attributes["dimension"]).value])
    count = len(op.operands)
    return OpDims(
        operands=[labels] * count,
        results=[labels],
        moves=True,
    )


def _reverse(op) -> OpDims:
    labels = _but(op.results[0], integers(op, "dimensions"))
    return OpDims(operands=[labels], results=[labels], moves=True)


def _gather(op) -> OpDims:
    """Rows of a table: split as the indices are, and inside a row as the table is."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    table, rank = shape_of(op.operands[0]), len(shape_of(op.results[0]))
    sizes = integers(op, "slice_sizes")
    offsets = list(numbers.offset_dims)
    places = [dim for dim in range(rank) if dim not in offsets]
    indices = _with_vector(places, numbers.index_vector_dim, op.operands[1])
    dropped = [*numbers.collapsed_slice_dims, *numbers.operand_batching_dims]
    left: list[int | None] = [None] * len(table)
    result: list[int | None] = list(range(rank))
    inside = [dim for dim in range(len(table)) if dim not in dropped]
    for dim, out in zip(inside, offsets, strict=True):
        if sizes[dim] == table[dim]:
            left[dim] = out
        else:
            result[out] = None
    for dim, at in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        left[dim] = indices[at]
    return OpDims(
        operands=[tuple(left), indices],
        results=[tuple(result)],
        moves=True,
    )


def _scatter(op) -> OpDims:
    """Updates of rows: several updates of a row are added up, or the last one wins."""
    if len(op.operands) != 3:
        return whole_dims(op)
    numbers = stablehlo.ScatterDimensionNumbers(
        op.attributes["scatter_dimension_numbers"]
    )
    table, update = shape_of(op.operands[0]), shape_of(op.operands[2])
    windows = list(numbers.update_window_dims)
    places = [dim for dim in range(len(update)) if dim not in windows]
    labels: list[int | None] = list(range(len(update)))
    left: list[int | None] = [None] * len(table)
    batching = list(numbers.input_batching_dims)
    inside = [
        dim
        for dim in range(len(table))
        if dim not in (*numbers.inserted_window_dims, *batching)
    ]
    for dim, out in zip(inside, windows, strict=True):
        if update[out] == table[dim]:
            left[dim] = out
        else:
            labels[out] = None
    indices = _with_vector(places, numbers.index_vector_dim, op.operands[1])
    for dim, at in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        left[dim] = indices[at]
    if not adds(op):  # Only one device would know the last update.
        kept = [label if label in left else None for label in labels]
        indices = tuple(label if label in left else None for label in indices)
        labels = kept
    return OpDims(
        operands=[tuple(left), indices, tuple(labels)],
        results=[tuple(left)],
    )


def _with_vector(places: Sequence[int], vector: int, indices: ir.Value) -> Labels:
    """Labels of the dims of indices; one dim may hold an index's components."""
    labels: list[int | None] = list(places)
    if vector < len(shape_of(indices)):
        labels.insert(vector, None)
    return tuple(labels)


def whole_dims(op) -> OpDims:
    """The dims of an op that needs all of its operands unsharded."""
    return OpDims(
        operands=[(None,) * len(shape_of(value)) for value in op.operands],
        results=[(None,) * len(shape_of(value)) for value in op.results],
    )


def _windows(op) -> OpDims:
    """Poolings and their gradients, with a halo in dims in which the window moves."""
    sizes = integers(op, "window_dimensions")
    strides = [1] * len(sizes)
    if "window_strides" in op.attributes:
        strides = integers(op, "window_strides")
    pairs = zip(sizes, strides, strict=True)
    moved = [dim for dim, pair in enumerate(pairs) if pair != (1, 1)]
    labels = tuple(range(len(sizes)))
    count = len(op.results)
    tensors = sum(1 for value in op.operands if shape_of(value))
    return OpDims(
        operands=[labels] * tensors + [()] * (len(op.operands) - tensors),
        results=[_but(op.results[0], moved)] * count,
        kinds=dict.fromkeys(moved, HALO),
    )


WINDOW_RULES = {
    "concatenate": _concatenate,
    "dynamic_slice": _sliced,
    "dynamic_update_slice": _update,
    "gather": _gather,
    "pad": _pad,
    "reduce_window": _windows,
    "reverse": _reverse,
    "scatter": _scatter,
    "select_and_scatter": _windows,
    "slice": _sliced,
}
