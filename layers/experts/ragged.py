"""Products of blocks with their experts' matrices by a kernel, where TPUs have it.

Dims: U blocks, C rows of a block, E experts of a device, A contracted, B produced.
"""

from __future__ import annotations

import tensorflow as tf

from meshwright.framework.sharding.placeholders import (
    kernel,
    traced_for,
    traced_partitioner,
)

TPUS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
"""The kinds for which libtpu has the kernel."""
_ROWS_OF_EXPERT = 1024
"""With fewer, in the mean, the loop's transposed products take fewer cycles.

For the kernel the matrices are transposed in memory first (docs/moe.md).
"""


def has_kernel(blocks: tuple[int, int], num_experts: int, *, transposed: bool) -> bool:
    """Whether a kernel computes them, in what is traced now.

    Args:
      blocks: U and C.
      num_experts: E.
      transposed: whether matrices are transposed, as for gradients by rows.
    """
    # The other partitioner ends the process where it meets the op.
    if traced_for() not in TPUS or traced_partitioner() != "shardy":
        return False
    rows = blocks[0] * blocks[1]
    return not transposed or rows >= _ROWS_OF_EXPERT * num_experts


def kernel_products(
    x: tf.Tensor, weight: tf.Tensor, experts: tf.Tensor, *, transposed: bool
) -> tf.Tensor:
    """[U, C, B] of `x` [U, C, A] and its experts' matrices; transposed, the reverse.

    Args:
      x: [U, C, A].
      weight: [E, A, B].
      experts: int32 [U], in no falling order.
      transposed: whether `x` is [U, C, B] and the result [U, C, A].
    """
    (blocks, size, _), count = x.shape, weight.shape[0]
    is_of = tf.equal(experts[:, None], tf.range(count))
    sizes = tf.reduce_sum(tf.cast(is_of, tf.int32), 0) * size
    width = weight.shape[1 if transposed else 2]
    rows = tf.reshape(x, [blocks * size, -1])
    spec = tf.TensorSpec([blocks * size, width], x.dtype)
    part = "transposed" if transposed else "forward"
    (y,) = kernel(f"ragged_{part}", [rows, weight, sizes], [spec], {})
    return tf.reshape(y, [blocks, size, width])
