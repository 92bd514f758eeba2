"""Products with weights, flattened to matrices where no sequence is split."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.basic.linear import contract, contract_each

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("x", "weight", "dims"),
    [
        ([2, 3, 4], [4, 5], 1),
        ([2, 3, 4], [4, 5, 6], 1),
        ([2, 3, 4, 5], [4, 5, 6], 2),
        ([4], [4, 5], 1),
    ],
)
def test_contract(x, weight, dims):
    x, weight = (RNG.standard_normal(s).astype(np.float32) for s in (x, weight))
    product = contract(Context(), tf.constant(x), tf.constant(weight), dims=dims)
    expected = np.tensordot(x, weight, axes=dims)
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "weight", "dims"), [([2, 3, 4], [4, 5, 6], 1), ([2, 4, 5], [4, 5, 6], 2)]
)
def test_a_weight_may_come_as_a_matrix(x, weight, dims):
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in (x, weight))
    matrix = w.reshape([np.prod(weight[:dims]), -1])
    x, w, matrix = map(tf.constant, (x, w, matrix))
    want = contract(Context(), x, w, dims=dims)
    got = contract(Context(), x, matrix, dims=dims, shape=weight)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("gradient_dtype", [None, tf.float64])
def test_rows_of_a_split_sequence_stay_as_they_are(gradient_dtype):
    """Flattened they would be gathered; and no product is there for each row."""
    plan = ShardingPlan(mesh_shape=(2, 4), activations={"sequence": "Y"})
    split, whole = (
        Context(plan=plan, gradient_dtype=gradient_dtype)
        for plan in (plan, ShardingPlan())
    )
    shapes = ([2, 12, 8], [8, 4, 6])
    x, w = (tf.constant(RNG.standard_normal(s), tf.float32) for s in shapes)

    def gradients(ctx, x, w):
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = contract(ctx, x, w)
            loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32)))
        return y, *tape.gradient(loss, (x, w))

    for got, want in zip(gradients(split, x, w), gradients(whole, x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    traced = tf.function(lambda x, w: gradients(split, x, w), autograph=False)
    ops = traced.get_concrete_function(x, w).graph.get_operations()
    assert not any(op.type == "MatMul" for op in ops)
    sizes = [out.shape.num_elements() or 0 for op in ops for out in op.outputs]
    assert max(sizes) == 2 * 12 * 4 * 6


def test_contract_each_flattens_its_input_once(hlo_text):
    """Two flattened copies would be gathered one by one on a mesh."""
    x, weight = tf.TensorSpec([2, 3, 4]), tf.TensorSpec([4, 5])
    hlo = hlo_text(
        lambda x, w, v: contract_each(Context(), x, [w, v]), x, weight, weight
    )
    assert hlo.count("f32[6,4]{1,0} reshape(") == 1
    assert hlo.count(" dot(") == 2


def test_dims_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"'a.b' takes .* dims are \[4, 5\]"):
        contract(Context(path="a.b"), tf.zeros([2, 5, 4]), tf.zeros([4, 5, 6]), dims=2)
