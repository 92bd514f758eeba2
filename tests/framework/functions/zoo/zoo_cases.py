"""Modules of other libraries in a step each, as a user would compile it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import meshwright.framework as mw

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
ROWS, CLASSES = 8, 4
Step = Callable[..., Any]
Made = tuple[Step, Callable[[], Sequence[tf.Variable]]]
"""A step, and what lists the variables that it reads and writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step and its inputs.

    Args:
      make: makes the step, given the inputs as tensors.
      shapes: of the inputs, without the batch's dim.
      below: inputs are whole numbers below this; 0: normal floats.
      layout: rows for the step's variables.
    """

    make: Callable[..., Made]
    shapes: Sequence[tuple[int, ...]] = ((8,),)
    below: int = 0
    layout: Mapping[str, Sequence[Any]] | None = None

    def inputs(self) -> list[tf.Tensor]:
        rng = np.random.default_rng(0)
        shapes = [(ROWS, *shape) for shape in self.shapes]
        if self.below:
            return [
                tf.constant(rng.integers(0, self.below, s, np.int32)) for s in shapes
            ]
        return [tf.constant(rng.standard_normal(s, np.float32)) for s in shapes]


def ramp(x: tf.Tensor) -> tf.Tensor:
    """Numbers of which no two are alike, to weigh a result's elements by."""
    count = tf.cast(tf.size(x), x.dtype)
    return tf.reshape(tf.sin(tf.range(count) * 0.7), tf.shape(x))


def weighed(results: Any) -> tf.Tensor:
    """A mean of all elements of floats, each of which counts differently."""
    tensors = [x for x in tf.nest.flatten(results) if x.dtype.is_floating]
    return tf.add_n([tf.reduce_mean(x * ramp(x)) for x in tensors])


def trained(
    call: Step,
    inputs: Sequence[tf.Tensor],
    *,
    trainable: Callable[[], Sequence[tf.Variable]],
    variables: Callable[[], Sequence[tf.Variable]] | None = None,
    apply: Callable[[Sequence[Any], Sequence[tf.Variable]], Any] | None = None,
) -> Made:
    """A training step: the results of `call`, gradients of a weighed mean, an update.

    Args:
      call: makes its variables when it is first called, which is done here.
      inputs: of a call.
      trainable: the variables to train.
      variables: all variables, those of an optimizer too.
      apply: updates variables by gradients; by default plain gradient descent.
    """
    call(*inputs)

    def step(*inputs):
        watched = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            results = call(*inputs)
            loss = weighed(results)
        sources = [*trainable(), *watched]
        gradients = tape.gradient(loss, sources, unconnected_gradients="zero")
        count = len(trainable())
        (apply or descend)(gradients[:count], trainable())
        return results, [tf.convert_to_tensor(g) for g in gradients]

    return step, variables or trainable


def descend(gradients: Sequence[Any], variables: Sequence[tf.Variable]) -> None:
    for gradient, variable in zip(gradients, variables, strict=True):
        variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))


def computed(
    case: Case, compiled: Callable[[Step], Step], *, steps: int = 2
) -> tuple[list[Any], list[np.ndarray]]:
    """Results of some steps, and then all variables."""
    tf.random.set_seed(1)
    inputs = case.inputs()
    step, variables = case.make(*inputs)
    run = compiled(step)
    results = [tf.nest.flatten(run(*inputs)) for _ in range(steps)]
    return results, [variable.numpy() for variable in variables()]


def on_mesh(
    case: Case, partitioner: mw.Partitioner, name: str
) -> Callable[[Step], Step]:
    """How a case's step is compiled for the mesh: rows of its inputs are split."""

    def compiled(step: Step) -> Step:
        def split(*inputs):
            return step(*[mw.mesh_split(x, MESH, _rows(x)) for x in inputs])

        return mw.function(
            split, MESH, layout=case.layout, name=name, partitioner=partitioner
        )

    return compiled


def _rows(x: tf.Tensor) -> list[str | None]:
    return ["data", *[None] * (x.shape.rank - 1)]
