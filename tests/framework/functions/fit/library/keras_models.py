"""Keras models that others wrote, small, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import keras_rs
import numpy as np
import tensorflow as tf
from keras.src.applications import convnext, efficientnet_v2

LAYERS, HUB = keras.layers, keras_hub.models
ROWS, LENGTH, WORDS, CLASSES = 16, 8, 50, 4
SIZES = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
TEXT = {"vocabulary_size": WORDS, **SIZES}
TEXTS = {**TEXT, "num_layers": 1}  # One of the encoder, one of the decoder.
GROUPED = {**TEXT, "num_query_heads": 4, "num_key_value_heads": 2}
LABELS = np.arange(ROWS) % CLASSES

Case = tuple[keras.Model, Any, np.ndarray]
"""A model, a batch of inputs, and the class of each of its outputs."""


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, *shape)).astype(np.float32)


def _words(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(1, WORDS, (ROWS, LENGTH)).astype(np.int32)


def _text(**more: np.ndarray) -> dict[str, np.ndarray]:
    return {"token_ids": _words(), "padding_mask": np.ones_like(_words()), **more}


def _application(model: Callable[..., keras.Model], **how: Any) -> Callable[[], Case]:
    def make() -> Case:
        made = model(
            weights=None,
            input_shape=(32, 32, 3),
            classes=CLASSES,
            classifier_activation=None,
            **how,
        )
        return made, _normal(32, 32, 3), LABELS

    return make


def _language_model(kind: str, **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        backbone = getattr(HUB, f"{kind}Backbone")(**sizes)
        model = getattr(HUB, f"{kind}CausalLM")(backbone, preprocessor=None)
        return model, _text(), np.roll(_words(), -1, 1)

    return make


def _bert() -> Case:
    backbone = HUB.BertBackbone(**TEXT, num_heads=2, max_sequence_length=LENGTH)
    model = HUB.BertTextClassifier(backbone, num_classes=CLASSES, preprocessor=None)
    return model, _text(segment_ids=np.zeros_like(_words())), LABELS


def _vit() -> Case:
    backbone = HUB.ViTBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
    )
    model = HUB.ViTImageClassifier(
        backbone, num_classes=CLASSES, preprocessor=None, activation=None
    )
    return model, _normal(32, 32, 3), LABELS


def _with_head(backbone: keras.Model, inputs: dict[str, np.ndarray]) -> Case:
    """A decoder that says the next word."""
    states = backbone.output["decoder_sequence_output"]
    model = keras.Model(backbone.input, LAYERS.Dense(WORDS, name="head")(states))
    words = _words(1)
    decoder = {"decoder_token_ids": words, "decoder_padding_mask": np.ones_like(words)}
    return model, {**inputs, **decoder}, np.roll(words, -1, 1)


def _whisper() -> Case:
    backbone = HUB.WhisperBackbone(
        **TEXTS,
        num_heads=2,
        num_mels=8,
        max_encoder_sequence_length=16,
        max_decoder_sequence_length=LENGTH,
    )
    return _with_head(backbone, {"encoder_features": _normal(16, 8)})


def _t5() -> Case:
    backbone = HUB.T5Backbone(**TEXTS, num_heads=2, key_value_dim=8)
    mask = np.ones_like(_words())
    encoder = {"encoder_token_ids": _words(), "encoder_padding_mask": mask}
    return _with_head(backbone, encoder)


def _dlrm() -> Case:
    features, ids = keras.Input((8,)), keras.Input((3,), dtype="int32")
    bottom = LAYERS.Dense(8, "relu")(LAYERS.Dense(16, "relu")(features))
    embedded = [LAYERS.Embedding(WORDS, 8)(ids[:, i]) for i in range(3)]
    crossed = keras_rs.layers.DotInteraction()([bottom, *embedded])
    top = LAYERS.Dense(16, "relu")(LAYERS.Concatenate()([crossed, bottom]))
    model = keras.Model([features, ids], LAYERS.Dense(CLASSES)(top))
    return model, [_normal(8), _words()[:, :3]], LABELS


def _recurrent() -> Case:
    layers = [
        LAYERS.Embedding(WORDS, 8, mask_zero=True),
        LAYERS.LSTM(16, return_sequences=True),
        LAYERS.TimeDistributed(LAYERS.Dense(8)),
        LAYERS.SimpleRNN(8, return_sequences=True),
        LAYERS.Bidirectional(LAYERS.GRU(8)),
        LAYERS.Dense(CLASSES),
    ]
    return keras.Sequential([LAYERS.Input((LENGTH,)), *layers]), _words() % 9, LABELS


def _volumes() -> Case:
    layers = [
        LAYERS.Conv3D(4, 3, activation="relu"),
        LAYERS.BatchNormalization(),
        LAYERS.MaxPooling3D(),
        LAYERS.Conv3DTranspose(8, 2),
        LAYERS.GlobalAveragePooling3D(),
        LAYERS.Dense(16, "relu"),
        LAYERS.Dense(CLASSES),
    ]
    shape = (8, 8, 8, 1)
    return keras.Sequential([LAYERS.Input(shape), *layers]), _normal(*shape), LABELS


class Clipped(keras.Model):
    """With a train step and a counter of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = LAYERS.Dense(16, "gelu")
        self.norm = LAYERS.BatchNormalization()
        self.head = LAYERS.Dense(CLASSES)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        return self.head(self.norm(self.hidden(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped = [tf.clip_by_norm(g, 1.0) for g in gradients]
        self.optimizer.apply(clipped, self.trainable_variables)
        self.steps.assign_add(1.0)
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (y, outputs)))
        return {metric.name: metric.result() for metric in self.metrics}


MODELS: dict[str, Callable[[], Case]] = {
    "BERT": _bert,
    "GPT2": _language_model("GPT2", **TEXT, num_heads=2, max_sequence_length=LENGTH),
    "Gemma": _language_model("Gemma", **GROUPED, head_dim=8),
    "Llama": _language_model("Llama", **GROUPED),
    "Mixtral": _language_model("Mixtral", **GROUPED, num_experts=4, top_k=2),
    "ViT": _vit,
    "Whisper": _whisper,
    "T5": _t5,
    "DLRM": _dlrm,
    "recurrent": _recurrent,
    "Conv3D": _volumes,
    "subclass": lambda: (Clipped(), _normal(8), LABELS),
}
# XLA's CPU compiler makes a float64 depthwise kernel dense: steps of EfficientNetV2B0
# take 17 GB so on eight devices, in float32 3.
_NARROW = {"width_coefficient": 0.25, "depth_coefficient": 0.34, "default_size": 32}
_SHALLOW = {"depths": (1, 1, 2, 1), "projection_dims": (16, 32, 64, 128)}
APPLICATIONS: dict[str, Callable[[], Case]] = {
    "MobileNetV3Small": _application(keras.applications.MobileNetV3Small),
    "ResNet50V2": _application(keras.applications.ResNet50V2),
    "EfficientNetV2": _application(
        efficientnet_v2.EfficientNetV2, name="efficientnetv2-b0", **_NARROW
    ),
    "ConvNeXt": _application(convnext.ConvNeXt, **_SHALLOW),
}
