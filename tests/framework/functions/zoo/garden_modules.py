"""Layers of TensorFlow's Model Garden, which are those of Keras 2, in a step each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras
from official.nlp.modeling import layers

from tests.framework.functions.zoo.keras2_modules import keras2_model
from tests.framework.functions.zoo.zoo_cases import Case

SEQUENCE = (8, 16)
HEADS = {"(query|key|value)/kernel": [None, "model", None]}


def _self(make: Callable[[], Any], **call: Any) -> Callable[[], Any]:
    """A layer of queries and values, given the same tensor as both."""

    class Model(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = make()

        def call(self, x):
            return self.layer(x, x, **call)

    return Model


def _decoder() -> Any:
    layer = layers.TransformerDecoderBlock(4, 32, "gelu")
    mask = tf.ones([8, 8, 8])

    class Model(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def call(self, x):
            return self.layer([x[0], x[1], mask, tf.linalg.band_part(mask, -1, 0)])[0]

    return Model()


def _experts() -> Any:
    experts = layers.FeedForwardExperts(num_experts=4, d_ff=32)
    router = layers.ExpertsChooseMaskedRouter(4)
    return layers.MoeLayer(experts, router, examples_per_group=2.0)


def _masked_lm() -> Any:
    class Model(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.OnDeviceEmbedding(32, 16)
            self.positions = layers.PositionEmbedding(8)
            self.block = layers.TransformerEncoderBlock(4, 32, "gelu")
            self.embedding.build(None)
            self.head = layers.MaskedLM(self.embedding.embeddings, "gelu")

        def call(self, ids):
            x = self.embedding(ids)
            return self.head(self.block(x + self.positions(x)), ids[:, :3] % 8)

    return Model()


MODULES: dict[str, Case] = {
    "TransformerEncoderBlock": keras2_model(
        lambda: layers.TransformerEncoderBlock(4, 32, "gelu"), SEQUENCE, layout=HEADS
    ),
    "TransformerEncoderBlock, grouped queries": keras2_model(
        lambda: layers.TransformerEncoderBlock(
            4, 32, "gelu", norm_first=True, use_rms_norm=True, num_kv_heads=2
        ),
        SEQUENCE,
    ),
    "TransformerDecoderBlock": keras2_model(_decoder, SEQUENCE, SEQUENCE),
    "ReZeroTransformer": keras2_model(
        lambda: layers.ReZeroTransformer(4, 32), SEQUENCE, layout=HEADS
    ),
    "TalkingHeadsAttention": keras2_model(
        _self(lambda: layers.TalkingHeadsAttention(4, 8)), SEQUENCE
    ),
    "PerDimScaleAttention": keras2_model(
        _self(lambda: layers.PerDimScaleAttention(4, 8)), SEQUENCE
    ),
    "MultiQueryAttention": keras2_model(
        _self(lambda: layers.MultiQueryAttention(1, num_heads=4, key_dim=8)), SEQUENCE
    ),
    "KernelAttention": keras2_model(
        _self(lambda: layers.KernelAttention("relu", num_heads=4, key_dim=8)), SEQUENCE
    ),
    "RelativePositionBias": keras2_model(
        _self(lambda: layers.RelativePositionBias(4)), SEQUENCE
    ),
    "FourierTransformLayer": keras2_model(
        _self(lambda: layers.FourierTransformLayer(use_fft=True)), SEQUENCE
    ),
    "HartleyTransformLayer": keras2_model(
        _self(layers.HartleyTransformLayer), SEQUENCE
    ),
    "LinearTransformLayer": keras2_model(_self(layers.LinearTransformLayer), SEQUENCE),
    "GatedFeedforward": keras2_model(
        lambda: layers.GatedFeedforward(32, num_blocks=2), SEQUENCE
    ),
    "BlockDiagFeedforward": keras2_model(
        lambda: layers.BlockDiagFeedforward(32, "gelu", 0.0, num_blocks=2), SEQUENCE
    ),
    "MobileBertTransformer": keras2_model(
        lambda: layers.MobileBertTransformer(
            16, 4, 32, "relu", 0.0, 0.0, intra_bottleneck_size=8
        ),
        SEQUENCE,
    ),
    "MoeLayer": keras2_model(
        _experts, SEQUENCE, layout={"experts/.*kernel": ["model", None, None]}
    ),
    "SpectralNormalization": keras2_model(
        lambda: layers.SpectralNormalization(tf_keras.layers.Dense(16)), SEQUENCE
    ),
    "RandomFeatureGaussianProcess": keras2_model(
        lambda: layers.RandomFeatureGaussianProcess(4, num_inducing=16), (8,)
    ),
    "MaskedLM": keras2_model(_masked_lm, (8,), below=32),
}
