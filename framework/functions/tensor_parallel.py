"""Tensor parallelism for Transformers of Keras layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True, eq=False)
class TensorParallel:
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
        if dim is None or variable.shape[dim] % mesh.axis_size(self.axis):
            return None
        dims = [None] * variable.shape.rank
        dims[dim] = self.axis
        return Sharding.from_dims_mapping(mesh, dims, variable.shape.rank)

    @functools.cached_property
    def _split_dims(self) -> dict[int, int]:
        """By `id` of a variable: the dim that is split."""
        split = split_weights(self.model)
        return {id(weight._value): dim for weight, dim in split}


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
