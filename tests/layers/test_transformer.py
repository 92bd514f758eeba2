"""The Transformer layer: residual form, annotations, what it names for saving."""

import collections
import dataclasses
import re

import gin
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.attention.positions import PositionKind, YarnScaling
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.feed_forward import Activation
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.transformer import (
    Order,
    TransformerLayer,
    transformer_layer,
)

SIZES = {"model_dims": 8, "hidden_dims": 32, "num_heads": 4, "head_dim": 2}
X = tf.random.stateless_normal([2, 16, 8], [0, 0])


def build(**kwargs):
    layer = transformer_layer(**SIZES, **kwargs)
    return layer, initialize(layer.weights(), key_from_seed(0))


def test_adds_each_part_of_the_normalized_stream():
    layer, theta = build()
    ctx = Context()
    segments = tf.repeat([[1, 2], [1, 1]], 8, axis=1)
    y = layer.fprop(ctx, theta, X, segment_ids=segments)
    normed = layer.attention_norm.fprop(ctx, theta.attention_norm, X)
    x = X + layer.attention.fprop(ctx, theta.attention, normed, segment_ids=segments)
    normed = layer.feed_forward_norm.fprop(ctx, theta.feed_forward_norm, x)
    x = x + layer.feed_forward.fprop(ctx, theta.feed_forward, normed)
    np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-6)


def test_rotary_positions_of_the_layer_itself_are_set():
    scaling = YarnScaling(factor=4.0, original_length=8)
    layer, _ = build(rotary_base=500000.0, rotary_scaling=scaling, has_memory=True)
    assert layer.attention.rotary_base == 500000.0
    assert layer.attention.rotary_scaling == scaling
    assert layer.cross_attention.rotary_scaling is None


def test_settings_of_t5s_attention_reach_it():
    layer, _ = build(
        positions=PositionKind.RELATIVE,
        num_buckets=6,
        max_distance=20,
        query_scale=1.0,
        has_memory=True,
    )
    assert (layer.attention.num_buckets, layer.attention.max_distance) == (6, 20)
    assert layer.attention.query_scale == layer.cross_attention.query_scale == 1.0
    with pytest.raises(ValueError, match=r"MultiHeadAttention.max_distance is 0"):
        build(max_distance=0)


def test_a_part_that_is_dropped_leaves_the_stream_as_it_was():
    layer, theta = build()
    layer = TransformerLayer(
        attention_norm=layer.attention_norm,
        attention=layer.attention,
        feed_forward_norm=layer.feed_forward_norm,
        feed_forward=layer.feed_forward,
        residual_dropout=Dropout(rate=0.5),
    )
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
    y = layer.fprop(ctx, theta, X)
    # Both parts are dropped, each on its own, at a quarter of the elements.
    assert 0.1 < np.mean(y == X) < 0.4


def test_post_norms_normalize_what_is_added():
    plain, theta = build()
    norm, ctx = RMSNorm(model_dims=8, offset=1.0), Context()
    layer = dataclasses.replace(
        plain, attention_post_norm=norm, feed_forward_post_norm=norm
    )
    weights = initialize(layer.weights(), key_from_seed(0))
    assert not np.any(weights.attention_post_norm.scale)
    theta.attention_post_norm = NestedMap(scale=tf.range(8.0))
    theta.feed_forward_post_norm = NestedMap(scale=tf.range(8.0) - 3)
    y = layer.fprop(ctx, theta, X)
    x = X
    for name in ("attention", "feed_forward"):
        part, before = getattr(plain, name), getattr(plain, f"{name}_norm")
        normed = before.fprop(ctx, theta[f"{name}_norm"], x)
        added = part.fprop(ctx, theta[name], normed).numpy()
        scale = 1 + theta[f"{name}_post_norm"].scale
        x += added / np.sqrt((added**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own_norm", [False, True])
def test_parallel_parts_read_the_same_stream(own_norm):
    layer, theta = build(order=Order.PARALLEL)
    assert "feed_forward_norm" not in theta
    if own_norm:
        layer = dataclasses.replace(layer, feed_forward_norm=RMSNorm(model_dims=8))
        theta.feed_forward_norm = NestedMap(scale=tf.range(8.0))
    ctx = Context()
    y = layer.fprop(ctx, theta, X)
    normed = layer.attention_norm.fprop(ctx, theta.attention_norm, X)
    x = X + layer.attention.fprop(ctx, theta.attention, normed)
    if own_norm:
        normed = layer.feed_forward_norm.fprop(ctx, theta.feed_forward_norm, X)
    x = x + layer.feed_forward.fprop(ctx, theta.feed_forward, normed)
    np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": Order.PARALLEL, "has_memory": True}, "has no place for cross_att"),
        ({"feed_forward_norm": None}, "feed_forward_norm is None, but only with Order"),
    ],
)
def test_an_order_that_cannot_be_is_refused(changes, message):
    parts = {key: changes.pop(key) for key in ["feed_forward_norm"] if key in changes}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(build(**changes)[0], **parts)


def test_no_token_depends_on_other_rows_of_the_batch():
    layer, theta = build(activation=Activation.GATED_SILU)
    y = layer.fprop(Context(), theta, X)
    rows = [layer.fprop(Context(), theta, X[b : b + 1]) for b in range(2)]
    np.testing.assert_allclose(y, tf.concat(rows, axis=0), rtol=1e-5, atol=1e-6)


FINALIZED = ShardingPlan(
    mesh_shape=(2, 4),
    activations={"batch": "X", "model": "Y", "heads": "Y", "hidden": "Y"},
)


def test_annotates_the_activations_of_table_1(hlo_text):
    layer, theta = build()
    ctx = Context(plan=FINALIZED)
    specs = theta.map(tf.TensorSpec.from_tensor), tf.TensorSpec.from_tensor(X)
    hlo = hlo_text(lambda theta, x: layer.fprop(ctx, theta, x), *specs)
    counts = collections.Counter(
        re.findall(
            r"f32\[([\d,]+)\]\S* custom-call\(.*\"Sharding\", "
            r"sharding=\{devices=\[([\d,]+)\]",
            hlo,
        )
    )
    assert counts == {
        ("2,16,4,2", "2,1,4,1"): 4,  # queries, keys, values, context
        ("2,16,32", "2,1,4"): 1,  # hidden
        # What each part reads and gives, and the stream after it.
        ("2,16,8", "2,1,4"): 6,
    }


def test_gin_builds_what_the_sizes_say():
    gin.parse_config(
        """
        transformer_layer.model_dims = 8
        transformer_layer.hidden_dims = 32
        transformer_layer.num_heads = 4
        transformer_layer.head_dim = 2
        transformer_layer.positions = %PositionKind.RELATIVE
        transformer_layer.activation = %Activation.GATED_GELU
        transformer_layer.norm = @LayerNorm
        """
    )
    try:
        layer = gin.get_configurable("transformer_layer")()
    finally:
        gin.clear_config()
    assert layer.attention.positions is PositionKind.RELATIVE
    shapes = {path: spec.shape for path, spec in layer.weights().items_by_path()}
    assert shapes == {
        "attention.relative_bias": (32, 4),
        "attention.w_k": (8, 4, 2),
        "attention.w_o": (4, 2, 8),
        "attention.w_q": (8, 4, 2),
        "attention.w_v": (8, 4, 2),
        "attention_norm.bias": (8,),
        "attention_norm.scale": (8,),
        "feed_forward.w_gate": (8, 32),
        "feed_forward.w_in": (8, 32),
        "feed_forward.w_out": (32, 8),
        "feed_forward_norm.bias": (8,),
        "feed_forward_norm.scale": (8,),
    }


def test_first_weights_keep_the_variance_of_their_input():
    layer = transformer_layer(model_dims=64, hidden_dims=256, num_heads=4, head_dim=32)
    theta = initialize(layer.weights(), key_from_seed(0))
    fans = {"w_q": 64, "w_k": 64, "w_v": 64, "w_o": 128}
    for name, fan in fans.items():
        std = np.std(theta.attention[name])
        np.testing.assert_allclose(std, fan**-0.5, rtol=0.05, err_msg=name)
    np.testing.assert_allclose(np.std(theta.feed_forward.w_in), 64**-0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(theta.feed_forward.w_out), 256**-0.5, rtol=0.05)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_the_stream_is_in_the_activation_dtype(dtype):
    layer, theta = build()
    y = layer.fprop(Context(activation_dtype=dtype), theta, X)
    assert y.dtype == dtype
    exact = layer.fprop(Context(), theta, X)
    np.testing.assert_allclose(tf.cast(y, tf.float32), exact, atol=0.1)
