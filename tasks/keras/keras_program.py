"""A Keras model without values: its weights' specs, and its loss as a pure function.

B batch rows.
"""

from __future__ import annotations

import copy
import enum
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.initializers.random_initializers import RandomInitializer

from meshwright.framework.functions.keras_layouts import names_of_dims
from meshwright.framework.functions.layouts.split_weights import split_dims
from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import (
    Context,
    Mode,
    WeightSpec,
    as_gradient,
)
from meshwright.framework.nested_map import NestedMap, as_key
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.origins import keras_names
from meshwright.framework.sharding.plan import as_axes
from meshwright.tasks.input.dataset_input import ROW_WEIGHTS, batch_spec, unnamed
from meshwright.tasks.keras.keras_flops import product_flops
from meshwright.tasks.keras.keras_losses import (
    RowLosses,
    RowMetrics,
    is_of_keras,
)
from meshwright.tasks.keras.keras_scope import (
    from_the_start,
    with_values,
    without_values,
)
from meshwright.tasks.keras.keras_weights import named_arrays
from meshwright.tasks.task import TaskLoss

_ROWS = 2  # Of a batch that is only traced.
_STEPS = ("train_step", "test_step", "compute_loss")


class _Kind(enum.Enum):
    """What training does with a variable."""

    TRAINED = None
    ASSIGNED = 0.0  # `WeightSpec.statistic_decay`: it becomes what the model assigns.
    FROZEN = 1.0


class KerasProgram:
    """A model whose variables have no values.

    Args:
      make: makes the model.
      compiled_loss: its loss and loss weights, as `compile` takes them.
      compiled_metrics: its metrics and weighted metrics.
      structure: of an example, see `DatasetInput.structure`.
      weight_dims: by regular expression, which is searched for in a variable's path,
        the names of its dims.

    Raises:
      ValueError: it is no Keras model, or does what only `fit` can; a row of
        `weight_dims` fits no variable.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        compiled_loss: tuple[Any, Any],
        compiled_metrics: tuple[Any, Any],
        structure: Any,
        weight_dims: Mapping[str, Sequence[str]],
    ):
        _check_backend()
        self._make, self._structure = make, structure
        with from_the_start(), without_values():
            self.model = make()
            _check_model(self.model)
            if not self.model.built:
                self._call_symbolically()
            _check_unassigned(self.model)
            _check_precision(self.model)
        names = getattr(self.model, "output_names", None)
        self._losses = RowLosses(*compiled_loss, names)
        self._metrics = RowMetrics(*compiled_metrics, names)
        seeds = [
            generator.state
            for layer in self.model._flatten_layers()
            for generator in getattr(layer, "_seed_generators", ())
        ]
        self._seeds = list({id(state): state for state in seeds}.values())
        others = [v for v in self.model.variables if id(v) not in set(map(id, seeds))]
        self.variables = _by_path(others)
        self._dims = _dims(self.model, self.variables, weight_dims)
        # Whether a loss counts rows of padding; known when the loss is traced.
        self.wants_full_batches = False

    @functools.cached_property
    def weights(self) -> NestedMap:
        """Nested map of `WeightSpec`."""
        kinds = self._kinds

        def spec(path: str, variable: Any) -> WeightSpec:
            is_trained = kinds[path] is _Kind.TRAINED
            return WeightSpec(
                shape=tuple(variable.shape),
                dims=self._dims[path],
                initializer=_initializer(variable),
                dtype=tf.as_dtype(variable._dtype),
                statistic_decay=kinds[path].value,
                constraint=variable.constraint if is_trained else None,
            )

        return self.variables.map_with_path(spec)

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """The loss as `Task.loss`; assigned variables are gradients."""
        loss, sums, assigned = self._traced(ctx, self._gathered(ctx, theta), batch)
        for path, kind in self._kinds.items() if ctx.mode is Mode.TRAIN else ():
            weight = theta.get_path(path)
            if kind is _Kind.FROZEN:
                loss = as_gradient(loss, weight, tf.zeros_like(weight))
            elif kind is _Kind.ASSIGNED:
                loss = as_gradient(loss, weight, assigned[path])
        return TaskLoss(loss=loss, sums=sums)

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """The loss and the metrics, of sums over batches by path."""
        rows = max(float(sums["rows"]), 1.0)
        losses = {"loss": sums["loss"]} | {
            path.removeprefix("losses."): value
            for path, value in sums.items()
            if path.startswith("losses.")
        }
        means = {name: float(value) / rows for name, value in losses.items()}
        return means | self._metrics.results(sums)

    def outputs(self, ctx: Context, theta: NestedMap, x: Any) -> Any:
        """What the model makes of its input, in its own structure."""
        with self._scope(ctx, self._gathered(ctx, theta)):
            return self._called(x, Mode.EVAL)

    def _gathered(self, ctx: Context, theta: NestedMap) -> NestedMap:
        """Weights as products read them: no longer split along "fsdp" dims.

        Nothing in a Keras model says where activations are: products would sum over
        such dims in parts, and reduce activations instead.
        """
        if not as_axes(ctx.plan.weights.get("fsdp")):
            return theta

        def read(path: str, weight: tf.Tensor) -> tf.Tensor:
            dims = ["read" if dim == "fsdp" else dim for dim in self._dims[path]]
            if "read" not in dims:
                return weight
            return annotate(weight, ctx.plan.weight_sharding(dims, path))

        return theta.map_with_path(read)

    def filled(self, theta: NestedMap) -> keras.Model:
        """The model with values, given as host arrays; Keras compiles and saves it."""
        with from_the_start(), tf.init_scope():
            model = self._make()
            if not model.built:
                some = self._parts(batch_spec(self._structure, _ROWS))[0]
                model(tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), some))
        values = self._by_id(theta)
        for new, variable in zip(model.variables, self.model.variables, strict=True):
            if id(variable) in values:
                new.assign(values[id(variable)])
        return model

    def names_in_file(self, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """See `KerasModel.names_in_file`."""
        found = named_arrays(self.model, names)
        paths = {
            found.names[id(variable)]: path
            for path, variable in self.variables.items_by_path()
            if id(variable) in found.names
        }
        return paths, found.problems

    @functools.cached_property
    def row_flops(self) -> float:
        """FLOPs of products in a forward pass for a row; 0 if not known."""

        def forward(values, batch):
            theta = self.variables.pack(values)
            x = self._parts(batch)[0]
            return tf.nest.flatten(self.outputs(Context(), theta, x))

        return product_flops(self._graph(forward)) / _ROWS

    def _graph(self, fn: Callable[..., Any]) -> tf.Graph:
        """The graph of a function of the variables' values, as a list, and a batch."""
        values = [tf.TensorSpec(v.shape, v._dtype) for v in self.variables.leaves()]
        traced = tf.function(fn, autograph=False)
        batch = batch_spec(self._structure, _ROWS)
        return traced.get_concrete_function(values, batch).graph

    def _by_id(self, theta: NestedMap) -> dict[int, Any]:
        """Values by `id` of the variables."""
        pairs = zip(self.variables.leaves(), theta.leaves(), strict=True)
        return {id(variable): value for variable, value in pairs}

    def _traced(
        self, ctx: Context, theta: NestedMap, batch: NestedMap
    ) -> tuple[tf.Tensor, NestedMap, dict[str, tf.Tensor]]:
        """The loss, the sums, and the new values of assigned variables by path."""
        rows = batch[ROW_WEIGHTS]
        x, y, sample_weight = self._parts(batch)
        is_training = ctx.mode is Mode.TRAIN
        with self._scope(ctx, theta) as scope:
            y_pred = self._called(x, ctx.mode)
            _check_weights(y_pred, sample_weight)
            losses = list(self.model.losses)
            self.wants_full_batches = bool(scope.losses) or self._losses.compare_rows
            if y is not None:
                valid = None if is_training else rows
                losses.append(self._losses.total(y, y_pred, sample_weight, valid))
            if not losses:
                raise ValueError(
                    f"{self.model.name} has nothing to train by: its examples have no "
                    "labels, and it calls no add_loss"
                )
            loss = tf.add_n([tf.cast(value, tf.float32) for value in losses])
        count = tf.reduce_sum(rows)
        sums = NestedMap(loss=loss * count, rows=count)
        if y is not None:
            sums.losses = self._losses.parts().map(lambda part: part * count)
            weights = _metric_weights(y_pred, rows, sample_weight, is_training)
            sums.update(self._metrics.sums(y, y_pred, weights))
        assigned = {
            path: value
            for path, variable in self.variables.items_by_path()
            if (value := scope.get_current_value(variable)) is not theta.get_path(path)
        }
        return loss, sums, assigned

    def _parts(self, batch: NestedMap) -> tuple[Any, Any, Any]:
        """The input, the labels and the sample weights; None for what there is not."""
        parts = unnamed(batch, self._structure)
        return (*parts, None, None)[:3]

    def _called(self, x: Any, mode: Mode) -> Any:
        training = {}
        if self.model._call_has_training_arg:
            training = {"training": mode is Mode.TRAIN}
        with keras_names():
            return self.model(x, **training)

    def _scope(self, ctx: Context, theta: NestedMap):
        """Values of the variables for ops of the model."""
        values = self._by_id(theta)
        for i, state in enumerate(self._seeds):
            seed = tf.zeros([2], tf.uint32)
            if ctx.key is not None:
                seed = random.fold_in(ctx.random_key(), i)
            values[id(state)] = tf.cast(seed, state.dtype)
        return with_values(values, self.model.name)

    def _call_symbolically(self) -> None:
        """Builds a model that waits for an input."""
        x = self._parts(batch_spec(self._structure, _ROWS))[0]
        tensors = tf.nest.map_structure(
            lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), x
        )
        backend.compute_output_spec(lambda x: self._called(x, Mode.EVAL), tensors)

    @functools.cached_property
    def _kinds(self) -> dict[str, _Kind]:
        """What training does with each variable, found by tracing it once."""
        kinds = {}

        def trace(values, batch):
            ctx = Context(mode=Mode.TRAIN, key=tf.zeros([2], tf.uint32))
            theta = self.variables.pack(values)
            with tf.GradientTape() as tape:
                tape.watch(values)
                loss, _, assigned = self._traced(ctx, theta, batch)
            gradients = tape.gradient(loss, values)
            items = self.variables.items_by_path()
            for (path, variable), gradient in zip(items, gradients, strict=True):
                is_trained = variable.trainable and gradient is not None
                if is_trained and path in assigned:
                    raise ValueError(
                        f"variable {variable.path!r} is trained, and a layer assigns "
                        "it too, as SpectralNormalization does: train the model by "
                        "meshwright.framework.keras.distribute and fit"
                    )
                kinds[path] = _Kind.TRAINED if is_trained else _Kind.FROZEN
                if path in assigned:
                    kinds[path] = _Kind.ASSIGNED
            return loss

        self._graph(trace)
        return kinds


def _check_weights(y_pred: Any, sample_weight: Any) -> None:
    if sample_weight is None or tf.is_tensor(sample_weight):
        return
    try:
        tf.nest.assert_same_structure(y_pred, sample_weight)
    except (ValueError, TypeError):
        given, outputs = map(_names_of, (sample_weight, y_pred))
        raise ValueError(
            f"DatasetInput: examples have sample weights for {given}, and the model "
            f"has the outputs {outputs}: give weights for each of them, 1 where all "
            "examples count alike, or one weight for all"
        ) from None


def _names_of(parts: Any) -> str:
    if tf.is_tensor(parts):
        return "1 output"
    return str(list(parts)) if isinstance(parts, Mapping) else f"{len(parts)} outputs"


def _metric_weights(
    y_pred: Any, rows: tf.Tensor, sample_weight: Any, is_training: bool
) -> dict[str, Any]:
    """Weights for metrics and for weighted metrics; see `RowMetrics.sums`."""
    if is_training:
        return {"metrics": None, "weighted": sample_weight}

    def of_output(output: tf.Tensor, weight: tf.Tensor | None = None) -> tf.Tensor:
        ones = [None] * (output.shape.rank - 2)
        counted = rows[(..., *ones)]
        if weight is not None:
            ones = [None] * (counted.shape.rank - weight.shape.rank)
            counted *= tf.cast(weight, tf.float32)[(..., *ones)]
        return tf.broadcast_to(counted, tf.shape(output)[:-1])

    counted = tf.nest.map_structure(of_output, y_pred)
    if sample_weight is None:
        return {"metrics": counted, "weighted": counted}
    if tf.is_tensor(sample_weight):
        weighted = tf.nest.map_structure(lambda y: of_output(y, sample_weight), y_pred)
    else:
        weighted = tf.nest.map_structure(of_output, y_pred, sample_weight)
    return {"metrics": counted, "weighted": weighted}


def _check_backend() -> None:
    if backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras's backend is {backend.backend()}: set KERAS_BACKEND=tensorflow in "
            "the environment, or in Keras's own configuration file"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"KerasModel.model returns {type(model).__name__}; it must be a function "
            "that returns a Keras model"
        )
    for step in _STEPS:
        if not is_of_keras(type(model), step):
            raise ValueError(
                f"{model.name} has its own {step}, which only fit calls: train it by "
                "mw.keras.distribute and fit, and plan it by mw.keras.plan; or write a "
                "Task"
            )


def _check_precision(model: Any) -> None:
    for layer in model._flatten_layers():
        if "float16" in (layer.compute_dtype, layer.variable_dtype):
            raise ValueError(
                f"layer {layer.path or layer.name!r} computes in float16, for which "
                "nothing scales the loss here: use the policy mixed_bfloat16"
            )


def _check_unassigned(model: Any) -> None:
    assigned = get_stateless_scope().state_mapping
    for variable in model.variables:
        if id(variable) in assigned:
            raise ValueError(
                f"KerasModel.model assigns {variable.path!r} a value, such as by "
                "loading weights, but the model is made without values: set "
                "Experiment.initialize_from instead"
            )


def _by_path(variables: Sequence[Any]) -> NestedMap:
    """Variables under their Keras paths.

    Raises:
      ValueError: one is of integers, which are not trained.
    """
    out = NestedMap()
    for variable in variables:
        if not tf.as_dtype(variable._dtype).is_floating:
            raise ValueError(
                f"variable {variable.path!r} is {variable._dtype}; a KerasModel has "
                "variables of floating point alone: leave out the layer, such as a "
                "lookup, and do its work in the tf.data.Dataset"
            )
        *scopes, name = map(as_key, variable.path.split("/"))
        node = out
        for scope in scopes:
            while not isinstance(node.setdefault(scope, NestedMap()), NestedMap):
                scope += "_"
            node = node[scope]
        while name in node:
            name += "_"
        node[name] = variable
    return out


def _dims(
    model: Any, variables: NestedMap, rows: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """The names of the dims of each variable, by its path in the nested map."""
    split = split_dims(model)
    unused, dims = set(rows), {}
    for path, variable in variables.items_by_path():
        row = next((row for row in rows if re.search(row, variable.path)), None)
        if row is None:
            dims[path] = names_of_dims(tuple(variable.shape), split.get(id(variable)))
            continue
        unused.discard(row)
        dims[path] = tuple(rows[row])
        if len(dims[path]) != len(variable.shape):
            raise ValueError(
                f"KerasModel.weight_dims[{row!r}] names {len(dims[path])} dims, but "
                f"{variable.path!r} has shape {tuple(variable.shape)}: name each"
            )
    for row in unused:
        paths = [variable.path for variable in variables.leaves()]
        raise ValueError(
            f"KerasModel.weight_dims[{row!r}] is in the path of none of the "
            f"{len(paths)} variables: {', '.join(paths[:8])}"
            f"{', ...' if len(paths) > 8 else ''}"
        )
    return dims


class _KeySeed(keras.random.SeedGenerator):
    """Gives an initializer a random key as its seed."""

    def __init__(self, key: tf.Tensor):
        self._key = key

    def next(self, ordered=True):
        return self._key


def _initializer(variable: Any) -> Callable[..., tf.Tensor]:
    """Keras's initializer, which draws from the key unless it has a seed."""
    given = variable._initializer

    def initializer(key, shape, dtype, stack_rank=0):
        made = given
        if isinstance(given, RandomInitializer) and given._init_seed is None:
            made = copy.copy(given)
            made.seed = _KeySeed(key)
        return tf.cast(made(tuple(shape), dtype=variable._dtype), dtype)

    return initializer
