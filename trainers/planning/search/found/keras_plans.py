"""How a Keras model is best split, as a layout for `meshwright.keras.distribute`.

model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = tf.TensorSpec([1024, 128]), tf.TensorSpec([1024], tf.int32)
found = search_keras(model, (x, y), "v3:4x4")
print(found.text())
mw.keras.distribute(model, found.mesh, found.layout, data_axes=found.data_axes)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.compiler.lowering.errors import leaves_of
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.nested_map import NestedMap, as_key
from meshwright.framework.sharding.mesh import did_you_mean
from meshwright.framework.sharding.sharding import Sharding
from meshwright.trainers.planning.search.found.function_plans import (
    FunctionPlan,
    search,
)
from meshwright.trainers.planning.search.found.named_function import names_by_path

_BATCH = "batch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasPlan:
    """How a Keras model is split.

    Args:
      found: the plan of its train step's function.
      paths: of variables, by the path of the function's leaf.
    """

    found: FunctionPlan
    paths: Mapping[str, str]

    @property
    def mesh(self):
        """The device mesh."""
        return self.found.mesh

    @property
    def layout(self) -> dict[str, list]:
        """For each variable that is split a row: its path, the axes of each dim."""
        return {
            f"^{re.escape(self.paths[path])}$": [
                (axes[0] if len(axes) == 1 else axes) or None for axes in leaf.dims
            ]
            for path, leaf in self._split()
        }

    def _split(self) -> Iterator[tuple[str, Sharding]]:
        """The variables that are split."""
        for path, leaf in zip(self.found.paths, self.found.leaves, strict=True):
            if path in self.paths and leaf is not None and any(leaf.dims):
                yield path, leaf

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that split a batch."""
        return self.found.leaves[-1].dims[0]

    def text(self) -> str:
        """The mesh and its time, the batch's axes, and a line for each row."""
        first = self.found.text().splitlines()[0]
        rows = [
            (path[1:-1].replace("\\", ""), dims) for path, dims in self.layout.items()
        ]
        width = max((len(path) for path, _ in rows), default=0)
        lines = [f"  {path:<{width}}  {leaf}" for path, leaf in rows]
        return "\n".join([first, f"  batch: {'.'.join(self.data_axes) or '-'}", *lines])


_OPTIONS = {
    "most": "plans propagated at most",
    "most_axes": "mesh axes at most",
    "compiled": "how many of the fastest are compiled",
}


def search_keras(
    model: Any,
    batch: Sequence[Any],
    on: str,
    *,
    most: int = 300,
    most_axes: int = 2,
    compiled: int = 0,
    **unknown: Any,
) -> KerasPlan:
    """Looks for the layout of a Keras model with which a step of `fit` is fastest.

    A step has the loss, its gradients and the optimizer's updates. Weights of layers
    that differ in their number alone are split alike, optimizer slots as their weights;
    what has a single dim is left to propagation. A bar, or log lines, tell of progress.

    Args:
      model: a Keras 3 model of the TensorFlow backend, built and compiled.
      batch: the model's input and labels, nests of `tf.TensorSpec` whose first dim is
        the batch.
      on: name of a TPU topology, as in `--topology`.
      most: plans propagated at most.
      most_axes: mesh axes at most.
      compiled: how many of the fastest are compiled, of which the fastest is taken; 0:
        propagation decides, and libtpu is not needed.
      **unknown: refused.

    Raises:
      TypeError: an unknown option.
      ValueError: the model is not built, or has no optimizer; see `search` for others.
      LoweringError, ImportError: see `search`.
    """
    for option in unknown:
        listed = ", ".join(f"{name} ({what})" for name, what in _OPTIONS.items())
        raise TypeError(
            f"{model.name}: search_keras has no option {option!r}"
            f"{did_you_mean(option, (*_OPTIONS,))}; it has {listed}"
        )
    if not model.built or getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{model.name}: its weights and optimizer are part of what is searched: "
            "build and compile it first"
        )
    function = KerasStep(model, tuple(batch))
    found = search(
        function.step,
        function.args,
        on,
        results_like=function.count,
        names=function.names,
        most=most,
        most_axes=most_axes,
        compiled=compiled,
    )
    return KerasPlan(found=found, paths=function.paths)


class KerasStep:
    """A step of `fit` as a pure function of weights, slots, statistics and a batch.

    Attributes:
      args: its arguments' specs.
      paths: of variables, by the path of the argument's leaf.
      count: how many leaves the variables and slots are.
    """

    def __init__(self, model: Any, batch: tuple[Any, ...]):
        # Keras takes a second to import.
        from meshwright.tasks.keras.keras_optimizer import KerasOptimizer

        self._model = model
        self._optimizer = KerasOptimizer(optimizer=model.optimizer)
        self._others = others = model.non_trainable_variables
        trained = NestedMap()
        for variable in model.trainable_variables:
            path = ".".join(map(as_key, variable.path.split("/")))
            trained.set_path(path, variable)
        self._trained, self._specs = trained.leaves(), trained.map(_spec_of)
        if len(self._trained) < len(model.trainable_variables):
            raise ValueError(f"{model.name}: two of its weights have the same path")
        slots = self._optimizer.slots(self._specs)
        self.args = (
            [tf.TensorSpec(v.shape, v.dtype) for v in self._trained],
            slots.map(lambda spec: tf.TensorSpec(spec.shape, spec.dtype)),
            [tf.TensorSpec(v.shape, v.dtype) for v in others],
            batch,
        )
        self.count = sum(len(tf.nest.flatten(arg)) for arg in self.args[:3])
        self.paths = {
            f"{number}/{i}": variable.path
            for number, kind in ((0, self._trained), (2, others))
            for i, variable in enumerate(kind)
        }
        self._dims = {
            path: spec.dims
            for (path, _), spec in zip(
                leaves_of(self.args),
                [*map(_spec_of, self._trained), *slots.leaves()],
                strict=False,
            )
        }

    def names(self, path: str, spec: tf.TensorSpec) -> Sequence[str | None] | None:
        """The names of dims; slots have those of their weights."""
        if path.startswith("3"):
            return [_BATCH, *[None] * (spec.shape.rank - 1)] if spec.shape.rank else ()
        if spec.shape.rank < 2:
            return None
        return self._dims.get(path) or names_by_path(self.paths[path], spec)

    def step(self, weights, slots, others, batch):
        """New weights, slots and statistics, and the loss."""
        from meshwright.tasks.keras.keras_scope import with_values

        model, optimizer, (x, y) = self._model, self._optimizer, batch
        variables = [*self._trained, *self._others]
        values = {id(v): tf.zeros(v.shape, v.dtype) for v in model.metrics_variables}
        values |= {
            id(v): value
            for v, value in zip(variables, [*weights, *others], strict=True)
        }
        with tf.GradientTape() as tape:
            tape.watch(weights)
            with with_values(values, model.name) as scope:
                outputs = model(x, training=True)
                loss = model.compute_loss(x, y, outputs, training=True)
        gradients = tape.gradient(loss, weights, unconnected_gradients="zero")
        step = tf.constant(1, tf.int64)
        values, slots = optimizer.apply(
            step,
            optimizer.learning_rate(step),
            self._specs.pack(gradients),
            self._specs.pack(weights),
            slots,
            self._specs,
        )
        changed = [scope.state_mapping[id(v)] for v in self._others]
        return values.leaves(), slots, changed, loss


def _spec_of(variable: Any) -> WeightSpec:
    spec = tf.TensorSpec(variable.shape, variable.dtype)
    return WeightSpec(
        shape=tuple(variable.shape),
        dims=tuple(names_by_path(variable.path, spec)),
        initializer=None,
        dtype=tf.as_dtype(variable.dtype),
    )
