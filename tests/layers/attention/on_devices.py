"""What tests of attention on eight devices share."""

import dataclasses

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling.layer import Context, Mode, annotate_weights
from meshwright.framework.sharding.plan import ShardingPlan

SPLIT = {"heads": "tensor", "hidden": "tensor"}
PLAN = ShardingPlan(
    mesh_axes=("data", "tensor"),
    mesh_shape=(2, 4),
    weights=SPLIT,
    activations={"batch": "data", **SPLIT},
)
SEQUENCE_PARALLEL = dataclasses.replace(
    PLAN,
    activations={**PLAN.activations, "stream": "tensor"},
    unreduced_gradient_axes=("tensor",),
)


def some_of(all_cases, some):
    """All cases, of which those that are not among `some` are slow."""
    return [
        case if case in some else pytest.param(*case, marks=pytest.mark.slow)
        for case in all_cases
    ]


def gradients_of(layer, plan, shape, partitioner, devices=None):
    """The program of a layer's gradients by weights and by a stream of this shape.

    With the devices of a topology, for them.
    """

    def step(theta, x, key):
        ctx = Context(plan=plan, mode=Mode.TRAIN, key=key)
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            read = annotate_weights(plan, layer.weights(), theta)
            y = layer.fprop(ctx, read, x)
        return tape.gradient(y, (theta, x), output_gradients=y)

    weights = layer.weights()
    by_path = weights.map_with_path(lambda path, spec: spec.sharding(plan, path))
    x = plan.activation_sharding(("batch", "stream", "model"))
    return mw.compile_program(
        step,
        [
            weights.map(lambda s: tf.TensorSpec(s.shape)),
            tf.TensorSpec(shape),
            tf.TensorSpec([2], tf.uint32),
        ],
        plan.mesh,
        in_shardings=[by_path, x, None],
        out_shardings=(by_path, x),
        partitioner=partitioner,
        devices=devices,
    )
