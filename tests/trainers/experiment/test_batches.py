"""Errors of inputs reach the user as they were raised."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.trainers.experiment.batches import readable


def failing(error: Exception) -> tf.data.Dataset:
    def read(number):
        if number == 2:
            raise error
        return np.float32(number)

    return tf.data.Dataset.range(4).map(
        lambda number: tf.numpy_function(read, [number], tf.float32)
    )


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, ImportError])
def test_what_a_function_raises_is_told_in_its_words(kind):
    text = "a.nii: is none: write\nanother (or two): leave it out"
    batches, read = readable(failing(kind(text))), []
    with pytest.raises(kind) as raised:
        read.extend(batch.numpy() for batch in batches)
    assert str(raised.value) == text


def test_what_is_no_text_is_told_in_its_words():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    with pytest.raises(ValueError, match="'utf-8' codec can't decode byte 0xff"):
        list(readable(failing(error)))


def test_a_fault_of_the_program_stays_what_it_is():
    with pytest.raises(tf.errors.OpError, match="nobody"):
        list(readable(failing(KeyError("nobody"))))


def test_batches_come_as_they_are():
    assert list(readable([1, 2])) == [1, 2]


def test_an_assertion_of_the_input_is_told_by_its_message():
    def checked(x):
        tf.debugging.Assert(x < 2, ["too large:", x])
        return {"x": x}

    dataset = tf.data.Dataset.range(4).map(checked)
    message = r"the input is refused: \[too large:\] \[2\]"
    with pytest.raises(ValueError, match=message):
        list(readable(dataset))
