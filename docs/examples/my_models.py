"""A Keras model and its examples, for `--import=my_models`."""

import keras
import numpy as np
import tensorflow as tf


def classifier(width=32):
    return keras.Sequential(
        [
            keras.Input([16]),
            keras.layers.Dense(width, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def examples(count=1000, seed=0):
    x = np.random.default_rng(seed).standard_normal([count, 16], np.float32)
    return tf.data.Dataset.from_tensor_slices((x, np.argmax(x[:, :10], -1)))


def train(count=1000):
    return examples(count).shuffle(count)


def held_out():
    return examples(70, seed=1)
