"""Layouts of Keras models: tensor parallelism, plans, and that of a step of `fit`."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from meshwright.framework.functions.keras_files import variables_of
from meshwright.framework.functions.layout import Layout, layout_notes, path_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm


@dataclasses.dataclass(frozen=True, eq=False)
class TensorParallel(Layout):
    """Splits attention by heads, feed-forward layers by units, embeddings by words.

    It knows weights by the layers that they belong to, and splits them as Megatron-LM
    does (Shoeybi et al. 2019):

    - `EinsumDense` to two dims of its own, as queries, keys and values are made: the
      first of the two, the heads. From two dims, as a result of attention: the first.
    - `Dense`, and `EinsumDense` likewise, to more units than it has inputs: its units.
      To fewer: its inputs, so that each device adds up a part.
    - `Embedding`: its rows.

    Other weights, and dims that the axis does not divide, are left to completion.

    Args:
      model: the Keras model.
      axis: the mesh axis that splits them.
    """

    model: Any
    axis: str

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides.

        Raises:
          ValueError: the model has no layer that could be split.
        """
        if not self._split_dims:
            raise ValueError(
                f"{self.model.name}: none of its layers is a Dense, EinsumDense or "
                "Embedding that can be split: pass a table in place of 'tensor'"
            )
        dim = self._split_dims.get(id(variable))
        if dim is None or self._is_uneven(variable, dim, mesh):
            return None
        dims = [None] * variable.shape.rank
        dims[dim] = self.axis
        return Sharding.from_dims_mapping(mesh, dims, variable.shape.rank)

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """Why it is not split."""
        if id(variable) not in self._split_dims:
            return '"tensor" splits no dim of it'
        return self.missed(variable, mesh)

    def missed(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """That the axis does not divide the dim."""
        dim = self._split_dims.get(id(variable))
        if dim is None or not self._is_uneven(variable, dim, mesh):
            return ""
        size, count = variable.shape[dim], mesh.axis_size(self.axis)
        return (
            f'"tensor" would split dim {dim} by {self.axis}, but {count} does not '
            f"divide {size}; change the size, or give a row, which pads it"
        )

    def _is_uneven(self, variable: tf.Variable, dim: int, mesh: DeviceMesh) -> bool:
        return bool(variable.shape[dim] % mesh.axis_size(self.axis))

    @functools.cached_property
    def _split_dims(self) -> dict[int, int]:
        """By `id` of a variable: the dim that is split."""
        split = split_weights(self.model)
        return {id(weight._value): dim for weight, dim in split}


@dataclasses.dataclass(frozen=True, eq=False)
class Planned(Layout):
    """Splits the dims of weights as a plan says for their names, see `names_of_dims`.

    Optimizer slots are left to completion, which splits them as their weights.

    Args:
      model: the Keras model.
      plan: names of dims to mesh axes; of activations the batch alone.

    Raises:
      ValueError: the plan splits a dim by a name that Keras's layers do not give.
    """

    model: Any
    plan: ShardingPlan

    def __post_init__(self):
        tables = {"weights": NAMES, "activations": ("batch",)}
        for table, known in tables.items():
            for name in getattr(self.plan, table):
                if name not in known:
                    raise ValueError(
                        f"{self.model.name}: {table}[{name!r}] of the plan is for no "
                        f"dim of a Keras model, whose names there are {known}: leave "
                        "it out, or pass a table from regular expressions"
                    )

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides."""
        del mesh  # The plan's.
        dims = self._dims.get(id(variable))
        return dims and self.plan.weight_sharding(dims, path_of(variable))

    @functools.cached_property
    def _dims(self) -> dict[int, tuple[str, ...]]:
        """By `id` of a variable: the names of its dims."""
        split = {id(weight): dim for weight, dim in split_weights(self.model)}
        return {
            id(weight._value): names_of_dims(tuple(weight.shape), split.get(id(weight)))
            for weight in self.model.variables
        }


@dataclasses.dataclass(frozen=True, eq=False)
class StepLayout(Layout):
    """The layout of a model, for one of its steps.

    Args:
      layout: of the model's variables.
      model: the Keras model.
      mesh: the device mesh.
      method: that makes the step.
      is_told: whether what it does was logged.
    """

    layout: Layout
    model: Any
    mesh: DeviceMesh
    method: str
    is_told: threading.Event = dataclasses.field(default_factory=threading.Event)

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The layout's."""
        return self.layout.sharding_of(variable, mesh)

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """The layout's."""
        return self.layout.reason(variable, mesh)

    def check(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Compares a table with all variables, which the train step has built."""
        if self.method == "train_step":
            self.layout.check(variables_of(self.model), self.model.name)

    def report(
        self, variables: Sequence[tf.Variable], forms: Sequence[StoredForm | None]
    ) -> None:
        """Logs once what the layout does to the weights of the train step."""
        if self.method != "train_step" or self.is_told.is_set():
            return
        self.is_told.set()
        notes, is_lacking = layout_notes(self.layout, self.mesh, variables, forms)
        level = logging.WARNING if is_lacking else logging.INFO
        logging.log(level, "%s: %s", self.model.name, notes)


NAMES = ("tensor", "fsdp", "other")


def names_of_dims(shape: tuple[int, ...], split: int | None) -> tuple[str, ...]:
    """The names of a weight's dims for a sharding plan.

    Args:
      shape: of the weight.
      split: the dim that tensor parallelism splits, if any.

    Returns:
      "tensor" for that dim, "fsdp" for the largest other one of a weight of two dims or
      more, and "other" for the rest.
    """
    names = ["other"] * len(shape)
    if split is not None:
        names[split] = "tensor"
    rest = [i for i in range(len(shape)) if i != split]
    if len(shape) > 1:
        names[max(rest, key=lambda i: shape[i])] = "fsdp"
    return tuple(names)


def split_weights(model: Any) -> list[tuple[Any, int]]:
    """The weights of a Keras model to split, and the dim of each."""
    pairs = []
    for layer in model._flatten_layers():
        for weight in layer.weights if not layer._layers else ():
            dim = _split_dim(layer, weight)
            if dim is not None:
                pairs.append((weight, dim))
    return pairs


def _split_dim(layer: Any, weight: Any) -> int | None:
    """The dim of a layer's weight that tensor parallelism splits."""
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    if "Embedding" in kinds and weight is layer._embeddings:
        return 0
    if not kinds & {"Dense", "EinsumDense"} or weight is not layer._kernel:
        return None
    equation = getattr(layer, "equation", "ab,bc->ac")
    inputs, rest = equation.replace("...", "").split(",")
    kernel, outputs = rest.split("->")
    made = [i for i, dim in enumerate(kernel) if dim in outputs and dim not in inputs]
    summed = [i for i, dim in enumerate(kernel) if dim in inputs and dim not in outputs]
    if (len(made), len(summed)) == (2, 1):
        return made[0]
    if (len(made), len(summed)) == (1, 2):
        return summed[0]
    if (len(made), len(summed)) != (1, 1):
        return None
    units, fan_in = weight.shape[made[0]], weight.shape[summed[0]]
    if units == fan_in:
        return None
    return made[0] if units > fan_in else summed[0]
