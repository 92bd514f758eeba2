"""Tensors of a program that depend on no argument, computed before it is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    element_type,
    integers,
    shape_of,
)

FLOATS = {"f32": np.float32, "f64": np.float64}
INTEGERS = {"i32": np.int32, "i64": np.int64}
_DTYPES = {**FLOATS, **INTEGERS, "i1": np.bool_}
_MOST = 65536  # Elements of a tensor.
_DEEPEST = 100  # Operations in a chain.

# Single operations of IEEE 754, or exact, so that NumPy computes what XLA would.
_ARITHMETIC: dict[str, Callable] = {
    "abs": np.abs,
    "add": np.add,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "select": np.where,
    "subtract": np.subtract,
}
_OF_FLOATS = {
    "ceil": np.ceil,
    "divide": np.divide,
    "floor": np.floor,
    "round_nearest_even": np.rint,
}
# Integer division rounds towards zero; by zero its result is up to XLA.
_OF_OTHERS = {
    "and": np.bitwise_and,
    "divide": lambda a, b: None if 0 in b else (a - np.fmod(a, b)) // b,
    "remainder": lambda a, b: None if 0 in b else np.fmod(a, b),
}
_COMPARED = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


class KnownValues:
    """The elements of tensors that depend on no argument, if these are few.

    Tensors at the end of a chain of over a hundred operations are not known either.
    Tensors are identified by their address, so any that was looked up must stay in the
    module.
    """

    def __init__(self):
        self._known: dict[ir.Value, np.ndarray | None] = {}
        self._depth = 0

    def of(self, tensor: ir.Value) -> np.ndarray | None:
        """A tensor's elements; None if they are not known, or too many."""
        if tensor not in self._known:
            self._known[tensor] = self._computed(tensor)
        return self._known[tensor]

    def _computed(self, tensor: ir.Value) -> np.ndarray | None:
        op, shape = tensor.owner, shape_of(tensor)
        dtype = _DTYPES.get(str(element_type(tensor)))
        if isinstance(op, ir.Block) or dtype is None or math.prod(shape) > _MOST:
            return None
        name = op.name.rpartition(".")[2]  # Shardy has constants of its own.
        if name == "constant":
            return _elements(op.attributes["value"], shape, dtype)
        if name == "iota":
            dim = _dim(op, "iota_dimension")
            return _spread(np.arange(shape[dim], dtype=dtype), [dim], shape)
        if name not in _MOVED and name not in _computations(dtype):
            return None
        operands = self._of_all(op.operands)
        if operands is None:
            return None
        with np.errstate(all="ignore"):
            if name in _MOVED:
                return _MOVED[name](op, operands, shape, dtype)
            return _computations(dtype)[name](*operands)

    def _of_all(self, tensors) -> list[np.ndarray] | None:
        if self._depth == _DEEPEST:
            return None
        self._depth += 1
        values = [self.of(tensor) for tensor in tensors]
        self._depth -= 1
        return None if any(value is None for value in values) else values


def _computations(dtype) -> dict[str, Callable]:
    return _ARITHMETIC | (_OF_FLOATS if dtype in FLOATS.values() else _OF_OTHERS)


def _elements(value: ir.Attribute, shape, dtype) -> np.ndarray | None:
    if not isinstance(value, ir.DenseElementsAttr):
        return None
    if value.is_splat:
        return np.full(shape, value.get_splat_value().value, dtype)
    return np.array(value, dtype).reshape(shape)


def _dim(op, name: str) -> int:
    return ir.IntegerAttr(op.attributes[name]).value


def _spread(values: np.ndarray, dims, shape: tuple[int, ...]) -> np.ndarray:
    """Values along some dims of a shape, repeated along its others."""
    ones = [1] * len(shape)
    for dim, size in zip(dims, values.shape, strict=True):
        ones[dim] = size
    return np.broadcast_to(values.reshape(ones), shape)


def _broadcast(op, operands, shape, dtype) -> np.ndarray | None:
    dims = integers(op, "broadcast_dimensions")
    return _spread(operands[0], dims, shape) if dims == sorted(dims) else None


def _compared(op, operands, shape, dtype) -> np.ndarray | None:
    if np.issubdtype(operands[0].dtype, np.floating):
        return None  # NaN and the two zeros have several orders.
    direction = op.attributes["comparison_direction"]
    compare = _COMPARED[stablehlo.ComparisonDirectionAttr(direction).value]
    return compare(*operands)


def _converted(op, operands, shape, dtype) -> np.ndarray | None:
    (values,) = operands
    if dtype in INTEGERS.values() and np.issubdtype(values.dtype, np.floating):
        # Out of range XLA takes the nearest integer, NumPy any.
        limits = np.iinfo(dtype)
        inside = (values > float(limits.min)) & (values < float(limits.max))
        if not inside.all():
            return None
    return values.astype(dtype)


def _joined(op, operands, shape, dtype) -> np.ndarray:
    return np.concatenate(operands, _dim(op, "dimension"))


def _reshaped(op, operands, shape, dtype) -> np.ndarray:
    return operands[0].reshape(shape)


def _sliced(op, operands, shape, dtype) -> np.ndarray:
    names = ("start_indices", "limit_indices", "strides")
    return operands[0][tuple(map(slice, *(integers(op, name) for name in names)))]


_MOVED: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast,
    "compare": _compared,
    "concatenate": _joined,
    "convert": _converted,
    "reshape": _reshaped,
    "slice": _sliced,
}
