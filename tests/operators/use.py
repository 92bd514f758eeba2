"""One use of an operator, and what its expression may call."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from meshwright.framework.modeling import random


def layer_norm(x, scale, bias):
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
    return centred * tf.math.rsqrt(variance + 1e-2) * scale + bias


def repeat(x, w, steps):
    """`steps` layers that share their weight, in a loop.

    Each a mean, not a sum: else differences in the last bit grow from layer to layer.
    """
    return tf.while_loop(
        lambda i, _: i < steps,
        lambda i, x: (i + 1, tf.tanh(x @ w / w.shape[0])),
        (0, x),
        maximum_iterations=steps,
    )[1]


def running(xs, state):
    """Running products of the slices of `xs`, from `state` on."""
    steps = xs.shape[0]

    def body(i, state, out):
        state = tf.sin(state * xs[i])
        return i + 1, state, out.write(i, state)

    out = tf.TensorArray(tf.float32, steps, element_shape=state.shape)
    _, state, out = tf.while_loop(
        lambda i, *_: i < steps, body, (0, state, out), maximum_iterations=steps
    )
    return state, out.stack()


NAMES = {
    "tf": tf,
    "random": random,
    "layer_norm": layer_norm,
    "repeat": repeat,
    "running": running,
}


class Kind(enum.Enum):
    """What an input holds."""

    FLOAT = enum.auto()  # float32, all different: no ties to break.
    INDEX = enum.auto()  # int32 below a limit, some twice.
    UNIQUE = enum.auto()  # int32 along one dim, below a limit, none twice.
    FLAG = enum.auto()  # bool.
    KEY = enum.auto()  # uint32 random key.


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of an expression; `limit` is an index's exclusive upper bound."""

    shape: tuple[int, ...]
    kind: Kind = Kind.FLOAT
    limit: int = 0

    def value(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng([seed, *self.shape])
        size = math.prod(self.shape)
        if self.kind is Kind.FLOAT:  # Evenly over (-2, 2).
            flat = (rng.permutation(size) + 0.5) * (4 / size) - 2
            return flat.reshape(self.shape).astype(np.float32)
        if self.kind is Kind.INDEX:
            return rng.integers(0, self.limit, self.shape).astype(np.int32)
        if self.kind is Kind.UNIQUE:
            return rng.permutation(self.limit)[:size].reshape(self.shape).astype("i4")
        if self.kind is Kind.FLAG:
            return rng.integers(0, 2, self.shape).astype(np.bool_)
        return rng.integers(0, 2**32, self.shape).astype(np.uint32)


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
      unsplit: by input name, and "result", the dims that no axis may split: XLA gets it
        wrong (known_failures.py).
      even: names whose dims may only be split evenly into shards of two and more,
        likewise.
      halo: `unsplit` holds unless x and the result are laid out alike over all axes.
      whole: the dims of x and the result that no axis may split even then.
      batch: how many leading dims of x and y are a batch that a contraction keeps;
        under GSPMD they may not be split by different axes.
      product: whether it, or its gradient, multiplies matrices.
      picked: the name of what has a row for each index i, if the use or its gradient
        is a gather.
      rows: by input name, and "result", the dims of rows.
    """

    expression: str
    inputs: Mapping[str, Input]
    exact: bool = False
    eager: bool = True
    unsplit: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    even: tuple[str, ...] = ()
    halo: bool = False
    whole: tuple[int, ...] = ()
    batch: int = 0
    product: bool = False
    picked: str = ""
    rows: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cached, which does not travel to another process."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @functools.cached_property
    def fn(self) -> Callable[..., Any]:
        """The expression as a function of its inputs."""
        return eval(f"lambda {', '.join(self.inputs)}: {self.expression}", NAMES)

    @functools.cached_property
    def values(self) -> list[np.ndarray]:
        return [one.value(i) for i, one in enumerate(self.inputs.values())]

    @functools.cached_property
    def result_shapes(self) -> list[tuple[int, ...]]:
        traced = tf.function(self.fn, autograph=False).get_concrete_function(
            *(tf.TensorSpec(v.shape, v.dtype) for v in self.values)
        )
        return [tuple(shape) for shape in tf.nest.flatten(traced.output_shapes)]


OPERATORS: dict[str, st.SearchStrategy[Use]] = {}


def operator(draw_use: Callable[..., Use]) -> None:
    """Enters a function that draws a use of an operator, under the function's name."""
    OPERATORS[draw_use.__name__] = st.composite(draw_use)()


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
