"""Weight specs, contexts, first values."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.initializers import (
    Constant,
    FanIn,
    Initializer,
    Normal,
)
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    WeightSpec,
    annotate_weights,
    as_gradient,
    initialize,
)
from meshwright.framework.modeling.optimizers.optimizer import slot_spec
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan

KEY = random.key_from_seed(1)
PLAN = ShardingPlan(
    mesh_shape=(2, 4),
    weights={"model": "X", "hidden": "Y"},
    activations={"batch": "X", "model": "Y", "hidden": "Y"},
)


def weight(*shape, dims=None, initializer=None, **kwargs):
    dims = dims or tuple(f"d{i}" for i in range(len(shape)))
    initializer = initializer or Normal()
    return WeightSpec(shape=shape, dims=dims, initializer=initializer, **kwargs)


def test_a_spec_describes_a_weight():
    spec = weight(6, 8, dims=("model", "hidden"))
    assert spec.size == 48 and spec.stack_rank == 0 and spec.dtype == tf.float32
    assert spec.is_matrix and not weight(8, dims=("hidden",)).stacked(3).is_matrix
    assert str(spec.sharding(PLAN)) == "[X,Y]"
    stacked = spec.stacked(3).stacked(5)
    assert stacked.shape == (5, 3, 6, 8) and stacked.stack_rank == 2
    assert stacked.dims == ("layers", "layers", "model", "hidden")
    assert str(stacked.sharding(PLAN)) == "[_,_,X,Y]"
    assert stacked.size == 15 * 48


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"shape": (2, 3.0)},
            r"WeightSpec\.shape\[1\] is 3\.0; it must be a whole number of at least 0",
        ),
        ({"shape": ("a", 3)}, r"WeightSpec\.shape\[0\] is 'a'; it must be a whole"),
        ({"shape": (2, -3)}, r"WeightSpec\.shape\[1\] is -3; it must be a whole"),
        ({"shape": 2, "dims": ("a",)}, r"WeightSpec\.shape is 2; .* such as \(2,\)"),
        (
            {"dims": "ab"},
            r"WeightSpec\.dims is 'ab'; it must be a tuple, such as \('",
        ),
        ({"initializer": 0.0}, r"initializer is 0\.0; .* such as Constant\(0\.0\)"),
        ({"initializer": Normal}, r"initializer is <class .*; it must be an instance"),
    ],
)
def test_what_describes_no_weight_is_refused_by_name(fields, message):
    good = {"shape": (2, 3), "dims": ("a", "b"), "initializer": Normal()}
    with pytest.raises(ValueError, match=message):
        WeightSpec(**good | fields)
    assert WeightSpec(**good | {"shape": (np.int64(2), 0)}).size == 0


def test_a_running_statistic_is_no_matrix_and_stays_one_in_a_stack():
    spec = weight(6, 8, dims=("model", "hidden"), statistic_decay=0.9)
    assert spec.is_statistic and not spec.is_matrix and spec.stacked(3).is_statistic
    assert not weight(6).is_statistic
    with pytest.raises(ValueError, match=r"WeightSpec\.statistic_decay is 2"):
        weight(6, statistic_decay=2)


def test_a_value_comes_back_as_the_gradient_of_a_weight():
    y, w, value = tf.constant([1.0, 2.0]), tf.constant([3.0]), tf.constant([7.0])
    with tf.GradientTape() as tape:
        tape.watch((y, w, value))
        loss = tf.reduce_sum(as_gradient(y, w, value) ** 2)
    dy, dw, dvalue = tape.gradient(loss, (y, w, value))
    np.testing.assert_array_equal(dy, [2.0, 4.0])
    np.testing.assert_array_equal(dw, [7.0])
    assert dvalue is None or not np.any(dvalue)


def test_experts_are_stacked_layers_too():
    experts = weight(2048, 8, 6, dims=("experts", "expert_model", "hidden"))
    assert experts.stack_rank == 1 and experts.stacked(3).stack_rank == 2
    # Of a gating's matrix they are what the product gives.
    assert weight(8, 2048, dims=("gate_model", "gate_experts")).stack_rank == 0


def test_a_spec_names_every_dim():
    with pytest.raises(ValueError, match=r"shape \(6, 8\) but names dims \('model',\)"):
        weight(6, 8, dims=("model",))


def test_scopes_have_paths_names_and_random_numbers_of_their_own():
    ctx = Context(key=KEY)
    keys = [ctx.random_key()]
    with ctx.scope("stack") as outer:
        keys.append(outer.random_key())
        for name in ("a", "b"):
            with outer.scope(name) as inner:
                keys.append(inner.random_key())
                assert inner.path == f"stack.{name}"
    assert len({tuple(key.numpy()) for key in keys}) == 4
    # Only the path counts, not how it was reached.
    again = dataclasses.replace(ctx, path="stack.b").random_key()
    np.testing.assert_array_equal(again, keys[-1])
    with tf.Graph().as_default(), ctx.scope("stack") as c, c.scope("a"):
        assert tf.zeros([1]).op.name == "stack/a/zeros"


def test_without_a_key_nothing_random_happens():
    with (
        Context().scope("dropout") as ctx,
        pytest.raises(ValueError, match=r"layer 'dropout' needs random .* has no key"),
    ):
        ctx.random_key()


def test_a_context_splits_by_the_plan_and_names_the_layer_in_errors():
    ctx = Context(plan=PLAN, path="stack.feed_forward")
    x = tf.zeros([4, 2, 8], tf.bfloat16)
    assert ctx.split(x, ("batch", "sequence", "model")) is x
    message = re.escape("for 'stack.feed_forward.out' (model->Y, hidden->Y)")
    with pytest.raises(ValueError, match=message):
        ctx.split(tf.zeros([4, 8]), ("model", "hidden"), name="out")
    with pytest.raises(
        ValueError,
        match=re.escape(
            "stack.feed_forward: split names 1 of the dims of a tensor of shape "
            "(4, 2, 8): (model); name each"
        ),
    ):
        ctx.split(x, ("model",))


def test_activations_are_cast_on_use():
    ctx = Context(activation_dtype=tf.bfloat16)
    assert ctx.cast(tf.zeros([2])).dtype == tf.bfloat16


def test_a_layer_without_fprop_says_so():
    class Empty(Layer):
        pass

    assert Empty().weights() == NestedMap()
    with pytest.raises(NotImplementedError, match=r"Empty has no fprop: define fprop"):
        Empty().fprop(Context(), NestedMap(), None)


def test_annotate_weights_names_the_weight():
    specs = NestedMap(layer=NestedMap(w=weight(4, 4, dims=("hidden", "hidden"))))
    with pytest.raises(ValueError, match=r"plan for 'layer\.w' \(hidden->Y, hidden->Y"):
        annotate_weights(PLAN, specs, NestedMap(layer=NestedMap(w=tf.zeros([4, 4]))))


def test_a_first_value_depends_on_its_path_alone():
    specs = NestedMap(a=weight(4, 8), b=NestedMap(a=weight(4, 8), w=weight(4, 8)))
    theta = initialize(specs, KEY)
    fewer = initialize(NestedMap(b=NestedMap(w=weight(4, 8))), KEY)
    np.testing.assert_array_equal(theta.b.w, fewer.b.w)
    assert np.any(theta.b.w != theta.b.a) and np.any(theta.b.a != theta.a)
    assert np.any(initialize(specs, random.key_from_seed(2)).a != theta.a)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize(
    "spec,stddev",
    [
        (weight(256, 256, initializer=Normal(stddev=0.02)), 0.02),
        (weight(64, 1024, initializer=FanIn()), 64**-0.5),
        (weight(16, 8, 512, initializer=FanIn(in_dims=2)), 128**-0.5),
        (weight(64, 1024, initializer=FanIn(scale=4.0)), 2 * 64**-0.5),
        # A dim that stacks layers is no fan.
        (weight(64, 512, initializer=FanIn()).stacked(2), 64**-0.5),
    ],
)
def test_spread_of_first_values(spec, stddev, dtype):
    spec = dataclasses.replace(spec, dtype=dtype)
    value = initialize(NestedMap(w=spec), KEY).w
    assert value.dtype == dtype and value.shape == spec.shape
    value = tf.cast(value, tf.float32).numpy()
    assert abs(value.mean()) < 5 * stddev / spec.size**0.5
    np.testing.assert_allclose(value.std(), stddev, rtol=0.02)


def test_constant_first_values():
    spec = weight(3, 2, initializer=Constant(1.5), dtype=tf.bfloat16)
    value = initialize(NestedMap(w=spec), KEY).w
    assert value.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(value, tf.float32), np.full([3, 2], 1.5))
    assert (
        not initialize(NestedMap(w=weight(3, initializer=Constant())), KEY)
        .w.numpy()
        .any()
    )


def test_an_initializer_without_call_says_so():
    with pytest.raises(NotImplementedError):
        initialize(NestedMap(w=weight(2, initializer=Initializer())), KEY)


def test_a_weight_as_a_matrix():
    """Of each layer of a stack; dims that are merged are split by the first alone."""
    spec = WeightSpec(
        shape=(6, 4, 8),
        dims=("model", "heads", "head_dim"),
        initializer=Constant(0.0),
        rows=1,
    ).stacked(3)
    plan = ShardingPlan(mesh_shape=(2, 4), weights={"model": "X", "heads": "Y"})
    matrix = spec.as_matrix(plan)
    assert (matrix.shape, matrix.dims) == ((3, 6, 32), ("layers", "model", "heads"))
    assert matrix.sharding(plan).splits() == (1, 2, 4)
    assert matrix.as_matrix(plan) == matrix
    for stack, like in ((spec, spec), (matrix, matrix)):
        assert spec.like(tf.TensorSpec(stack.shape), plan) == like
    plan = ShardingPlan(mesh_shape=(2, 4), weights={"model": "X"})
    two = dataclasses.replace(spec, rows=2).as_matrix(plan)
    assert (two.shape, two.dims) == ((3, 24, 8), ("layers", "model", "head_dim"))


@pytest.mark.parametrize("weights", [{"head_dim": "Y"}, {"heads": ("X", "Y")}])
def test_a_weight_whose_merged_dims_are_split_otherwise_is_no_matrix(weights):
    spec = WeightSpec(
        shape=(6, 4, 8),
        dims=("model", "heads", "head_dim"),
        initializer=Constant(0.0),
        rows=1,
    )
    assert spec.as_matrix(ShardingPlan(mesh_shape=(2, 4), weights=weights)) is spec
    assert dataclasses.replace(spec, rows=None).as_matrix(ShardingPlan()).rows is None
    with pytest.raises(ValueError, match="rows is 3, but .* has 3 dims in a layer"):
        dataclasses.replace(spec, rows=3)


def test_a_slot_without_a_dim():
    spec = weight(2, 3, dims=("a", "b"))
    assert slot_spec(spec, without_dim=-1) == slot_spec(spec, without_dim=1)
    assert slot_spec(spec, without_dim=-1).dims == ("a",)
    with pytest.raises(
        ValueError, match=r"without_dim is 2, .* 2 dims, \(a, b\): give"
    ):
        slot_spec(spec, without_dim=2)
    with pytest.raises(TypeError, match="'str' object cannot be interpreted"):
        slot_spec(spec, without_dim="b")
