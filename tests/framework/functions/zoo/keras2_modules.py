"""Keras 2's layers, models, optimizers and metrics in a step each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from tests.framework.functions.zoo.zoo_cases import (
    CLASSES,
    ROWS,
    Case,
    Made,
    ramp,
    trained,
)

LAYERS, OPTIMIZERS, METRICS = tf_keras.layers, tf_keras.optimizers, tf_keras.metrics
SEQUENCE, IMAGE = (6, 8), (6, 6, 8)
COLUMNS = {"kernel": [None, "model"]}


def _layer(name: str, shape: tuple[int, ...], *args: Any, **options: Any) -> Case:
    """A layer of that name, trained; `how` are more of its arguments."""
    how = options.pop("how", {})
    return keras2_model(lambda: getattr(LAYERS, name)(*args, **how), shape, **options)


def keras2_model(
    make: Callable[[], Any], *shapes: tuple[int, ...], **options: Any
) -> Case:
    """A layer or a model, trained by plain gradient descent."""

    def made(*inputs) -> Made:
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(1)
        model = make()

        def call(*inputs):
            given = inputs[0] if len(inputs) == 1 else list(inputs)
            how = {"training": True} if model._expects_training_arg else {}
            return model(given, **how), model.losses

        return trained(
            call,
            inputs,
            trainable=lambda: model.trainable_variables,
            variables=lambda: model.variables,
        )

    return Case(make=made, shapes=shapes, **options)


def _classifier() -> Any:
    return tf_keras.Sequential(
        [
            LAYERS.Dense(16, "gelu"),
            LAYERS.BatchNormalization(),
            LAYERS.Dense(CLASSES, kernel_regularizer="l2"),
        ]
    )


def _optimized(make: Callable[[], Any]) -> Case:
    """The loop that users write: tape, gradients, `apply_gradients`, and metrics."""

    def made(x) -> Made:
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(1)
        model, optimizer = _classifier(), make()
        loss_fn = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = [METRICS.Mean(), METRICS.SparseCategoricalAccuracy()]
        model(x)
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)
        else:
            optimizer._create_all_weights(model.trainable_variables)

        def step(x):
            labels = tf.cast(tf.reduce_sum(x, 1) > 0, tf.int32)
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_fn(labels, logits) + tf.add_n(model.losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )
            metrics[0].update_state(loss)
            metrics[1].update_state(labels, logits)
            return loss, [m.result() for m in metrics], gradients

        def variables():
            kept = optimizer.variables
            kept = kept() if callable(kept) else kept
            return [*model.variables, *kept, *(v for m in metrics for v in m.variables)]

        return step, variables

    return Case(make=made, layout={"^dense/kernel": [None, "model"]})


def _optimizer(name: str, *args: Any, **how: Any) -> Case:
    return _optimized(lambda: getattr(OPTIMIZERS, name)(*args, **how))


def _legacy(name: str, *args: Any, **how: Any) -> Case:
    return _optimized(lambda: getattr(OPTIMIZERS.legacy, name)(*args, **how))


def _metrics(
    names: str, of: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]], **how: Any
) -> Case:
    """Metrics of the same arguments, each updated by a batch and read."""

    def made(_) -> Made:
        metrics = [getattr(METRICS, name)(**how) for name in names.split()]
        for metric in metrics:  # Some make variables when they are first updated.
            metric.update_state(*of(tf.ones([ROWS, CLASSES])))
            metric.reset_state()

        def step(x):
            for metric in metrics:
                metric.update_state(*of(x))
            return [metric.result() for metric in metrics]

        return step, lambda: [v for metric in metrics for v in metric.variables]

    return Case(make=made, shapes=[(CLASSES,)])


def _probabilities(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """One class of several, and the probability of each."""
    labels = tf.one_hot(tf.argmax(x, 1), x.shape[1])
    return labels, tf.nn.softmax(x + 1.5 * ramp(x))


def _classes(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.argmax(x, 1), tf.nn.softmax(x + 1.5 * ramp(x))


def _numbers(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x, x + ramp(x)


def _bits(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(x > 0, tf.float32), tf.sigmoid(x + ramp(x))


def _same_bits(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(x > 0, tf.int32), tf.cast(x + ramp(x) > 0, tf.int32)


class Subclass(tf_keras.Model):
    """With a loss of its own and shared layers."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = LAYERS.Dense(8, "tanh"), LAYERS.Dense(CLASSES)

    def call(self, x, training=False):
        hidden = self.shared(self.shared(x))
        self.add_loss(tf.reduce_mean(hidden**2))
        return self.head(hidden)


def _functional() -> Any:
    first, second = LAYERS.Input([8]), LAYERS.Input([6, 8])
    left = LAYERS.Dense(8, "relu")(first)
    right = LAYERS.GlobalAveragePooling1D()(LAYERS.Conv1D(8, 3)(second))
    out = LAYERS.Dense(CLASSES)(LAYERS.Concatenate()([left, right]))
    return tf_keras.Model([first, second], [out, left])


def _attention() -> Any:
    x = LAYERS.Input(SEQUENCE)
    y = LAYERS.LayerNormalization()(x + LAYERS.MultiHeadAttention(4, 4)(x, x))
    return tf_keras.Model(x, y + LAYERS.Dense(8)(LAYERS.Dense(16, "gelu")(y)))


MODULES: dict[str, Case] = {
    "Dense": _layer("Dense", (8,), 16, layout=COLUMNS),
    "EinsumDense": _layer(
        "EinsumDense", SEQUENCE, "abc,cd->abd", (6, 16), layout=COLUMNS
    ),
    "Embedding": _layer(
        "Embedding", (6,), 16, 8, below=16, layout={"embeddings": ["model", None]}
    ),
    "BatchNormalization": _layer("BatchNormalization", IMAGE),
    "SyncBatchNormalization": _layer(
        "BatchNormalization", IMAGE, how={"synchronized": True}
    ),
    "LayerNormalization": _layer("LayerNormalization", (8,)),
    "GroupNormalization": _layer("GroupNormalization", IMAGE, how={"groups": 4}),
    "UnitNormalization": _layer("UnitNormalization", (8,)),
    "Conv1D": _layer("Conv1D", SEQUENCE, 8, 3),
    "Conv2D": _layer(
        "Conv2D", IMAGE, 8, 3, layout={"kernel": [None, None, None, "model"]}
    ),
    "Conv2DTranspose": _layer("Conv2DTranspose", IMAGE, 8, 3),
    "Conv3D": _layer("Conv3D", (4, 4, 4, 8), 8, 3),
    "DepthwiseConv2D": _layer("DepthwiseConv2D", IMAGE, 3),
    "SeparableConv2D": _layer("SeparableConv2D", IMAGE, 8, 3),
    "LocallyConnected1D": _layer("LocallyConnected1D", SEQUENCE, 8, 3),
    "MaxPooling2D": _layer("MaxPooling2D", IMAGE),
    "AveragePooling2D": _layer("AveragePooling2D", IMAGE),
    "LSTM": _layer("LSTM", SEQUENCE, 8, layout={"kernel": [None, "model"]}),
    "GRU": _layer("GRU", SEQUENCE, 8),
    "SimpleRNN": _layer("SimpleRNN", SEQUENCE, 8, how={"return_sequences": True}),
    "ConvLSTM2D": _layer("ConvLSTM2D", (3, *IMAGE), 4, 3),
    "Bidirectional": keras2_model(
        lambda: LAYERS.Bidirectional(LAYERS.GRU(8)), SEQUENCE
    ),
    "RNN": keras2_model(
        lambda: LAYERS.RNN([LAYERS.LSTMCell(8), LAYERS.GRUCell(4)]), SEQUENCE
    ),
    "TimeDistributed": keras2_model(
        lambda: LAYERS.TimeDistributed(LAYERS.Dense(8)), SEQUENCE
    ),
    "PReLU": _layer("PReLU", (8,)),
    "Attention": keras2_model(
        lambda: LAYERS.Attention(use_scale=True), SEQUENCE, SEQUENCE
    ),
    "MultiHeadAttention": keras2_model(_attention, SEQUENCE),
    "functional": keras2_model(_functional, (8,), SEQUENCE),
    "subclass": keras2_model(Subclass, (8,)),
    "SGD": _optimizer("SGD", 0.1, momentum=0.9, nesterov=True),
    "Adam": _optimizer("Adam", 0.01, amsgrad=True, epsilon=1e-3),
    "AdamW": _optimizer("AdamW", 0.01, epsilon=1e-3, clipnorm=0.5),
    "Adadelta": _optimizer("Adadelta", 0.1),
    "Adafactor": _optimizer("Adafactor", 0.01),
    "Adagrad": _optimizer("Adagrad", 0.1, global_clipnorm=1.0),
    "Adamax": _optimizer("Adamax", 0.01, epsilon=1e-3),
    "Ftrl": _optimizer("Ftrl", 0.1),
    "Lion": _optimizer("Lion", 0.01),
    "Nadam": _optimizer("Nadam", 0.01, epsilon=1e-3),
    "RMSprop": _optimizer("RMSprop", 0.01, momentum=0.9, centered=True, epsilon=1e-3),
    "SGD with a moving average": _optimizer("SGD", 0.1, use_ema=True, ema_momentum=0.9),
    "LossScaleOptimizer": _optimized(
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(OPTIMIZERS.SGD(0.1))
    ),
    "ExponentialDecay": _optimized(
        lambda: OPTIMIZERS.SGD(OPTIMIZERS.schedules.ExponentialDecay(0.1, 2, 0.5))
    ),
    "legacy.SGD": _legacy("SGD", 0.1, momentum=0.9),
    "legacy.Adam": _legacy("Adam", 0.01, epsilon=1e-3),
    "legacy.Adadelta": _legacy("Adadelta", 0.1),
    "legacy.Adagrad": _legacy("Adagrad", 0.1),
    "legacy.Adamax": _legacy("Adamax", 0.01, epsilon=1e-3),
    "legacy.Ftrl": _legacy("Ftrl", 0.1),
    "legacy.Nadam": _legacy("Nadam", 0.01, epsilon=1e-3),
    "legacy.RMSprop": _legacy("RMSprop", 0.01, momentum=0.9, epsilon=1e-3),
    "metrics of probabilities": _metrics(
        "CategoricalAccuracy CategoricalCrossentropy CategoricalHinge KLDivergence "
        "TopKCategoricalAccuracy CosineSimilarity F1Score AUC Precision Recall "
        "BinaryCrossentropy BinaryAccuracy TruePositives TrueNegatives FalsePositives "
        "FalseNegatives",
        _probabilities,
    ),
    "metrics of classes": _metrics(
        "SparseCategoricalAccuracy SparseCategoricalCrossentropy "
        "SparseTopKCategoricalAccuracy",
        _classes,
    ),
    "metrics of numbers": _metrics(
        "MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError "
        "MeanSquaredLogarithmicError RootMeanSquaredError LogCoshError Hinge "
        "SquaredHinge Poisson R2Score",
        _numbers,
    ),
    "metrics at a threshold": _metrics("BinaryIoU", _bits),
    "MeanIoU": _metrics("MeanIoU", _same_bits, num_classes=2),
    "MeanTensor": _metrics("MeanTensor Sum Mean", lambda x: (x,)),
}
