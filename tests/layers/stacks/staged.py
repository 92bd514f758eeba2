"""Weights by layer as a pipeline has them, by stage: `plain_weights` the other way."""

import tensorflow as tf


def by_stage(layer, theta):
    """Weights of a `Repeat`, or anything else by layer, as a `Pipeline` has them."""
    stages, repeats = layer.num_stages, layer.num_repeats

    def reordered(stack):
        rest = stack.shape[1:]
        in_a_row = layer.layers_of_stage // repeats
        stack = tf.reshape(stack, [repeats, stages, in_a_row, *rest])
        order = [1, 0, 2, *range(3, stack.shape.rank)]
        lead = [stages, layer.layers_of_stage]
        return tf.reshape(tf.transpose(stack, order), [*lead, *rest])

    return theta.map(reordered)
