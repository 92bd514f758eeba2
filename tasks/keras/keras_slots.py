"""Keras's optimizers as functions of values: their slots, and an update."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.utils import naming

from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.nested_map import NestedMap, as_key
from meshwright.tasks.keras.keras_scope import (
    from_the_start,
    with_values,
    without_values,
)

# What Keras's optimizers for TensorFlow do by `tf.distribute`, which takes
# `tf.Variable`s only, as those for other backends do it.
_OF_BASE = {
    name: method
    for name, method in vars(BaseOptimizer).items()
    if name in vars(TFOptimizer) and callable(method) and not name.startswith("__")
}


class _OnValues(type("_Base", (TFOptimizer,), _OF_BASE)):
    """Base of optimizers whose variables have the values that a scope gives."""

    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        add = BaseOptimizer.add_variable_from_reference
        variable = add(self, reference_variable, *args, **kwargs)
        self.references[id(variable)] = id(reference_variable)
        return variable


@dataclasses.dataclass(frozen=True, eq=False)
class BuiltOptimizer:
    """A Keras optimizer with variables, none of which has a value.

    Args:
      optimizer: it updates whatever the scope of an update gives as values.
      trained: a variable for each weight that is trained.
      variables: its slots by path.
      slots: their specs.
    """

    optimizer: Any
    trained: Sequence[Any]
    variables: dict[tuple[str, ...], Any]
    slots: dict[tuple[str, ...], WeightSpec]

    @property
    def step_and_rate(self) -> tuple[Any, Any]:
        """The variables of the step and the learning rate."""
        return self.optimizer._iterations, self.optimizer._learning_rate

    def variables_in_order(self, slots: NestedMap) -> list[Any]:
        """The slots' variables in the order of a nested map's leaves."""
        return [self.variables[tuple(p.split("."))] for p, _ in slots.items_by_path()]

    def applied(
        self, values: dict[int, tf.Tensor], grads: Sequence[tf.Tensor]
    ) -> dict[int, tf.Tensor]:
        """The values of variables after an update, by `id` as those before."""
        with with_values(values, type(self.optimizer).__name__) as scope:
            self.optimizer.apply(list(grads))
        return scope.state_mapping


@functools.lru_cache(maxsize=8)
def built(optimizer: Any, items: tuple) -> BuiltOptimizer:
    """A copy of a Keras optimizer with variables for some weights.

    Args:
      optimizer: the optimizer.
      items: of each weight its path, shape, dims and dtype.
    """
    with tf.init_scope():
        copied = _functional(optimizer)
    trained = []
    with from_the_start(), without_values() as made:
        for path, shape, _, dtype in items:
            *scopes, name = path.split(".")
            with contextlib.ExitStack() as stack:
                for scope in scopes:
                    stack.enter_context(keras.name_scope(scope))
                trained.append(keras.Variable("zeros", shape, dtype, name=name))
        copied.build(trained)
        if get_stateless_scope().state_mapping:
            raise ValueError(
                f"KerasOptimizer.optimizer, of class {type(optimizer).__name__}, "
                "begins with the values of the weights, which there are not yet: give "
                "another"
            )
    _check_excluded(copied, trained)
    dims = {id(v): item[2] for v, item in zip(trained, items, strict=True)}
    variables, slots = {}, {}
    # Its `variables` lack some, such as that of Nadam. Integers are those of Adafactor
    # in place of variables; the step and the rate are arguments of an update.
    for variable in made[len(trained) :]:
        if not tf.as_dtype(variable.dtype).is_floating:
            continue
        path = tuple(as_key(part) for part in variable.path.split("/"))
        while path in variables:
            path = (*path[:-1], f"{path[-1]}_")
        variables[path] = variable
        names = dims.get(copied.references.get(id(variable)))
        slots[path] = WeightSpec(
            shape=tuple(variable.shape),
            dims=names or ("slot",) * len(variable.shape),
            initializer=_initializer(variable),
            dtype=tf.as_dtype(variable.dtype),
        )
    return BuiltOptimizer(copied, trained, variables, slots)


def _initializer(variable: Any):
    def initializer(key, shape, dtype, stack_rank=0):
        return tf.cast(variable._initializer(shape, dtype=variable.dtype), dtype)

    return initializer


def _check_excluded(optimizer: Any, trained: Sequence[Any]) -> None:
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    for name in pattern.pattern.split("|") if pattern else ():
        if not any(re.search(name, variable.path) for variable in trained):
            raise ValueError(
                f"KerasOptimizer.optimizer excludes {name!r} from weight decay, which "
                f"is in the path of none of the weights, such as {trained[0].path!r}"
            )


def _functional(optimizer: Any) -> Any:
    """A copy of an optimizer, without variables but for its step and rate."""
    kind = type(optimizer)
    name = naming.to_snake_case(kind.__name__)
    config = optimizer.get_config() | {"learning_rate": 0.0, "name": name}
    copy = kind.from_config(config)
    pattern = "_exclude_from_weight_decay_pattern"
    if hasattr(optimizer, pattern):
        setattr(copy, pattern, getattr(optimizer, pattern))
    copy.references = {}
    # Among its bases, so that what its own class overrides is overridden still.
    copy.__class__ = type(kind.__name__, (kind, _OnValues), {})
    return copy
