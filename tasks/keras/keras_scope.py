"""Keras variables without values."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
from collections.abc import Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import Variable

_WAITING, _NAMES = "uninitialized_variables", "object_name_uids"


@contextlib.contextmanager
def without_values() -> Iterator[list[Variable]]:
    """Yields the variables that are made in the context, which never get values.

    Keras would give them some when the next scope ends, whoever's it is.
    """
    made: list[Variable] = []
    before = list(global_state.get_global_attribute(_WAITING, []))
    init = Variable.__init__

    @functools.wraps(init)
    def init_by_function(self, initializer, shape=None, dtype=None, *args, **kwargs):
        if not callable(initializer) and not isinstance(initializer, str):
            with tf.init_scope():
                value = keras.ops.convert_to_tensor(initializer, dtype)
            shape, dtype = value.shape, value.dtype.name
            initializer = _Constant(value.numpy())
        init(self, initializer, shape, dtype, *args, **kwargs)
        made.append(self)

    Variable.__init__ = init_by_function  # Within a scope Keras takes no values.
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield made
    finally:
        Variable.__init__ = init
        global_state.set_global_attribute(_WAITING, before)


class _Constant:
    """An initializer that gives a value."""

    def __init__(self, value: np.ndarray):
        self._value = value

    def __call__(self, shape, dtype=None):
        return tf.cast(self._value, dtype)


@contextlib.contextmanager
def with_values(
    values: Mapping[int, tf.Tensor], name: str
) -> Iterator[keras.StatelessScope]:
    """A scope in which variables have these values, and keep what they are assigned.

    Args:
      values: by `id` of a variable.
      name: of what has the variables, for messages.

    Raises:
      ValueError: another variable is assigned in the context.
    """
    scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
    scope.state_mapping.update(values)
    with scope:
        yield scope
    if scope.state_mapping.keys() - values.keys():
        raise ValueError(
            f"{name} assigns a variable that is not among its `variables`, and its "
            "value would be lost: make it an attribute of a layer, or train by fit"
        )


@contextlib.contextmanager
def from_the_start() -> Iterator[None]:
    """Has Keras give the same names and seeds whatever has been made before.

    A dtype policy that is set in the context ends with it.
    """
    names, state = global_state.get_global_attribute(_NAMES), random.getstate()
    policy = keras.config.dtype_policy()
    global_state.set_global_attribute(_NAMES, collections.defaultdict(int))
    random.seed(0)  # Keras draws seeds from Python's generator.
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAMES, names)
        random.setstate(state)
        keras.config.set_dtype_policy(policy)
