"""A step of a Keras model's `fit` as a pure function, for a search of plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.compiler.lowering.errors import leaves_of
from meshwright.framework.functions.keras_plan import check_rows, check_sizes
from meshwright.framework.functions.layouts.layout import Layout
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.nested_map import NestedMap, as_key
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.trainers.planning.search.found.named_function import names_by_path

_BATCH = "batch"


class KerasStep:
    """A step of `fit` as a pure function of weights, slots, statistics and a batch.

    Attributes:
      args: its arguments' specs.
      paths: of variables, by the path of the argument's leaf.
      count: how many leaves the variables and slots are.
    """

    def __init__(self, model: Any, batch: tuple[Any, ...]):
        """Reads the model's variables, and makes specs of its optimizer's slots.

        Args:
          model: a Keras model, built and compiled.
          batch: see `search_keras`.

        Raises:
          ValueError: two weights have the same path.
        """
        # Keras takes a second to import.
        from meshwright.tasks.keras.keras_optimizer import KerasOptimizer

        self._model = model
        self._optimizer = KerasOptimizer(optimizer=model.optimizer)
        _build_loss(model, batch)
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
        self._variables = {
            f"{number}/{i}": variable
            for number, kind in ((0, self._trained), (2, others))
            for i, variable in enumerate(kind)
        }
        self.paths = {path: v.path for path, v in self._variables.items()}
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

    def shardings(
        self, layout: Layout, mesh: DeviceMesh, data_axes: Sequence[str]
    ) -> list[Sharding | None]:
        """The shardings of the arguments' leaves, slots as their weights, by a layout.

        None for what has no names, and is left to propagation.
        """
        own = {
            path: layout.sharding_of(variable._value, mesh)
            for path, variable in self._variables.items()
        }
        by_dims = {self._dims[path]: own[path] for path in own if path in self._dims}
        leaves: list[Sharding | None] = []
        for path, spec in leaves_of(self.args):
            names, rank = self.names(path, spec), spec.shape.rank
            if not names:
                leaves.append(None)
            elif path.startswith("3"):
                rest = ((),) * (rank - 1)
                leaves.append(Sharding(mesh, (tuple(data_axes), *rest)))
            else:
                split = own.get(path) or by_dims.get(self._dims.get(path))
                leaves.append(split or Sharding.replicated(mesh, rank))
        return leaves

    def step(self, weights, slots, others, batch):
        """New weights, slots and statistics, and the loss."""
        from meshwright.tasks.keras.keras_scope import with_values

        model, optimizer, (x, y, *rest) = self._model, self._optimizer, batch
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
                loss = model.compute_loss(x, y, outputs, *rest, training=True)
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


def _build_loss(model: Any, batch: tuple[Any, ...]) -> None:
    """Has Keras make what tracks the losses of several outputs: a trace may not."""
    from keras import KerasTensor
    from keras.src.backend import compute_output_spec

    x, y, *rest = tf.nest.map_structure(
        lambda spec: KerasTensor(spec.shape, spec.dtype.name), batch
    )
    outputs = compute_output_spec(model, x, training=False)
    compute_output_spec(model.compute_loss, x, y, outputs, *rest, training=False)


def _spec_of(variable: Any) -> WeightSpec:
    spec = tf.TensorSpec(variable.shape, variable.dtype)
    return WeightSpec(
        shape=tuple(variable.shape),
        dims=tuple(names_by_path(variable.path, spec)),
        initializer=None,
        dtype=tf.as_dtype(variable.dtype),
    )


def checked_batch(name: str, batch: Any) -> tuple[Any, ...]:
    """A batch as a tuple.

    Raises:
      TypeError, ValueError: see `search_keras`.
    """
    example = "(tf.TensorSpec([1024, 128]), tf.TensorSpec([1024], tf.int32))"
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise ValueError(
            f"{name}: a batch is a tuple of the model's input and the labels, such as "
            f"{example}"
        )
    for leaf in tf.nest.flatten(tuple(batch)):
        if not isinstance(leaf, tf.TensorSpec):
            raise TypeError(
                f"{name}: the batch has a {type(leaf).__name__}: pass the shapes and "
                f"dtypes of one batch, such as {example}"
            )
        if leaf.shape.rank == 0:
            raise ValueError(
                f"{name}: the batch has a scalar: the first dim of all its tensors is "
                "the batch"
            )
    check_sizes(name, tf.nest.flatten(tuple(batch)))
    check_rows(name, **dict(zip(("x", "y", "sample_weight"), batch, strict=False)))
    return tuple(batch)


def layout_lines(layout: str | Mapping[str, list]) -> Iterator[str]:
    """Lines of the weights that a layout splits."""
    if isinstance(layout, str):
        yield f"  layout: {layout!r}"
        return
    rows = {
        path[1:-1].replace("\\", ""): row for path, row in layout.items() if any(row)
    }
    if not rows:
        yield "  no weight is split"
    width = max(map(len, rows), default=0)
    for path, row in rows.items():
        yield f"  {path:<{width}}  {row}"
