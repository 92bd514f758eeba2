"""Stages need not divide the layers, and microbatches not the batch.

Dims: M model, H hidden.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.framework.testing import assert_layer_parity
from tests.layers.stacks.full_body import (
    GSPMD,
    INPUTS,
    MANUAL,
    NOTHING,
    SAVED,
    SHARDY,
    Body,
    H,
    M,
    assert_parity,
    compiled,
    pipeline,
    plain_theta,
    plan,
)
from tests.layers.stacks.staged import Staged, by_stage

UNEVEN = [  # Layers last.
    ((2, 3), (2, 2, 2), {}, SHARDY, 5),
    ((2, 3, 2), (2, 2, 2), {"deferred": ("w_.*",)}, SHARDY, 7),
    ((4, 6, 1, MANUAL), (4, 2, 1), NOTHING, GSPMD, 6),
    ((4, 6, 2), (2, 2, 2), {"deferred": ("w_out",), **SAVED}, GSPMD, 5),
]


@pytest.mark.parametrize("sizes,mesh,stack,partitioner,layers", UNEVEN, ids=str)
def test_stages_need_not_divide_the_layers(sizes, mesh, stack, partitioner, layers):
    """The last layers are none: their weights have no gradient."""
    layer = pipeline(*sizes, **stack, num_layers=layers)
    program = compiled(layer, plan(*mesh), partitioner)
    assert_parity(layer, program)
    theta = by_stage(layer, plain_theta(layers)).map(lambda t: t.numpy())
    gradients = program.unshard(program(theta, INPUTS)).theta
    is_none = layer.schedule.numbers(layer.schedule.in_a_row(layers)) >= layers
    assert is_none.any()
    for path, gradient in gradients.items_by_path():
        assert not np.asarray(gradient)[is_none].any(), path
    assert layer.extra_flops(1) == -2 * is_none.sum() * (2 * M * H)


class Rows(Body):
    """A layer with nothing on the side."""

    def weights(self):
        weights = super().weights()
        return NestedMap(w_in=weights.w_in, w_out=weights.w_out)

    def fprop(self, ctx, theta, x, *, memory, segment_ids):
        theta = NestedMap(theta, average=tf.zeros([H]))
        whole = dataclasses.replace(ctx, key=None)
        inputs = {"memory": memory, "segment_ids": segment_ids}
        return super().fprop(whole, theta, x, **inputs).x


@pytest.mark.parametrize(
    ("sizes", "partitioner", "more"),
    [
        ((2, 4), SHARDY, {"deferred": ("w_.*",)}),
        ((2, 4, 2), GSPMD, {}),
        ((2, 4, 1, MANUAL), GSPMD, NOTHING),
    ],
)
def test_microbatches_need_not_divide_the_batch(sizes, partitioner, more):
    layer = Staged(pipeline=pipeline(*sizes, body=Rows(), num_layers=4, **more))
    inputs = INPUTS.map(lambda t: np.concatenate([t, -t[:2]]).astype(t.dtype))
    assert_layer_parity(
        layer, inputs.pop("x"), plan=plan(2, 2, 2), partitioner=partitioner, **inputs
    )
