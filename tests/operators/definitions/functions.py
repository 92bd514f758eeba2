"""What the expressions of the matrix may call."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling import random


def layer_norm(x, scale, bias):
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
    return centred * tf.math.rsqrt(variance + 1e-2) * scale + bias


def updated(x, begin, end, value):
    """`x`, a box of it written over."""
    ones = [1] * len(begin)
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=x, begin=begin, end=end, strides=ones, value=value
    )


def sliced(x, start, sizes):
    """A box of `x`, moved inside where it would stick out; TF's own slices refuse."""
    return xla.dynamic_slice(x, start, sizes)


def written(x, part, start):
    """`x`, a box of it written over, moved inside likewise."""
    return xla.dynamic_update_slice(x, part, start)


def pairs_sorted(keys, values):
    return xla.key_value_sort(keys, values)


def window_reduced(x, window, strides, dilations, padding, name):
    """XLA's own reduce-window, which TF has no name for; `name` one of `_REDUCERS`."""
    start, computation = _reducer(name, x.dtype)
    reduced = xla.reduce_window(
        x,
        start,
        reducer=computation,
        window_dimensions=window,
        window_strides=strides,
        window_dilations=dilations,
        padding=padding,
    )
    of = zip(x.shape, window, strides, dilations, padding, strict=True)
    return tf.ensure_shape(
        reduced, [(n + sum(pad) - (w - 1) * d - 1) // s + 1 for n, w, s, d, pad in of]
    )


def reduced(x, dims, name):
    """XLA's own reduce, likewise."""
    start, computation = _reducer(name, x.dtype)
    left = [n for dim, n in enumerate(x.shape) if dim not in dims]
    return tf.ensure_shape(xla.reduce(x, start, dims, computation), left)


def _reducer(name, dtype):
    """The value that a reduction starts from, and its function of two numbers."""
    reduce, start = _REDUCERS[name]
    specs = [tf.TensorSpec([], dtype)] * 2
    computation = tf.function(reduce, autograph=False).get_concrete_function(*specs)
    return tf.constant(start, dtype), computation


_REDUCERS = {
    "product": (lambda a, b: a * b, 1),
    "sum": (lambda a, b: a + b, 0),
    "minimum": (tf.minimum, 9),
    "larger": (lambda a, b: tf.where(a > b, a, b), -99),
    "exclusive or": (tf.bitwise.bitwise_xor, 0),
    "all bits": (tf.bitwise.bitwise_and, -1),
    "furthest": (lambda a, b: tf.where(tf.abs(a) > tf.abs(b), a, b), 0),
}


# Loops. What they add up are means, not sums: else differences in the last bit grow
# from step to step.


def repeat(x, w, steps):
    """`steps` layers that share their weight, in a loop."""
    return tf.while_loop(
        lambda i, _: i < steps,
        lambda i, x: (i + 1, tf.tanh(x @ w / w.shape[0])),
        (0, x),
        maximum_iterations=steps,
    )[1]


def changing(lay, x, y, steps):
    def body(i, a, b):
        return i + 1, lay(tf.sin(b), 0), lay(a * tf.reduce_mean(b, 0), 1)

    return tf.while_loop(
        lambda i, *_: i < steps, body, (0, x, y), maximum_iterations=steps
    )[1:]


def nested(lay, x, w, steps):
    outer, inner = steps

    def layer(i, x):
        return i + 1, lay(tf.tanh(x @ w / w.shape[0]), 1)

    def body(i, x):
        _, x = tf.while_loop(
            lambda i, _: i < inner, layer, (0, lay(x, 0)), maximum_iterations=inner
        )
        return i + 1, x + tf.reduce_mean(x)

    return tf.while_loop(
        lambda i, _: i < outer, body, (0, x), maximum_iterations=outer
    )[1]


def halved_until(lay, x):
    """Halved until its sum is small: at most ten times."""
    return tf.while_loop(
        lambda x, _: tf.abs(tf.reduce_sum(x)) > 0.3,
        lambda x, i: (lay(x / 2, 0), i + 1),
        (x + 1, 0),
        maximum_iterations=10,
    )


def running(xs, state):
    """Running products of the slices of `xs`, from `state` on."""
    steps = xs.shape[0]

    def body(i, state, out):
        state = tf.sin(state * xs[i] / 2)
        return i + 1, state, out.write(i, state)

    out = tf.TensorArray(xs.dtype, steps, element_shape=state.shape)
    _, state, out = tf.while_loop(
        lambda i, *_: i < steps, body, (0, state, out), maximum_iterations=steps
    )
    return state, out.stack()


def recurrence(lay, xs, state, w):
    steps = xs.shape[0]

    def body(i, state, out):
        state = lay(tf.tanh(xs[i] + state @ w / w.shape[0]), 0)
        return i + 1, state, out.write(i, state)

    out = tf.TensorArray(xs.dtype, steps, element_shape=state.shape)
    _, _, out = tf.while_loop(
        lambda i, *_: i < steps, body, (0, state, out), maximum_iterations=steps
    )
    return out.stack()


def choosing(lay, x, y, steps):
    """Each step a branch that the state chooses."""

    def body(i, x):
        chosen = tf.cond(
            tf.reduce_mean(x) > 0.1, lambda: tf.sin(x) * y, lambda: x + tf.abs(y)
        )
        return i + 1, lay(chosen, 0)

    return tf.while_loop(
        lambda i, _: i < steps, body, (0, x), maximum_iterations=steps
    )[1]


NAMES = {
    "tf": tf,
    "random": random,
    "layer_norm": layer_norm,
    "updated": updated,
    "sliced": sliced,
    "written": written,
    "pairs_sorted": pairs_sorted,
    "reduced": reduced,
    "window_reduced": window_reduced,
    "repeat": repeat,
    "changing": changing,
    "nested": nested,
    "halved_until": halved_until,
    "running": running,
    "recurrence": recurrence,
    "choosing": choosing,
}
