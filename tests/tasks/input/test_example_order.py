"""Which examples a batch holds: its rows, and a permutation for each epoch."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.tasks.images.image_input import ImageInput
from meshwright.tasks.input.example_order import SEEDS, BatchRows, shuffled_examples
from meshwright.tasks.recommendation.recommendation_input import RecommendationInput
from meshwright.tasks.segmentation.segmentation_input import SegmentationInput
from meshwright.tasks.segmentation.synthetic_volumes import SyntheticVolumes
from meshwright.tasks.speech.speech_input import SpeechInput
from meshwright.tasks.text.text_input import TextInput
from meshwright.tasks.text.translation_input import TranslationInput


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


ORDERED = (
    ImageInput,
    RecommendationInput,
    SegmentationInput,
    SpeechInput,
    TextInput,
    TranslationInput,
)


@pytest.mark.parametrize("cls", ORDERED)
def test_an_input_bounds_the_seed_of_its_order(cls):
    (field,) = (field for field in dataclasses.fields(cls) if field.name == "seed")
    assert field.metadata == bounded(0, **SEEDS).metadata


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_has_no_order_is_refused_by_name(seed):
    message = (
        f"TextInput.seed is {seed}; it must be a whole number of at least 0 and below"
    )
    with pytest.raises(ValueError, match=message):
        TextInput(sequence_length=8, seed=seed)
    with pytest.raises(ValueError, match="SyntheticVolumes.seed is -1"):
        SyntheticVolumes(seed=-1)


def test_the_largest_seed_has_an_order_and_another_within():
    largest = TextInput(sequence_length=8, seed=SEEDS["below"] - 1).seed
    for seed in (largest, largest + 1):
        order = shuffled_examples(tf.range(7, dtype=tf.int64), count=7, seed=seed)
        np.testing.assert_array_equal(np.sort(order), np.arange(7))


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
