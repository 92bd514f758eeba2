"""Which examples a batch holds: its rows, and a permutation for each epoch."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.tasks.input.example_order import BatchRows, shuffled_examples


# TF's permutation alone repeats an index where the largest is a power of 4.
@pytest.mark.parametrize("count", [1, 2, 7, 1000, 2**16 + 1, 2**18 + 1])
def test_each_epoch_is_another_permutation(count):
    period = count + (count > 2**16)
    index = tf.range(2 * period, dtype=tf.int64)
    order = shuffled_examples(index, count=count, seed=3).numpy().reshape(2, period)
    for epoch in order:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(period))
    if count > 2:
        other = shuffled_examples(index, count=count, seed=4).numpy()[:period]
        assert (order[0] != order[1]).any() and (order[0] != other).any()


def test_order_stays_what_it_was():
    # Runs that resume with a newer TF would go on in another order.
    order = shuffled_examples(tf.range(6, dtype=tf.int64), count=1000, seed=1)
    assert order.numpy().tolist() == [300, 7, 892, 806, 879, 702]


def test_epochs_do_not_resemble_each_other():
    # With too few rounds, half of the bits of all examples differ by one constant.
    index = tf.range(2 * 2**16, dtype=tf.int64)
    order = shuffled_examples(index, count=2**16, seed=0).numpy().reshape(2, -1)
    for half in (order[0] ^ order[1]) & 255, (order[0] ^ order[1]) >> 8:
        assert np.bincount(half).max() < 2 * 2**16 / 256


def test_rows_of_a_step_have_indices_among_those_of_all_steps():
    rows = BatchRows(6, range(2, 5))
    assert len(rows) == 3 and rows.within.tolist() == [2, 3, 4]
    assert rows.indices(tf.constant(7, tf.int64)).numpy().tolist() == [44, 45, 46]
