"""A loss at the length of its batch: one program with a part for each bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from meshwright.framework.modeling.layer import Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.task import TaskLoss


def loss_by_length(
    loss: Callable[[NestedMap, int], TaskLoss],
    mode: Mode,
    theta: NestedMap,
    lengths: tf.Tensor,
    buckets: Sequence[int],
) -> TaskLoss:
    """The `loss` at the shortest bucket that holds every row of the batch.

    A compiled program has one shape of batches. So batches come padded to the longest
    bucket, and the program branches, on all devices alike, to a part that cuts them: a
    step takes the time of its bucket, and the memory of the longest bucket. With one
    bucket there is no branch.

    Args:
      loss: (theta, bucket) -> the loss of the batch, cut to the bucket's length. Its
        sums have the same shapes for each bucket.
      mode: in `Mode.TRAIN` the loss can be differentiated once, by `theta`.
      theta: weights.
      lengths: int32 [B], lengths of the rows.
      buckets: the buckets' lengths, ascending.
    """
    if len(buckets) == 1:
        return loss(theta, buckets[0])
    which = tf.searchsorted(tf.constant(buckets), tf.reduce_max(lengths)[None])[0]
    which = tf.minimum(which, len(buckets) - 1)
    traced = {}

    def branch(bucket: int, leaves: Sequence[tf.Tensor]):
        def run() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                result = loss(theta.pack(leaves), bucket)
            traced["sums"] = result.sums
            values = [result.loss, *result.sums.leaves()]
            if mode is Mode.EVAL:
                return values
            zero = tf.UnconnectedGradients.ZERO
            gradients = tape.gradient(result.loss, leaves, unconnected_gradients=zero)
            return [*values, *gradients]

        return run

    @tf.custom_gradient
    def switch(*leaves: tf.Tensor):
        # TF's own gradient of a branch would hand on the intermediates of all branches.
        # The leaves are hidden from outer tapes, which would want a gradient of the
        # gradient.
        leaves = [tf.stop_gradient(leaf) for leaf in leaves]
        out = tf.switch_case(which, [branch(n, leaves) for n in buckets])
        count = 1 + len(traced["sums"].leaves())

        def gradient(d_loss: tf.Tensor, *d_sums: tf.Tensor):
            del d_sums
            return [d_loss * g for g in out[count:]]

        return out[:count], gradient

    total, *sums = switch(*theta.leaves())
    return TaskLoss(loss=total, sums=traced["sums"].pack(sums))
