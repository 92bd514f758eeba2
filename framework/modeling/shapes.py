"""Shapes with a batch of any size, as in exported models, and rows along a dim."""

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


def take_rows(values: tf.Tensor, beam: tf.Tensor, dim: int) -> tf.Tensor:
    """Rows of `values`, K of which stand for each of B, in another order.

    Args:
      values: [..., B * K, ...], with the rows along `dim`.
      beam: int32 [..., B, K], which of its K rows is taken. Dims before B are as those
        of `values`, or 1, or absent.
      dim: the number of the dim.

    Returns:
      A tensor like `values`. It is a sum, which a split dim partitions.
    """
    given, beams = shape_of(values), beam.shape[-1]
    before, after = given[:dim], given[dim + 1 :]
    here = tf.range(beams) == beam[..., None]
    missing = dim + 3 - here.shape.rank
    here = tf.reshape(here, [*[1] * missing, *shape_of(here), *[1] * len(after)])
    split = tf.reshape(values, [*before, -1, 1, beams, *after])
    zero = tf.zeros([], values.dtype)
    taken = tf.reduce_sum(tf.where(here, split, zero), axis=dim + 2)
    return tf.reshape(taken, given)
