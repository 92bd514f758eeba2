"""Counter-based random numbers that partition (Threefry-2x32, Salmon et al. 2011).

TF's stateless ops lower to XLA's RngBitGenerator, which a partitioned program evaluates
in full on every device before it slices. This generator is elementwise arithmetic over
an iota, so each device makes its own shard, and an element's value depends on its index
and the key alone: not on the mesh, the partitioner or the process count.

A key is a uint32 tensor of shape [2].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.recompute import computed_once

_Words = tf.Tensor | np.ndarray
"""uint32."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MASK_ROUNDS = 6


def key_from_seed(seed: int) -> tf.Tensor:
    """A key from a Python integer of up to 64 bits."""
    return tf.constant([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], tf.uint32)


def fold_in(key: tf.Tensor, data: int | str | Sequence[str] | tf.Tensor) -> tf.Tensor:
    """A new key from `key` and a name, a Python integer or an integer tensor.

    N names, a tensor [N], or a key [2, N] give N keys, [2, N].
    """
    if isinstance(data, str):
        data = _number_of(data)
    elif isinstance(data, Sequence):
        data = tf.constant([*map(_number_of, data)], tf.uint32)
    if not tf.is_tensor(data):
        data = tf.constant(data & 0xFFFFFFFF, tf.uint32)
    data = tf.cast(data, tf.uint32)
    # Counters of `bits` fill the low word first; the high word marks a fold apart.
    return tf.stack(_threefry(key, _u32(0xFFFFFFFF) + key[0], data + key[1]))


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def bits(key: tf.Tensor, shape: Sequence[int], first: int = 0) -> tf.Tensor:
    """uint32 random bits of static `shape`, from element `first` * 2^32 of a key on."""
    words = _threefry(key, *_keyed_counters(key, shape, first))
    return tf.bitwise.bitwise_xor(*words)


def uniform(key: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """float32 in [0, 1), with 24 random bits."""
    mantissa = tf.bitwise.right_shift(bits(key, shape), _u32(8))
    # Through int32: a uint32 to float32 conversion is slow where it has no instruction.
    return tf.cast(tf.cast(mantissa, tf.int32), tf.float32) * 2.0**-24


def normal(key: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """float32 standard normal, by the inverse error function."""
    # Centred in its 2^-24 wide bin, except the last: it would be rounded up to 1, whose
    # normal is infinite.
    centred = uniform(key, shape) + 2.0**-25
    return math.sqrt(2.0) * tf.math.erfinv(
        tf.minimum(2.0 * centred - 1.0, 1 - 2.0**-23)
    )


def bernoulli(key: tf.Tensor, probability: float, shape: Sequence[int]) -> tf.Tensor:
    """bool, True with the given probability."""
    return uniform(key, shape) < probability


def keep_mask(key: tf.Tensor, rate: float, shape: Sequence[int]) -> tf.Tensor:
    """bool of static `shape`, False with the probability `rate`: for dropout.

    Cheaper than `bernoulli`, which takes twenty rounds of Threefry for an element. Here
    each row, an index into all dims but the last, and each column has two words of
    `bits`, and an element the sums of its row's and its column's, which six rounds mix:
    after three, elements at the corners of rectangles still depend on each other, after
    four no more (tests/framework/modeling/test_random.py). Crush, which Threefry
    passes, was not run on it.
    """
    shape = [int(n) for n in shape]
    if not shape:
        return keep_mask(key, rate, [1])[0]
    return kept(*computed_once(*keep_words(key, shape)), rate)


def keep_words(key: tf.Tensor, shape: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """The words of rows, uint32 [2, ..., 1], and columns, [2, n], of a `keep_mask`."""
    rows = _summed(key, [2, *shape[:-1], 1])
    return rows, _summed(key, [2, shape[-1]], first=2**31)


def _summed(key: tf.Tensor, shape: Sequence[int], first: int = 0) -> tf.Tensor:
    """`bits`, added up in twos.

    XLA's CPU compiler drops barriers, takes twenty rounds for cheap, and computes them
    again for each element that reads a broadcast word; a sum it does not (jaxlib
    0.10.2): so a mask of 2^20 elements takes 3 ms of CPU time, and not 144.
    """
    return tf.reduce_sum(bits(key, [2, *shape], first), 0)


def kept(rows: tf.Tensor, columns: tf.Tensor, rate: float) -> tf.Tensor:
    """The part of a `keep_mask` that some of its rows and columns make."""
    x0, x1 = rows[0] + columns[0], rows[1] + columns[1]
    for by in sum(_ROTATIONS, ())[:_MASK_ROUNDS]:
        x0, x1 = _mixed(x0, x1, by)
    # Signed comparisons are cheaper.
    return tf.bitcast(x1, tf.int32) >= tf.constant(round(rate * 2**32) - 2**31)


def _keyed_counters(
    key: tf.Tensor, shape: Sequence[int], first: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Row-major element numbers as two uint32 words plus the key's two words.

    They begin with `first` in the first word.

    The trailing dims count in the second word. Words split between dims, so that no
    64-bit arithmetic is needed.
    """
    shape = [int(n) for n in shape]
    words: list[list[tuple[int, int]]] = [[], []]
    word, stride = 1, 1
    for dim in reversed(range(len(shape))):
        if stride * shape[dim] > 2**32:
            word, stride = word - 1, 1
        if word < 0 or shape[dim] > 2**32:
            raise ValueError(f"shape {tuple(shape)} has too many elements for one key")
        words[word].append((dim, stride))
        stride *= shape[dim]
    high = key[0] + _u32(first) if first else key[0]
    return _row_major(high, shape, words[0]), _row_major(key[1], shape, words[1])


def _row_major(
    start: tf.Tensor, shape: Sequence[int], strides: Sequence[tuple[int, int]]
) -> tf.Tensor:
    total = tf.reshape(start, [1] * len(shape))
    for dim, stride in strides:
        along = [1] * len(shape)
        along[dim] = shape[dim]
        index = tf.cast(tf.range(shape[dim]), tf.uint32) * _u32(stride)
        total = total + tf.reshape(index, along)
    return tf.broadcast_to(total, shape)


def _u32(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint32)


def _rotate(x: _Words, by: int) -> _Words:
    if not tf.is_tensor(x):
        return x << np.uint32(by) | x >> np.uint32(32 - by)
    left = tf.bitwise.left_shift(x, _u32(by))
    return tf.bitwise.bitwise_or(left, tf.bitwise.right_shift(x, _u32(32 - by)))


def _xor(x: _Words, y: _Words) -> _Words:
    # TF's operator would put each op into a name scope of its own.
    return tf.bitwise.bitwise_xor(x, y) if tf.is_tensor(x) else x ^ y


def _mixed(x0: _Words, x1: _Words, by: int) -> tuple[_Words, _Words]:
    """A round of Threefry."""
    x0 = x0 + x1
    return x0, _xor(_rotate(x1, by), x0)


def _threefry(
    key: tf.Tensor, x0: tf.Tensor, x1: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Twenty rounds of Threefry-2x32 on counter words to which `key` was added."""
    if tf.executing_eagerly():  # By NumPy: of a scalar in a fortieth of TF's time.
        words = _rounds(*(np.atleast_1d(of.numpy()) for of in (key, x0, x1)))
        shape = np.broadcast_shapes(x0.shape, x1.shape)
        return tuple(tf.constant(word.reshape(shape)) for word in words)
    with tf.name_scope("threefry"):
        return _rounds_in_one_op(key, x0, x1)


def _rounds(key: _Words, x0: _Words, x1: _Words) -> tuple[_Words, _Words]:
    k0, k1 = key[0], key[1]
    k2 = _xor(_xor(k0, k1), np.uint32(0x1BD11BDA))
    schedule = (k0, k1, k2)
    for group in range(5):
        for by in _ROTATIONS[group % 2]:
            x0, x1 = _mixed(x0, x1, by)
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


# One op instead of 170, as TF builds and copies graphs op by op in Python.
_rounds_in_one_op = tf.function(_rounds, autograph=False)
