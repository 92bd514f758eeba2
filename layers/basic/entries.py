"""Entries of a stack of tensors, read and written in loops."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.recompute import computed_once
from meshwright.framework.modeling.shapes import shape_of


def read(stack: tf.Tensor, i: tf.Tensor, *, dim: int = 0) -> tf.Tensor:
    """The entry `i` of `stack` along `dim`."""
    sizes = shape_of(stack)
    sizes[dim] = 1
    piece = xla.dynamic_slice(stack, _start(stack, i, dim), sizes)
    return tf.squeeze(piece, axis=dim)


def write(
    stack: tf.Tensor, value: tf.Tensor, i: tf.Tensor, *, dim: int = 0
) -> tf.Tensor:
    """`stack` with the entry `i` along `dim` replaced."""
    start = _start(stack, i, dim)
    return xla.dynamic_update_slice(stack, tf.expand_dims(value, dim), start)


def add_at(stack: tf.Tensor, value: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    """`stack` with `value` added to entry `i`, in its dtype."""
    # Fused with the write, the read keeps the TPU compiler from writing in place.
    total = computed_once(read(stack, i) + tf.cast(value, stack.dtype))[0]
    return write(stack, total, i)


def _start(stack: tf.Tensor, i: tf.Tensor, dim: int) -> tf.Tensor:
    start = [tf.constant(0)] * stack.shape.rank
    start[dim] = i
    return tf.stack(start)
