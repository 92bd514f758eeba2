"""Keras's losses and metrics of batches that may have rows of padding.

B batch rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.losses import ALL_OBJECTS_DICT as LOSSES
from keras.src.losses.loss import reduce_weighted_values
from keras.src.metrics import ALL_OBJECTS_DICT as METRICS
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, get_loss

from meshwright.framework.nested_map import NestedMap, as_key
from meshwright.tasks.keras.keras_scope import with_values, without_values

_OF_LABELS = ("accuracy", "acc")  # Which metric these are, labels tell.
_PACKAGES = ("keras", "keras_hub", "keras_rs")


class RowLoss(keras.losses.Loss):
    """A loss that counts examples only, not the rows that fill up a batch.

    Args:
      loss: as `compile` takes it for an output.
      values: gets the value of each call.

    Attributes:
      rows: float32 [B], 1 for an example; None if all are.
    """

    def __init__(self, loss: Any, values: list[tf.Tensor]):
        super().__init__()
        self.given, self._values = loss, values
        self.rows: tf.Tensor | None = None

    def __call__(self, y_true, y_pred, sample_weight=None):
        loss = get_loss(self.given, y_true, y_pred)
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise ValueError(
                f"the loss {type(loss).__name__} has a __call__ of its own: give it a "
                "`call` that returns the loss of each row, or train by fit"
            )
        if self.rows is None:
            value = loss(y_true, y_pred, sample_weight)
        else:
            value = self._of_rows(loss, y_true, y_pred, sample_weight)
        self._values.append(value)
        return value

    def _of_rows(self, loss, y_true, y_pred, sample_weight) -> tf.Tensor:
        mask = backend.get_keras_mask(y_pred)
        y_true, y_pred = (
            keras.ops.convert_to_tensor(y, dtype=loss.dtype) for y in (y_true, y_pred)
        )
        values = loss.call(y_true, y_pred)
        if not values.shape.rank or values.shape[0] != y_pred.shape[0]:
            raise ValueError(
                f"the loss {loss.name!r} makes {values.shape} of predictions "
                f"{y_pred.shape}: an evaluation needs the loss of each row, to leave "
                "out those that fill up the last batch (outputs are [batch, 1] or more)"
            )
        rows = _of_rank(self.rows > 0, values.shape.rank)
        if mask is not None:
            rows &= _of_rank(tf.cast(mask, tf.bool), values.shape.rank)
        return reduce_weighted_values(
            values,
            sample_weight=sample_weight,
            mask=tf.broadcast_to(rows, tf.shape(values)),
            reduction=loss.reduction,
            dtype=loss.dtype,
        )


class RowMetrics:
    """Keras metrics as sums that add up over batches.

    Args:
      metrics: as `compile` takes them.
      weighted: the same, of metrics that sample weights count in.
      output_names: of the model.
    """

    def __init__(self, metrics: Any, weighted: Any, output_names: Any):
        known = (*METRICS, *_OF_LABELS)
        _check_names("metrics", metrics, known)
        _check_names("weighted_metrics", weighted, known)
        self._parts = {
            "metrics": CompileMetrics(None, metrics, output_names=output_names),
            "weighted": CompileMetrics(None, weighted, output_names=output_names),
        }

    def sums(
        self, y: Any, y_pred: Any, weights: Mapping[str, tf.Tensor | None]
    ) -> NestedMap:
        """The metrics' variables after one batch, float32.

        Args:
          y: labels.
          y_pred: predictions.
          weights: for the metrics and for the weighted ones, like `y_pred`.

        Raises:
          ValueError: the variables of a metric do not add up.
        """
        sums = NestedMap()
        for part, metrics in self._parts.items():
            if not metrics._user_weighted_metrics:
                continue
            if not metrics.built:
                with without_values():  # Some make variables in their first update.
                    metrics.update_state(y, y_pred, weights[part])
                for metric in metrics.metrics:
                    _check_adds_up(metric)
            sums[part] = NestedMap()
            zeros = {id(v): tf.zeros(v.shape, v.dtype) for v in metrics.variables}
            with with_values(zeros, part) as scope:
                metrics.update_state(y, y_pred, weights[part])
            for i, variable in enumerate(metrics.variables):
                value = scope.get_current_value(variable)
                sums[part][f"_{i:03}"] = tf.cast(value, tf.float32)
        return sums

    def results(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The metrics by Keras's names, from sums by path."""
        results = {}
        for part, metrics in self._parts.items():
            if not metrics.built:
                continue
            values = [
                tf.cast(sums[f"{part}._{i:03}"], variable.dtype)
                for i, variable in enumerate(metrics.variables)
            ]
            for name, value in metrics.stateless_result(values).items():
                value = np.asarray(value)
                if value.ndim:
                    parts = {f"{name}_{i}": x for i, x in enumerate(value.flat)}
                else:
                    parts = {name: value}
                for key, x in parts.items():
                    key = as_key(key)
                    key = f"weighted_{key}" if key in results else key
                    if key in (*results, "loss"):
                        raise ValueError(
                            f"several metrics are called {key!r}: name them"
                        )
                    results[key] = float(x)
        return results


class RowLosses:
    """The losses of all outputs of a model.

    Args:
      loss: as `compile` takes it.
      weights: `loss_weights` of `compile`.
      output_names: of the model.
    """

    def __init__(self, loss: Any, weights: Any, output_names: Any):
        _check_names("loss", loss, LOSSES)
        self._values: list[tf.Tensor] = []
        wrapped = keras.tree.map_structure(
            lambda given: None if given is None else RowLoss(given, self._values),
            loss,
            none_is_leaf=True,
        )
        self._parts = [x for x in keras.tree.flatten(wrapped) if x is not None]
        self._loss = CompileLoss(wrapped, weights, output_names=output_names)

    def total(self, y: Any, y_pred: Any, sample_weight: Any, rows: Any) -> tf.Tensor:
        """The loss of a batch; `rows` as of `RowLoss`."""
        self._values.clear()
        for part in self._parts:
            part.rows = rows
        if not self._loss.built:
            with without_values():
                self._loss.build(y, y_pred)
        # Keras's trackers of several losses take rows of padding for examples.
        unused = {id(v): tf.zeros(v.shape, v.dtype) for v in self._loss.variables}
        scope = get_stateless_scope()
        scope.state_mapping.update(unused)
        total = self._loss(y, y_pred, sample_weight)
        for variable in unused:
            del scope.state_mapping[variable]
        return total

    def parts(self) -> NestedMap:
        """The losses of several outputs by Keras's names, after `total`."""
        named = self._loss._flat_losses
        if len(named) < 2:
            return NestedMap()
        names = [as_key(f"{name}_loss") for *_, name in named]
        return NestedMap(dict(zip(names, self._values, strict=True)))

    @property
    def compare_rows(self) -> bool:
        """Whether rows of padding would take part in the loss of others."""
        kinds = (keras.losses.Circle,)
        losses = [x.given for x in self._parts]
        return any(isinstance(x, kinds) or str(x).lower() == "circle" for x in losses)


def _of_rank(mask: tf.Tensor, rank: int) -> tf.Tensor:
    """A mask with dims of size 1 behind it."""
    return mask[(..., *[None] * (rank - mask.shape.rank))]


def is_of_keras(kind: type, method: str) -> bool:
    """Whether a class has a method from Keras, and does as its documentation says."""
    home = next(c for c in kind.__mro__ if method in vars(c)).__module__
    return home.partition(".")[0] in _PACKAGES


def _check_names(field: str, given: Any, known: Iterable[str]) -> None:
    known = [*known, *keras.saving.get_custom_objects()]
    for name in keras.tree.flatten(given):
        if isinstance(name, str) and name not in known and name.lower() not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" do you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"KerasCompile.{field} has {name!r}, which is the name of nothing in "
                f"Keras:{hint or ' see keras.losses and keras.metrics'}"
            )


def _check_adds_up(metric: Any) -> None:
    kind = type(metric)
    for method in ("update_state", "result"):
        if not is_of_keras(kind, method):
            raise ValueError(
                f"the metric {metric.name!r}, a {kind.__name__}, has its own {method}, "
                "and it is not known whether its variables add up over batches: make "
                "it a function of labels and predictions, or train by fit"
            )
