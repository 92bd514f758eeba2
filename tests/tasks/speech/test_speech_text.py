"""Characters as labels, both searches, and error rates."""

import itertools

import numpy as np
import pytest

from meshwright.tasks.speech.speech_text import (
    BLANK_ID,
    CharacterVocabulary,
    Recognized,
    beam_search,
    error_rates,
    greedy_search,
    samples,
)


def test_text_and_labels():
    vocabulary = CharacterVocabulary(characters="ab '", vocab_size=8)
    (labels,) = vocabulary.encode(["B  a'\tb "])
    assert labels == [2, 3, 1, 4, 3, 2]
    assert vocabulary.decode([0, *labels, 7]) == "b a' b"
    assert vocabulary.normalized("B  a'\tb ") == "b a' b"
    assert vocabulary.trained(["anything"], ()) is vocabulary
    other = CharacterVocabulary(characters="ba '", vocab_size=8)
    assert vocabulary.sha256 != other.sha256


def test_characters_that_are_no_labels():
    with pytest.raises(ValueError, match=r"'caf\xe9 3' has '\xe9', which is not in Ch"):
        CharacterVocabulary().encode(["abc", "caf\xe9 3"])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"characters": "aba"}, "'aba' has a character twice"),
        ({"characters": "aB"}, "has upper case"),
        ({"vocab_size": 28}, "vocab_size is 28: make it 29 or more"),
    ],
)
def test_wrong_vocabularies(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CharacterVocabulary(**kwargs)


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_greedy_search_drops_repeats_and_blanks():
    path = [0, 2, 2, 0, 2, 1, 1, 0, 3, 3]
    log_probs = log_softmax(5 * np.eye(4)[[path] * 3]).astype(np.float32)
    ids = greedy_search(log_probs, np.array([10, 5, 0], np.int32))
    assert ids == [[2, 2, 1, 3], [2, 2], []]


def likeliest(log_probs):
    """The labels with the largest sum over all alignments."""
    totals = {}
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        labels = tuple(i for i, _ in itertools.groupby(path) if i != BLANK_ID)
        chance = np.exp(log_probs[np.arange(len(path)), path].sum())
        totals[labels] = totals.get(labels, 0.0) + chance
    return list(max(totals, key=totals.get))


def test_beam_search_finds_what_is_likeliest_over_all_alignments():
    rng = np.random.default_rng(0)
    log_probs = log_softmax(rng.standard_normal([12, 5, 3])).astype(np.float32)
    frames = np.array([5, 4, 3] * 4, np.int32)
    ids = beam_search(log_probs, frames, beams=100)
    want = [likeliest(rows[:n]) for rows, n in zip(log_probs, frames, strict=True)]
    assert ids == want
    alone = greedy_search(log_probs, frames)
    assert alone != want, "greedy search does not, or this shows nothing"


def test_rows_of_padding_say_nothing():
    log_probs = np.zeros([2, 3, 4], np.float32)
    log_probs[1, :, 2] = 9
    frames = np.array([0, 3], np.int32)
    assert beam_search(log_probs, frames, beams=4) == [[], [2]]
    assert greedy_search(log_probs, frames) == [[], [2]]


def test_error_rates_are_of_words_and_characters():
    recognized = [
        Recognized("the cat sat", "the cat sat", "the cat sat"),
        Recognized("a b c d e", "a b", "a x c d e"),
    ]
    rates = error_rates(recognized)
    assert rates["wer"] == pytest.approx(1 / 8)
    assert rates["cer"] == pytest.approx(1 / 20)
    assert rates["wer/greedy"] == pytest.approx(3 / 8)
    assert rates["cer/greedy"] == pytest.approx(6 / 20)
    assert error_rates([]) == {}
    assert error_rates([Recognized("a b", "", "")])["wer"] == 1


def test_samples_are_a_table():
    many = [Recognized(f"said {i}", "x", "a|b") for i in range(50)]
    lines = samples(many, count=5).split("\n")
    assert len(lines) == 7
    assert lines[2] == "| said 0 | a\\|b | x |" and "said 40" in lines[-1]
