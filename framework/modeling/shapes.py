"""Shapes with a batch of any size, as in exported models, and copies along a dim."""

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


def copies_of_each(x: tf.Tensor, count: int, dim: int) -> tf.Tensor:
    """`x` with `count` copies, in a row, of each of its entries along `dim`."""
    if count == 1:
        return x
    before, (size, *after) = shape_of(x)[:dim], shape_of(x)[dim:]
    copies = tf.broadcast_to(tf.expand_dims(x, dim + 1), [*before, size, count, *after])
    return tf.reshape(copies, [*before, size * count, *after])
