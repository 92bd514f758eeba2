"""Roundings of what a program counts by itself, computed before it is partitioned.

`tf.image.resize` rounds fractions of positions, once for the rows that it reads and
again for their weights. On one device XLA computes both while it compiles. Of a split
dim each device computes its own, in several kernels. Where one of these multiplies and
adds in a single instruction and another does not, a fraction next to a whole number is
rounded to either side, and rows get the weights of others. Constants are the same for
all.
"""

from __future__ import annotations

import math

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stable_hlo import shape_of, walk

_ROUNDINGS = {
    "stablehlo.ceil": np.ceil,
    "stablehlo.floor": np.floor,
    "stablehlo.round_nearest_even": np.rint,
}
# One operation of IEEE 754 each, so that NumPy computes what XLA would.
_ARITHMETIC = {
    **_ROUNDINGS,
    "stablehlo.abs": np.abs,
    "stablehlo.add": np.add,
    "stablehlo.clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "stablehlo.divide": np.divide,
    "stablehlo.maximum": np.maximum,
    "stablehlo.minimum": np.minimum,
    "stablehlo.multiply": np.multiply,
    "stablehlo.negate": np.negative,
    "stablehlo.subtract": np.subtract,
}
_CONVERT = "stablehlo.convert"
_FLOATS = {"f32": np.float32, "f64": np.float64}
_DTYPES = {**_FLOATS, "i32": np.int32, "i64": np.int64}
_MOST = 65536  # Elements of a constant.
_DEEPEST = 100  # Operations one behind the other.


def fold_roundings(module: ir.Module) -> None:
    """Replaces roundings of floats that depend on no argument by constants.

    Of float32 and float64, of few elements, made by the operations above.
    """
    values, folded = _Values(), []
    for op in list(walk(module.operation)):
        if not _rounds(op) or (value := values.of(op.results[0])) is None:
            continue
        with ir.InsertionPoint(op), op.location:
            value = np.ascontiguousarray(value).reshape(value.shape)
            constant = stablehlo.constant(ir.DenseElementsAttr.get(value))
        op.results[0].replace_all_uses_with(constant)
        folded.append(op)
    for op in folded:  # Only now: `values` knows tensors by where they are in memory.
        op.erase()


def _rounds(op) -> bool:
    if op.name == _CONVERT:
        before, after = map(_element, (op.operands[0], op.results[0]))
        return before in _FLOATS and after in _DTYPES and after not in _FLOATS
    return op.name in _ROUNDINGS


def _element(value: ir.Value) -> str:
    return str(ir.RankedTensorType(value.type).element_type)


class _Values:
    """The elements of tensors that depend on no argument, as far as these are few."""

    def __init__(self):
        self._known: dict[ir.Value, np.ndarray | None] = {}
        self._depth = 0

    def of(self, tensor: ir.Value) -> np.ndarray | None:
        """A tensor's elements; None if they are not known, or too many."""
        if tensor not in self._known:
            self._known[tensor] = self._computed(tensor)
        return self._known[tensor]

    def _computed(self, tensor: ir.Value) -> np.ndarray | None:
        op, shape, dtype = tensor.owner, shape_of(tensor), _DTYPES.get(_element(tensor))
        if isinstance(op, ir.Block) or dtype is None or math.prod(shape) > _MOST:
            return None
        if op.name == "stablehlo.constant":
            value = op.attributes["value"]
            is_dense = isinstance(value, ir.DenseElementsAttr)
            return np.array(value) if is_dense else None
        if op.name == "stablehlo.iota":
            dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
            return _spread(np.arange(shape[dim], dtype=dtype), [dim], shape)
        is_float = dtype in _FLOATS.values()
        if not (op.name in _ARITHMETIC and is_float or op.name in _MOVED):
            return None
        if self._depth == _DEEPEST:
            return None
        self._depth += 1
        operands = [self.of(operand) for operand in op.operands]
        self._depth -= 1
        if any(operand is None for operand in operands):
            return None
        with np.errstate(all="ignore"):
            if op.name in _MOVED:
                return _MOVED[op.name](op, *operands, shape, dtype)
            return _ARITHMETIC[op.name](*operands)


def _spread(values: np.ndarray, dims, shape: tuple[int, ...]) -> np.ndarray:
    """Values along some dims of a shape, repeated along its others."""
    ones = [1] * len(shape)
    for dim, size in zip(dims, values.shape, strict=True):
        ones[dim] = size
    return np.broadcast_to(values.reshape(ones), shape)


def _converted(op, values: np.ndarray, shape, dtype) -> np.ndarray | None:
    if np.issubdtype(dtype, np.integer) and np.issubdtype(values.dtype, np.floating):
        # Out of range XLA takes the nearest there is, NumPy anything.
        limits = np.iinfo(dtype)
        inside = (values > float(limits.min)) & (values < float(limits.max))
        if not inside.all():
            return None
    return values.astype(dtype)


_MOVED = {
    "stablehlo.broadcast_in_dim": lambda op, values, shape, dtype: _spread(
        values, list(op.attributes["broadcast_dimensions"]), shape
    ),
    "stablehlo.reshape": lambda op, values, shape, dtype: values.reshape(shape),
    _CONVERT: _converted,
}
