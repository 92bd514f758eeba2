"""Shapes with a batch of any size, as in exported models."""

from __future__ import annotations

import tensorflow as tf


def shape_of(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """The size of each dim: a number where it is known, else an int32 scalar.

    For reshapes where `tensor.shape` may have a None. In a program for a mesh all sizes
    are numbers.
    """
    known = tf.TensorShape(tensor.shape).as_list()
    if None not in known:
        return known
    given = tf.shape(tensor)
    return [given[i] if size is None else size for i, size in enumerate(known)]
