"""One use of an operator, and what its expression may call."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.operators.definitions.functions import NAMES

# Formats that an operator may be drawn in beside float32.
HALVES = ("bfloat16", "float16")
SUMS = (*HALVES, "complex64", "int32")
ORDERS = (*HALVES, "int32", "int64", "int8", "uint8")
MOVES = (*ORDERS, "complex64", "bool")
_DIGITS = {"bfloat16": 8, "float16": 11}


class Kind(enum.Enum):
    """What an input holds."""

    NUMBER = enum.auto()  # Of any format; floats are all different: no ties to break.
    INDEX = enum.auto()  # int32 below a limit, some twice.
    UNIQUE = enum.auto()  # int32 along one dim, below a limit, none twice.
    KEY = enum.auto()  # uint32 random key.


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of an expression; `limit` is an index's exclusive upper bound."""

    shape: tuple[int, ...]
    kind: Kind = Kind.NUMBER
    limit: int = 0
    dtype: str = "float32"

    def __post_init__(self):
        if self.kind is Kind.KEY:
            object.__setattr__(self, "dtype", "uint32")
        elif self.kind is not Kind.NUMBER and self.dtype == "float32":
            object.__setattr__(self, "dtype", "int32")

    def __str__(self) -> str:
        kind = "" if self.kind is Kind.NUMBER else f"{self.kind.name.lower()} "
        limit = f" below {self.limit}" if self.limit else ""
        return f"{kind}{self.dtype} {list(self.shape)}{limit}"

    def value(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng([seed, *self.shape])
        dtype = tf.as_dtype(self.dtype).as_numpy_dtype
        if self.kind is not Kind.NUMBER:
            return self._integers(rng).astype(dtype)
        if self.dtype == "bool":
            return rng.integers(0, 2, self.shape).astype(dtype)
        if tf.as_dtype(self.dtype).is_integer:
            low, high = tf.as_dtype(self.dtype).limits
            return rng.integers(max(low, -99), min(high, 99), self.shape).astype(dtype)
        if self.dtype == "complex64":
            return (self._floats(rng) + 1j * self._floats(rng)).astype(dtype)
        return self._floats(rng).astype(dtype)

    def _integers(self, rng) -> np.ndarray:
        if self.kind is Kind.KEY:
            return rng.integers(0, 2**32, self.shape)
        if self.kind is Kind.UNIQUE:
            flat = rng.permutation(self.limit)[: math.prod(self.shape)]
            return flat.reshape(self.shape)
        return rng.integers(0, self.limit, self.shape)

    def _floats(self, rng) -> np.ndarray:
        """Over (-2, 2), all different: evenly, or what bfloat16 has, ever finer."""
        order = rng.permutation(math.prod(self.shape)).reshape(self.shape)
        if self.dtype != "bfloat16":
            return (order + 0.5) * (4 / max(1, order.size)) - 2
        sign, step = 1 - 2 * (order % 2), order // 2
        return sign * (255 - step % 128) * 2.0 ** -(7 + step // 128)


@dataclasses.dataclass(frozen=True)
class Use:
    """An operator with its sizes and settings drawn.

    The expression is Python, so that what a failing test prints can be read and run.

    Args:
      expression: over the names of `inputs` and those in `NAMES`; its value is a
        tensor or several.
      inputs: by name.
      exact: floats too are the same on any mesh, bit for bit.
      eager: the reference is TF's eager execution, else a program for one device.
      formats: dtypes that inputs of float32 may have instead, all of them together.
      spatial: x and the result may be laid out alike, window dims split.
      inner: ranks of tensors inside that the expression lays out, by calling
        `lay(tensor, number)`.
      tolerance: of float32, relative to the largest element or to 1.
      differentiable: TF has a gradient for it.
    """

    expression: str
    inputs: Mapping[str, Input]
    exact: bool = False
    eager: bool = True
    formats: tuple[str, ...] = HALVES
    spatial: bool = False
    inner: tuple[int, ...] = ()
    tolerance: float = 1e-5
    differentiable: bool = True

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cached, which does not travel to another process."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def in_format(self, dtype: str) -> Use:
        """The same, its float32 inputs of `dtype`."""
        inputs = {
            name: dataclasses.replace(operand, dtype=dtype)
            if operand.dtype == "float32"
            else operand
            for name, operand in self.inputs.items()
        }
        return dataclasses.replace(self, inputs=inputs)

    def flags(self) -> str:
        """How it is judged, where that is unusual; as arguments of `Use`."""
        fields = {f.name: f for f in dataclasses.fields(self)}
        return ", ".join(
            f"{name}={getattr(self, name)}"
            for name in ("exact", "eager", "tolerance", "differentiable")
            if getattr(self, name) != fields[name].default
        )

    @property
    def digits(self) -> int:
        """Of the significand of its coarsest float format."""
        return min(_DIGITS.get(operand.dtype, 24) for operand in self.inputs.values())

    @functools.cached_property
    def fn(self) -> Callable[..., Any]:
        """The expression as a function of its inputs, and of `lay`."""
        names = [*self.inputs, "lay=lambda tensor, number: tensor"]
        return eval(f"lambda {', '.join(names)}: {self.expression}", NAMES)

    @functools.cached_property
    def values(self) -> list[np.ndarray]:
        """The inputs as they cross the border."""
        return [operand.value(i) for i, operand in enumerate(self.inputs.values())]

    @functools.cached_property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """The results' shapes.

        Raises:
          ValueError: TF cannot trace the expression of such inputs, or a result's sizes
            depend on values.
        """
        specs = [tf.TensorSpec(o.shape, o.dtype) for o in self.inputs.values()]
        try:
            fn = tf.function(self.fn, autograph=False)
            traced = fn.get_concrete_function(*specs)
        except Exception as error:  # Of any kind: the expression is anybody's.
            of = ", ".join(f"{name}: {each}" for name, each in self.inputs.items())
            raise ValueError(
                f"TF does not take {self.expression} of {of} "
                f"({type(error).__name__}: {error}): correct the expression, or the "
                "shapes and formats of its inputs"
            ) from error
        shapes = tf.nest.flatten(traced.output_shapes)
        if not all(shape.is_fully_defined() for shape in shapes):
            raise ValueError(
                f"results of {self.expression} have the shapes "
                f"{', '.join(map(str, shapes))}, but a case needs sizes that do not "
                "depend on values: correct the expression, or put tf.ensure_shape "
                "around it where TF does not see them"
            )
        return [tuple(shape) for shape in shapes]


OPERATORS: dict[str, st.SearchStrategy[Use]] = {}
_PLACES: dict[str, str] = {}


def operator(draw_use: Callable[..., Use]) -> None:
    """Enters a function that draws a use of an operator, under the function's name.

    Raises:
      ValueError: another function has the name.
    """
    name, code = draw_use.__name__, draw_use.__code__
    place = f"{pathlib.Path(code.co_filename).name}:{code.co_firstlineno}"
    if name in OPERATORS:
        raise ValueError(
            f"{_PLACES[name]} and {place} both define operator {name!r}: rename one"
        )
    OPERATORS[name], _PLACES[name] = st.composite(draw_use)(), place


# Dims that mesh axes divide come up as often as those that they do not.
SIZES = st.one_of(st.integers(1, 12), st.sampled_from([2, 4, 8, 12]))
SEVERAL = st.one_of(st.integers(2, 12), st.sampled_from([4, 8, 12]))
# Where the number of elements grows quickly.
SMALL = st.one_of(st.integers(1, 6), st.sampled_from([2, 4, 8]))
BOOLEANS = st.booleans()


def shape_of(draw, low=1, high=3, sizes=SIZES) -> tuple[int, ...]:
    return tuple(draw(st.lists(sizes, min_size=low, max_size=high)))


def dim_of(draw, shape) -> int:
    return draw(st.integers(0, len(shape) - 1))


def of_shape(expression: str, *shapes, **kwargs) -> Use:
    """A use with float inputs x, y, z."""
    inputs = {name: Input(tuple(s)) for name, s in zip("xyz", shapes, strict=False)}
    return Use(expression, inputs, **kwargs)
