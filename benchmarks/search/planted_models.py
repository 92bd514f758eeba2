"""Small models of which every plan can be compiled, drawn from a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_RATE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """A model's step, and the devices that it is for.

    Args:
      name: kind and sizes.
      step: the step.
      args: the weights' specs by name, then the data's.
      topology: name of a TPU topology.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    topology: str

    @property
    def results_like(self) -> int:
        """The weights come back."""
        return len(self.args[0])


def _descent(loss_of: Callable[..., tf.Tensor]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(weights, *data):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = loss_of(weights, *data)
        gradients = tape.gradient(loss, weights)
        return {
            name: w - tf.cast(_RATE, w.dtype) * gradients[name]
            for name, w in weights.items()
        }

    return step


def _square(y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.cast(y, tf.float32)))


@_descent
def _feed_forward(weights, x):
    return _square(tf.nn.relu(x @ weights["up"]) @ weights["down"])


@_descent
def _dense(weights, x):
    return _square(tf.nn.relu(x @ weights["kernel"]))


@_descent
def _language(weights, ids):
    x = tf.gather(weights["embedding"], ids)
    logits = tf.matmul(x, weights["embedding"], transpose_b=True)
    logits = tf.cast(logits, tf.float32)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits)
    )


@_descent
def _convolution(weights, x):
    y = tf.nn.relu(tf.nn.conv2d(x, weights["kernel"], 1, "SAME"))
    return _square(y)


@_descent
def _experts(weights, x):
    return _square(tf.nn.relu(tf.einsum("ecm,emh->ech", x, weights["kernel"])))


def _specs(dtype=tf.bfloat16, **shapes) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(shape, dtype) for name, shape in shapes.items()}


def _feed_forward_of(size):
    rows, model, hidden = size(10, 15), size(8, 11), size(9, 13)
    weights = _specs(up=[model, hidden], down=[hidden, model])
    return (
        f"feed-forward {rows}x{model}x{hidden}",
        _feed_forward,
        (weights, tf.TensorSpec([rows, model], tf.bfloat16)),
    )


def _dense_of(size):
    rows, inner, outer = size(9, 15), size(8, 13), size(8, 13)
    weights = _specs(kernel=[inner, outer])
    return (
        f"dense {rows}x{inner}x{outer}",
        _dense,
        (weights, tf.TensorSpec([rows, inner], tf.bfloat16)),
    )


def _language_of(size):
    rows, tokens, model, words = size(3, 6), size(6, 9), size(8, 10), size(11, 15)
    weights = _specs(embedding=[words, model])
    return (
        f"language {rows}x{tokens}x{model}x{words}",
        _language,
        (weights, tf.TensorSpec([rows, tokens], tf.int32)),
    )


def _convolution_of(size):
    rows, side, inner, outer = size(3, 6), size(5, 7), size(6, 8), size(7, 9)
    weights = _specs(kernel=[3, 3, inner, outer])
    return (
        f"convolution {rows}x{side}x{side}x{inner}x{outer}",
        _convolution,
        (weights, tf.TensorSpec([rows, side, side, inner], tf.bfloat16)),
    )


def _experts_of(size):
    experts, rows = size(3, 5), size(8, 12)
    model, hidden = size(8, 11), size(8, 12)
    weights = _specs(kernel=[experts, model, hidden])
    return (
        f"experts {experts}x{rows}x{model}x{hidden}",
        _experts,
        (weights, tf.TensorSpec([experts, rows, model], tf.bfloat16)),
    )


# Kinds of models, and how many of each.
_KINDS = (
    (_experts_of, 5),
    (_convolution_of, 4),
    (_dense_of, 5),
    (_language_of, 4),
    (_feed_forward_of, 2),
)
_SLICES = ("v3:1x1", "v3:1x2", "v3:2x2", "v5e:2x2")


def planted_models(seed: int = 0) -> list[Planted]:
    """20 models."""
    random = np.random.default_rng(seed)

    def size(least: int, most: int) -> int:
        """A power of two."""
        return 2 ** int(random.integers(least, most, endpoint=True))

    models = []
    for draw, count in _KINDS:
        for _ in range(count):
            name, step, args = draw(size)
            on = str(random.choice(_SLICES))
            models.append(Planted(name=name, step=step, args=args, topology=on))
    return models
