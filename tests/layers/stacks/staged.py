"""Pipelines beside the layers in a row that they must equal."""

import dataclasses

import tensorflow as tf

from meshwright.framework.modeling.layer import Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.experts.moe import merge_aux, x_and_aux
from meshwright.layers.stacks.pipelines.pipeline import Pipeline


def by_stage(layer, theta):
    """Weights of a `Repeat`, or anything else by layer, as a `Pipeline` has them.

    `plain_weights` goes the other way.
    """
    return theta.map(layer.by_stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged(Layer):
    """On a mesh a pipeline; on one device its layers in a row, by microbatch."""

    pipeline: Pipeline

    def weights(self):
        return self.pipeline.weights()

    def fprop(self, ctx, theta, x, **inputs):
        """The layers' output; of layers with experts it is NestedMap(x, loss)."""
        if ctx.plan.mesh.size > 1:
            y, aux = x_and_aux(self.pipeline.fprop(ctx, theta, x, **inputs))
            return y if aux is None else NestedMap(x=y, loss=merge_aux(aux).loss)
        count = self.pipeline.num_microbatches
        if x.shape[0] % count:  # Then nothing is of all rows of a microbatch.
            count = 1
        # What comes back of a statistic is the mean of the microbatches', not the sum.
        specs = self.weights()
        theta = theta.map(lambda w, s: w / count if s.is_statistic else w, specs)
        theta = self.pipeline.plain_weights(theta)
        outs = []
        for m in range(count):
            rows = {name: value[m::count] for name, value in inputs.items()}
            outs.append(self._in_a_row(ctx, theta, x[m::count], rows))
        xs, losses = zip(*outs, strict=True)
        y = tf.reshape(tf.stack(xs, axis=1), x.shape)
        if losses[0] is None:
            return y
        return NestedMap(x=y, loss=tf.reduce_mean(tf.stack(losses)))

    def _in_a_row(self, ctx, theta, x, inputs):
        losses = []
        for i in range(self.pipeline.stack.count):
            layer = theta.map(lambda w, i=i: w[i])
            x, aux = x_and_aux(self.pipeline.stack.body.fprop(ctx, layer, x, **inputs))
            losses += [] if aux is None else [aux.loss]
        return x, tf.add_n(losses) / len(losses) if losses else None


def state_by_stage(layer: Pipeline, start: NestedMap) -> NestedMap:
    """The plain state with the stack's layers by stage."""

    def unstage(path, value):
        if ".stack." not in f".{path}.":
            return value
        return by_stage(layer, NestedMap(x=tf.constant(value))).x.numpy()

    return start.map_with_path(unstage)
