"""A layout for a Keras model that no file knows, searched for and compiled.

    python -m benchmarks.search.found_keras [--on=v3:4x4] [--layers=4] [--budget=2]

The model is a Transformer of Keras's own layers. Beside the best layouts found are the
"data", "fsdp" and "tensor" of `mw.keras.distribute`, compiled the same way. Wants
libtpu.
"""

from __future__ import annotations

import os
import resource
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import tensorflow as tf
from absl import app, flags

from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.trainers import search_keras

_WORDS, _TOKENS, _HEADS = 8192, 256, 8


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_string("on", "v3:4x4", "TPU topology.")
    flags.DEFINE_integer("layers", 4, "Layers of the model.", lower_bound=1)
    flags.DEFINE_integer("width", 1024, "Its width.", lower_bound=_HEADS)
    flags.DEFINE_integer("rows", 64, "Rows of a batch.", lower_bound=1)
    flags.DEFINE_integer("propagated", 1000, "Plans propagated.", lower_bound=1)
    flags.DEFINE_integer("budget", 2, "Plans of the search compiled.", lower_bound=1)


def transformer(layers: int, width: int) -> keras.Model:
    """A decoder of Keras's layers, built and compiled."""
    ids = keras.Input((_TOKENS,), dtype="int32")
    x = keras.layers.Embedding(_WORDS, width, name="embedding")(ids)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        size = width // _HEADS
        attention = keras.layers.MultiHeadAttention(_HEADS, size, use_bias=False)
        x += attention(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, "relu")(y)
        x += keras.layers.Dense(width)(y)
    model = keras.Model(ids, keras.layers.Dense(_WORDS, name="softmax")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def main(_) -> None:
    """Prints the layout, what it was compared with, and what the search took."""
    set_platform("cpu")
    model = transformer(flags.FLAGS.layers, flags.FLAGS.width)
    spec = tf.TensorSpec([flags.FLAGS.rows, _TOKENS], tf.int32)
    begun, clock = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    found = search_keras(
        model,
        (spec, spec),
        flags.FLAGS.on,
        most=flags.FLAGS.propagated,
        compiled=flags.FLAGS.budget,
    )
    done = resource.getrusage(resource.RUSAGE_SELF)
    cpu = done.ru_utime + done.ru_stime - begun.ru_utime - begun.ru_stime
    print(found.text())
    print(
        f"{found.progress.considered} considered, {found.progress.propagated} "
        f"propagated, {len(found.layouts)} compiled: {cpu:.0f} CPU s, "
        f"{time.monotonic() - clock:.0f} s"
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)
