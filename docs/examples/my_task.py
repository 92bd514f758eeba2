"""A task from data to export: which of two spirals a point is on."""

import dataclasses

import gin
import numpy as np
import tensorflow as tf

from meshwright import framework as mw
from meshwright.tasks import BatchServing, DatasetInput, Task, TaskLoss


def spirals(count=4000, seed=0):
    turn, arm = np.random.default_rng(seed).random(count), np.arange(count) % 2
    angle = np.pi * (2 * turn + arm)
    point = 2 * turn[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    examples = {"point": np.float32(point), "arm": np.float32(arm)}
    return tf.data.Dataset.from_tensor_slices(examples).shuffle(count)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Spirals(Task):
    input: DatasetInput
    hidden: int = 64

    def weights(self):
        shapes = {"into": (2, self.hidden), "out_of": (self.hidden, 1)}
        dims = {"into": ("point", "hidden"), "out_of": ("hidden", "logit")}
        how = {"initializer": mw.FanIn(scale=4.0)}
        return mw.NestedMap(
            {n: mw.WeightSpec(shape=shapes[n], dims=dims[n], **how) for n in shapes}
        )

    def answer(self, ctx, theta, batch):
        hidden = ctx.split(tf.tanh(batch.point @ theta.into), ("batch", "hidden"))
        return mw.NestedMap(logit=(hidden @ theta.out_of)[:, 0])

    def loss(self, ctx, theta, batch):
        logit = self.answer(ctx, theta, batch).logit
        losses = tf.nn.sigmoid_cross_entropy_with_logits(batch.arm, logit)
        right = tf.cast((logit > 0) == (batch.arm > 0.5), tf.float32)
        sums = mw.NestedMap(loss=losses, right=right, rows=tf.ones_like(losses))
        sums = sums.map(lambda x: tf.reduce_sum(x * batch.row_weights))
        return TaskLoss(loss=sums.loss / sums.rows, sums=sums)

    def metrics(self, sums):
        return {name: sums[name] / sums["rows"] for name in ("loss", "right")}

    @property
    def serving(self):
        return BatchServing(self, ("point",), self.answer)
