"""Checks that TF2XLA leaves out of programs, and what is said of them."""

import logging

import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError, lower

X = tf.TensorSpec([8, 4])


def positive(x):
    tf.debugging.assert_positive(x)
    return x * 2


def finite(x):
    with tf.name_scope("head"):
        return tf.debugging.check_numerics(x, "message") * 2


def raw(x):
    tf.debugging.Assert(tf.reduce_all(x > 0), [x])
    return x * 2


def in_a_branch(x):
    return tf.cond(x[0, 0] > 0, lambda: finite(x), lambda: x)


def in_a_loop(x):
    def body(i, x):
        tf.debugging.assert_less(i, 2)
        return i + 1, x

    return tf.while_loop(lambda i, x: i < 3, body, (0, x))[1]


@tf.function
def called(x):
    return positive(x)


def violated_for_sure(x):
    tf.debugging.assert_greater(tf.range(3)[0], 7)
    return x * 2


def warnings_of(caplog, fn):
    with caplog.at_level(logging.WARNING, logger="absl"):
        lower(fn, [X], name="step")
    return [record.getMessage() for record in caplog.records if record.name == "absl"]


@pytest.mark.parametrize(
    "fn,op",
    [
        (positive, "Assert"),
        (raw, "Assert"),
        (finite, "CheckNumerics"),
        (in_a_branch, "CheckNumerics"),
        (in_a_loop, "Assert"),
        (called, "Assert"),
        (lambda x: called(x), "Assert"),
        (violated_for_sure, "Assert"),
        (lambda x: tf.debugging.assert_all_finite(x, "m"), "CheckNumerics"),
    ],
)
def test_a_check_without_effect_is_told_with_its_line(caplog, fn, op):
    (text,) = warnings_of(caplog, fn)
    assert text.startswith("step: a compiled program makes no checks, so these of the")
    assert f"{op}' (" in text and "lowering/test_unchecked.py:" in text
    assert text.count("op '") == 1 and text.endswith("as a result")
    with pytest.raises(LoweringError, match=rf"step: a compiled program .*{op}' \("):
        lower(fn, [X], name="step", strict=True)


def holds_by_shape(x):
    tf.debugging.assert_equal(tf.shape(x)[0], 8)
    tf.debugging.assert_rank(x, 2)
    tf.debugging.assert_less(tf.range(3)[0], 8)
    tf.debugging.Assert(tf.reduce_all(tf.constant([1, 2]) < 4), ["no"])
    tf.debugging.Assert(tf.reduce_all(tf.constant([1, 3]) < 4), [x])
    return tf.cond(x[0, 0] > 0, lambda: checked(x), lambda: x)


def checked(x):
    tf.debugging.assert_equal(tf.shape(x), [8, 4])
    return x


@pytest.mark.parametrize("fn", [holds_by_shape, lambda x: x + 1])
def test_a_check_that_always_holds_is_not_told(caplog, fn):
    assert warnings_of(caplog, fn) == []
    lower(fn, [X], strict=True)


def test_many_checks_are_told_once(caplog):
    def many(x):
        for _ in range(8):
            tf.debugging.assert_positive(x)
        return x

    (text,) = warnings_of(caplog, many)
    assert text.count("op '") == 5 and " and 3 more. " in text
