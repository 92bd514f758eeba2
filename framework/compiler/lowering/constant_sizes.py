"""Sizes that are constant whatever the values are, which TF does not recognize.

`tf.math.bincount` and functions built on it, such as Keras's CategoryEncoding, clamp
the number of bins between `minlength` and `maxlength`. Where these are the same number,
TF's own jit still computes it from the arguments of each call; a program has none when
it is compiled.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def fold_clamps(graph: tf.Graph) -> None:
    """Replaces `min(a, max(b, x))` by a wherever the scalars a <= b are constants."""
    for op in graph.get_operations():
        if op.type != "Minimum" or not _is_number(op.outputs[0]):
            continue
        bound, clamped = _constant_and_other(op)
        if bound is not None and clamped.op.type == "Maximum":
            floor, _ = _constant_and_other(clamped.op)
            if floor is not None and bound <= floor:
                _replace(op.outputs[0], bound)


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank == 0 and tensor.dtype.is_integer


def _constant_and_other(op: tf.Operation) -> tuple[np.ndarray | None, tf.Tensor | None]:
    for value, rest in (op.inputs, reversed(op.inputs)):
        if (constant := tf.get_static_value(value)) is not None:
            return constant, rest
    return None, None


def _replace(tensor: tf.Tensor, value: np.ndarray) -> None:
    with tf.control_dependencies(None):
        constant = tf.constant(value, tensor.dtype)
    for op in tensor.consumers():
        for number, operand in enumerate(op.inputs):
            if operand is tensor:
                op._update_input(number, constant)
