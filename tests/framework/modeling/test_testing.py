"""The parity check passes what agrees, and names what does not."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import Layer, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity

PLAN = ShardingPlan(
    mesh_shape=(2, 4),
    weights={"model": "X", "hidden": "Y"},
    activations={"batch": "X", "hidden": "Y"},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Layer):
    """x W, times a number for each row, and its mean; wrong on a mesh if told so."""

    wrong_output: float = 0.0
    wrong_gradient: float = 0.0
    wrong_small_output: float = 0.0
    hidden: str = "hidden"

    def weights(self):
        w = WeightSpec(shape=(6, 7), dims=("model", "hidden"), initializer=FanIn())
        return NestedMap(w=w)

    def fprop(self, ctx, theta, x, *, row):
        h = ctx.split(tf.matmul(x, theta.w), ("batch", self.hidden), name="h")
        small = 1e-5 * tf.reduce_mean(h * h)
        if ctx.plan.mesh.size > 1:
            h *= 1 + self.wrong_output
            small *= 1 + self.wrong_small_output
            h += self.wrong_gradient * (h - tf.stop_gradient(h))
        return [h * row[:, None], tf.reduce_mean(h), small]


def check(layer, **how):
    rng = np.random.default_rng(0)
    x = rng.standard_normal([4, 6], np.float32)
    row = rng.standard_normal(4, np.float32)
    assert_layer_parity(layer, x, plan=PLAN, row=row, **how)


def test_a_layer_that_agrees_passes():
    check(Scaled())


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"wrong_output": 1e-4}, "output 0"),
        ({"wrong_gradient": 1e-4}, "gradient of"),
        ({"wrong_small_output": 0.1}, "output 2"),
    ],
)
def test_a_layer_that_differs_on_the_mesh_is_told_where(wrong, name):
    with pytest.raises(AssertionError, match=f"\n{name}"):
        check(Scaled(**wrong))


def test_a_misspelt_dim_is_told():
    message = (
        "Scaled: dim 'hiden' of 'h' is in no table of the plan, so that nothing splits "
        "it; near it is 'hidden': write that, or give ShardingPlan.activations the "
        "entry 'hiden': None"
    )
    with pytest.raises(AssertionError, match=message):
        check(Scaled(hidden="hiden"))
    check(Scaled(hidden="elsewhere"))


def test_the_tolerance_holds_whatever_the_activation_dtype():
    with pytest.raises(AssertionError, match="\noutput 2"):
        check(Scaled(wrong_small_output=10.0), activation_dtype=tf.bfloat16)
