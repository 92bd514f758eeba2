"""Plain annotations that replicate forwards, and leave gradients partial."""

import pytest
import tensorflow as tf

from meshwright import framework as mw
from tests.framework.partial.partial_programs import (
    MESH,
    check,
    compiled,
    gradients,
    sent,
    split,
    to,
)

TYPES = ("[8@tp,4]", "[4,6@tp]", "[6@tp,4]")


def feed_forward(x, w, v):
    """Rows of `x` are split by tp, and read whole; so are hidden units."""
    h = split(split(x, "tp", None), None, None)
    h = split(tf.tanh(h @ split(w, None, "tp")), None, "tp")
    return split(h @ split(v, "tp", None), "tp", None)


def all_gradients(x, w, v):
    return gradients(lambda *a: tf.reduce_sum(feed_forward(*a) ** 3), x, w, v)


def in_scope(*args):
    with mw.unreduced_gradients("tp"):
        return all_gradients(*args)


def scattered(program):
    return [op for op in sent(program) if op == "reduce-scatter tp [4,4]"]


def test_a_gradient_is_scattered_where_the_next_annotation_splits_it():
    """Otherwise the CPU's compiler adds up all of it, and slices the sum."""
    for program in compiled(all_gradients, *TYPES):
        assert not scattered(program)
    for program in compiled(in_scope, *TYPES):
        assert len(scattered(program)) == 1
    how = {"unreduced_gradient_axes": ["tp"]}
    for program in compiled(all_gradients, *TYPES, **how):
        assert len(scattered(program)) == 1


def test_gradients_of_microbatches_add_up_before_they_are_reduced():
    def loss(w, x):
        return tf.reduce_sum(tf.tanh(x @ split(w, None, None)))

    def fn(x, w):
        with mw.unreduced_gradients("dp"):
            total = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, g: (i + 1, g + gradients(lambda w: loss(w, x[i]), w)[0]),
                (tf.constant(0), tf.zeros(w.shape)),
                maximum_iterations=3,
            )[1]
        return to(total, None, None)

    check(fn, "[3,8@dp,6]", "[6,4]", sends=["all-reduce dp [6,4]"])


def test_what_is_not_linear_in_a_gradient_reads_the_sum():
    def fn(x, w):
        with mw.unreduced_gradients("dp"):
            (g,) = gradients(
                lambda w: tf.reduce_sum(tf.tanh(x @ split(w, None, None))), w
            )
        return w - tf.clip_by_norm(g, 0.5)

    for program in compiled(fn, "[8@dp,6]", "[6,4]"):
        assert "all-reduce dp [6,4]" in sent(program)


def test_dims_that_propagation_decides_and_whole_numbers_are_as_outside():
    def fn(x, ids):
        with mw.unreduced_gradients("tp"):
            x = mw.mesh_split(x, MESH, [None, None], unspecified_dims=[0])
            return x * tf.cast(split(ids, None, None), tf.float32)

    for _ in compiled(fn, "[4,6]", "s32[4,6]"):
        pass


def test_the_scope_ends_and_its_axes_are_names():
    with mw.unreduced_gradients("dp"), mw.unreduced_gradients("tp"):
        pass
    for program in compiled(all_gradients, *TYPES):
        assert not scattered(program)
    with (
        pytest.raises(TypeError, match="takes names of mesh axes, .*; this is 0"),
        mw.unreduced_gradients(0),
    ):
        pass
