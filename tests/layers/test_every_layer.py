"""What holds for every layer: gradients, 16-bit activations, no tables, bad input."""

import math

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.mask_rules import MaskKind
from meshwright.layers.attention.positions import PositionKind, YarnScaling
from meshwright.layers.attention.relative.relative_attention import RelativeAttention
from meshwright.layers.basic.embedding import (
    Lookup,
    Softmax,
    SoftmaxKind,
    TokenEmbedding,
)
from meshwright.layers.basic.feed_forward import Activation, FeedForward
from meshwright.layers.basic.normalization import (
    BatchNorm,
    GroupNorm,
    LayerNorm,
    RMSNorm,
)
from meshwright.layers.conformer import conformer_layer
from meshwright.layers.convolutions.convolution import DepthwiseConv1D
from meshwright.layers.transformer import (
    Order,
    TransformerLayer,
    transformer_layer,
)

B, S, M, V = 2, 8, 4, 11
KEY = key_from_seed(0)


def attention(**kwargs) -> MultiHeadAttention:
    sizes = {"num_heads": 2, "head_dim": 6, "num_buckets": 4, "max_distance": 6}
    return MultiHeadAttention(model_dims=M, dropout_rate=0.2, **sizes, **kwargs)


def feed_forward(activation: Activation) -> FeedForward:
    return FeedForward(
        model_dims=M, hidden_dims=10, activation=activation, dropout_rate=0.2
    )


def embedding(lookup: Lookup, softmax: SoftmaxKind) -> TokenEmbedding:
    return TokenEmbedding(vocab_size=V, model_dims=M, lookup=lookup, softmax=softmax)


def post_normed() -> TransformerLayer:
    """With everything that published models have beyond the usual layer."""
    norm = RMSNorm(model_dims=M, offset=1.0)
    return TransformerLayer(
        attention_norm=norm,
        attention=attention(
            positions=PositionKind.ROTARY,
            rotary_scaling=YarnScaling(factor=4.0, original_length=8),
            use_bias=True,
            use_out_bias=False,
            qk_norm=RMSNorm(model_dims=6, offset=1.0),
            query_scale=0.3,
        ),
        attention_post_norm=norm,
        feed_forward_norm=norm,
        feed_forward=feed_forward(Activation.GATED_GELU),
        feed_forward_post_norm=norm,
    )


LAYERS = {
    "rms_norm": RMSNorm(model_dims=M),
    "layer_norm": LayerNorm(model_dims=M),
    "group_norm": GroupNorm(model_dims=M, num_groups=2),
    "batch_norm": BatchNorm(model_dims=M),
    "depthwise": DepthwiseConv1D(model_dims=M, window=3),
    "relative_attention": RelativeAttention(
        model_dims=M, num_heads=2, head_dim=6, dropout_rate=0.2
    ),
    **{
        f"attention_{p.value}": attention(positions=p)
        for p in PositionKind
        if p is not PositionKind.SHARED  # It is of a stack.
    },
    "attention_bias": attention(use_bias=True, mask=MaskKind.FULL),
    **{f"feed_forward_{a.value}": feed_forward(a) for a in Activation},
    "feed_forward_bias": FeedForward(model_dims=M, hidden_dims=10, use_bias=True),
    "softmax": Softmax(model_dims=M, vocab_size=V),
    "transformer": transformer_layer(
        model_dims=M, hidden_dims=10, num_heads=2, head_dim=6, dropout_rate=0.2
    ),
    "transformer_layer_norm": transformer_layer(
        model_dims=M, hidden_dims=10, num_heads=2, head_dim=6, norm=LayerNorm
    ),
    "transformer_post_norms": post_normed(),
    "transformer_parallel": transformer_layer(
        model_dims=M, hidden_dims=10, num_heads=2, head_dim=6, order=Order.PARALLEL
    ),
    "conformer": conformer_layer(
        model_dims=M, hidden_dims=10, num_heads=2, head_dim=6, window=3
    ),
}
EMBEDDINGS = {
    f"embedding_{lookup.value}_{softmax.value}": embedding(lookup, softmax)
    for lookup in Lookup
    for softmax in SoftmaxKind
}
SPLIT = {"heads": "Y", "hidden": "Y", "vocab": "Y"}
PLAN = ShardingPlan(  # Hidden and vocabulary dims are no multiples of 4.
    mesh_shape=(2, 4),
    weights={"model": "X", **SPLIT},
    activations={"batch": "X", "model": "Y", **SPLIT},
)
WITH_GSPMD = (  # Others are parts of these, or next to the same.
    "attention_relative",
    "attention_bias",
    "group_norm",
    "feed_forward_gated_gelu",
    "softmax",
    "transformer",
    "transformer_layer_norm",
    "transformer_post_norms",
    "transformer_parallel",
    "embedding_one_hot_shared",
    "embedding_gather_separate",
)
over_all = pytest.mark.parametrize("name", [*LAYERS, *EMBEDDINGS])


def input_spec(name: str, S: int = S) -> tf.TensorSpec:
    if name in EMBEDDINGS:
        return tf.TensorSpec([B, S], tf.int32)
    return tf.TensorSpec([B, S, M], tf.float32)


def first_input(name: str) -> tf.Tensor:
    rng = np.random.default_rng(0)
    if name in EMBEDDINGS:
        return tf.constant(rng.integers(0, V, [B, S]), tf.int32)
    return tf.constant(rng.standard_normal([B, S, M]), tf.float32)


def build(name: str, dtype=tf.float32):
    """Its first weights and its fprop in training, a function of (theta, x, key)."""
    layer = {**LAYERS, **EMBEDDINGS}[name]

    def fprop(theta, x, key):
        ctx = Context(mode=Mode.TRAIN, key=key, activation_dtype=dtype, path="top")
        return layer.fprop(ctx, theta, x)

    return initialize(layer.weights(), KEY), fprop


@over_all
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_activations_have_their_dtype_and_gradients_that_of_the_weights(name, dtype):
    theta, fprop = build(name, dtype)
    x = first_input(name)
    with tf.GradientTape() as tape:
        tape.watch(theta)
        y = fprop(theta, x, KEY)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 3)
    gradients = theta.pack(tape.gradient(loss, theta.leaves()))
    assert y.dtype == dtype
    assert np.isfinite(tf.cast(y, tf.float32)).all()
    for path, gradient in gradients.items_by_path():
        assert isinstance(gradient, tf.Tensor), path
        assert gradient.dtype == tf.float32, path
        assert np.isfinite(gradient).all() and np.any(gradient), path


@pytest.mark.parametrize(
    ("name", "partitioner"),
    [
        *((name, Partitioner.SHARDY) for name in (*LAYERS, *EMBEDDINGS)),
        *((name, Partitioner.GSPMD) for name in WITH_GSPMD),
    ],
)
def test_computes_on_eight_devices_what_it_does_on_one(name, partitioner):
    layer = {**LAYERS, **EMBEDDINGS}[name]
    assert_layer_parity(layer, first_input(name), plan=PLAN, partitioner=partitioner)


@over_all
def test_no_mask_or_table_is_baked_into_the_program(name):
    theta, fprop = build(name)
    theta = theta.map(tf.TensorSpec.from_tensor)
    args = [theta, input_spec(name, S=512), tf.TensorSpec([2], tf.uint32)]
    module = hlo_pb2.HloModuleProto.FromString(lower(fprop, args).hlo)
    ops = [op for part in module.computations for op in part.instructions]
    sizes = [math.prod(op.shape.dimensions) for op in ops if op.opcode == "constant"]
    assert max(sizes, default=0) <= 1
    if "attention" in name and "bias" not in name:
        assert "iota" in {op.opcode for op in ops}


@pytest.mark.parametrize("name", LAYERS)
def test_an_input_of_other_model_dims_is_refused(name):
    theta, fprop = build(name)
    with pytest.raises(ValueError, match=r"'top[.\w]*' takes inputs .*\[4\].*\b5\)"):
        fprop(theta, tf.zeros([B, S, M + 1]), KEY)
