"""Packed rows of pairs, the order of training, and the vocabulary under them."""

import collections
import dataclasses
import io

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from meshwright.tasks.input.example_order import Split, shuffled_examples
from meshwright.tasks.text.parallel_text import GettextCatalogues
from meshwright.tasks.text.translation_input import SampledOrder, TranslationInput
from meshwright.tasks.text.vocabulary import (
    SentencePieceVocabulary,
    SpecialTokens,
    Subwords,
)
from tests.tasks.text.parallel_files import install, install_all, sentences

COUNTS = {"de": 300, "fr": 150, "sv": 30}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("catalogues")
    install_all(root, COUNTS)
    return GettextCatalogues(root=str(root), held_out_one_in=10)


def text_input(files, special=SpecialTokens.WITH_START, **kwargs):
    sizes = {"source_length": 40, "target_length": 48, **kwargs}
    vocabulary = SentencePieceVocabulary(vocab_size=330, special_tokens=special)
    return TranslationInput(files=files, vocabulary=vocabulary, **sizes)


def pairs_of(batch, vocabulary, tags):
    """(language, source, target) of every segment of a batch."""
    b = {name: t.numpy() for name, t in batch.items()}
    pairs = []
    for row in range(len(b["source_ids"])):
        for n in range(1, b["source_segment_ids"][row].max() + 1):
            here = b["source_segment_ids"][row] == n
            there = b["target_segment_ids"][row] == n
            tag, *source = b["source_ids"][row][here].tolist()
            read = b["target_ids"][row][there].tolist()
            labels = b["target_labels"][row][there].tolist()
            assert read == [vocabulary.start_id, *labels[:-1]]
            assert labels[-1] == source[-1] == vocabulary.end_id
            for side, where in (("source", here), ("target", there)):
                places = b[f"{side}_positions"][row][where]
                assert places.tolist() == list(range(len(places)))
            pairs.append(
                (tags[tag], vocabulary.decode(source), vocabulary.decode(labels))
            )
    return pairs


@pytest.mark.parametrize("special", SpecialTokens)
def test_every_pair_is_in_the_rows_once(files, special):
    given = text_input(files, special)
    vocabulary = given.trained_vocabulary()
    tags = {vocabulary.tag_id(language): language for language in COUNTS}
    held_out = given.held_out_batches(global_batch=3, rows=range(3))
    pairs = [pair for batch in held_out for pair in pairs_of(batch, vocabulary, tags)]
    wanted = files.pairs(Split.HELD_OUT)
    assert sorted(pairs) == sorted(
        (pair.target_language, pair.source, pair.target) for pair in wanted
    )
    for batch in held_out:
        weights, segments = batch.target_weights, batch.target_segment_ids
        np.testing.assert_array_equal(weights.numpy() > 0, segments.numpy() > 0)
        assert batch.map(lambda t: tf.TensorSpec(t.shape, t.dtype)) == (
            given.element_spec(3)
        )
    rows = given.rows(Split.TRAIN)
    assert rows.pairs == len(files.pairs(Split.TRAIN)) and rows.too_long == 0
    filled = (rows.columns["target_segment_ids"] > 0).mean()
    assert filled > 0.8, "first fit fills rows"


def test_long_pairs_are_left_out_and_counted(files):
    rows = text_input(files, source_length=6).rows(Split.TRAIN)
    assert rows.too_long > 0
    assert rows.pairs + rows.too_long == len(files.pairs(Split.TRAIN))
    with pytest.raises(ValueError, match="are longer than source_length 2"):
        text_input(files, source_length=2).rows(Split.TRAIN)


def test_a_batch_follows_from_its_step_alone(files):
    given = text_input(files)
    batches = given.train_batches(0, global_batch=4, rows=range(4)).take(5)
    later = given.train_batches(3, global_batch=4, rows=range(1, 3)).take(2)
    for full, part in zip(list(batches)[3:], later, strict=True):
        for name in full:
            np.testing.assert_array_equal(full[name][1:3], part[name])


def test_all_rows_come_once_in_a_cycle_at_temperature_1(files):
    bounds = text_input(files).rows(Split.TRAIN).bounds
    order = SampledOrder.of(bounds, 1.0, 0)
    count = int(bounds[-1])
    first = order.rows(tf.range(count, dtype=tf.int64)).numpy()
    second = order.rows(tf.range(count, 2 * count, dtype=tf.int64)).numpy()
    assert sorted(first) == sorted(second) == list(range(count))
    assert (first != second).any()


@pytest.mark.parametrize("temperature", [2.0, 5.0, 1e6])
def test_temperature_evens_out_directions(temperature):
    bounds = np.array([0, 1000, 1200, 1210])
    order = SampledOrder.of(bounds, temperature, 3)
    length = int(order.shares[-1])
    rows = order.rows(tf.range(10 * length, dtype=tf.int64)).numpy()
    at = np.searchsorted(bounds, rows, side="right") - 1
    shares = np.bincount(at) / len(rows)
    wanted = np.diff(bounds) ** (1 / temperature)
    np.testing.assert_allclose(shares, wanted / wanted.sum(), atol=2e-3)
    # Each direction goes through all its rows before one comes again.
    for direction, size in enumerate(np.diff(bounds)):
        of = collections.Counter(rows[at == direction].tolist())
        assert max(of.values()) - min(of.values()) <= 2 and len(of) == size


def test_padding_of_a_direction_is_no_row_of_the_next():
    count = 2**16 + 1  # Its order is padded by an example.
    order = SampledOrder.of(np.array([0, count, count + 10]), 1.0, 3)
    rows = order.rows(tf.range(2 * (count + 10), dtype=tf.int64)).numpy()
    read = np.bincount(rows, minlength=count + 11)
    assert read[-1] > 0 and set(read[:-1]) <= {1, 2, 3}
    assert set(read[count:-1]) == {2}


def test_several_orders_at_once_are_each_a_permutation():
    # 65537 - 1 is the power of 4 at which TF's cipher fails.
    counts = [7, 65537, 100]
    for count in counts:
        places = tf.range(count, dtype=tf.int64)
        order = shuffled_examples(places, count=count, seed=5).numpy()
        each = shuffled_examples(
            places, count=tf.fill([count], tf.constant(count, tf.int64)), seed=5
        )
        np.testing.assert_array_equal(order, each)
        seen = order[order < count]
        assert len(set(seen)) == len(seen) >= count - 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"source_length": 1}, "TranslationInput.source_length is 1"),
        ({"target_length": 0}, "TranslationInput.target_length is 0"),
        ({"temperature": 0.5}, "TranslationInput.temperature is 0.5"),
    ],
)
def test_wrong_hyperparameters(files, kwargs, message):
    with pytest.raises(ValueError, match=message):
        text_input(files, **kwargs)


TEXTS = ["the house, a stone", *sentences(300)]


@pytest.mark.parametrize("subwords", Subwords)
def test_a_vocabulary_spells_everything(subwords):
    spec = SentencePieceVocabulary(vocab_size=300, subwords=subwords)
    vocabulary = spec.trained(TEXTS, ["sv", "de"])
    assert vocabulary.size == 300
    texts = ["the house", "snow ☃ 雪", "<2de> is only text"]
    encoded = vocabulary.encode(texts)
    assert [vocabulary.decode(ids) for ids in encoded] == texts
    assert vocabulary.tag_id("de") not in encoded[2]
    assert len({vocabulary.tag_id("de"), vocabulary.tag_id("sv")}) == 2
    ended = [*encoded[0], vocabulary.end_id, 7, 0]
    assert vocabulary.decode(ended) == "the house"
    again = spec.trained(TEXTS, ["de", "sv"])
    assert again.sha256 == vocabulary.sha256
    with pytest.raises(ValueError, match="no tag for language 'fr'"):
        vocabulary.tag_id("fr")


def test_a_model_file(tmp_path):
    spec = SentencePieceVocabulary(vocab_size=300)
    vocabulary = spec.trained(TEXTS, ["de"])
    path = tmp_path / "model"
    path.write_bytes(vocabulary.model)
    read = SentencePieceVocabulary(vocab_size=300, model_file=str(path))
    assert read.trained([], ["de"]).sha256 == vocabulary.sha256
    with pytest.raises(ValueError, match=r"lacks the tags \['<2fr>'\]"):
        read.trained([], ["fr"])
    other = SentencePieceVocabulary(vocab_size=301, model_file=str(path))
    with pytest.raises(ValueError, match="vocab_size must be 300, not 301"):
        other.trained([], ["de"])
    space = "\u2581".encode()
    for damaged in (b"no model", vocabulary.model.replace(space, b"\xbc" + space[1:])):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match="model is no SentencePiece model: set Sen"
        ):
            read.trained([], ["de"])


def test_a_model_file_may_have_few_pieces(tmp_path):
    t5 = SpecialTokens.T5
    padding, _, end = t5.in_model
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=(model := io.BytesIO()),
        vocab_size=60,  # Bytes have no pieces, as in models of T5.
        pad_id=padding,
        bos_id=-1,
        eos_id=end,
        unk_id=2,
        minloglevel=2,
    )
    path = tmp_path / "model"
    path.write_bytes(model.getvalue())
    spec = SentencePieceVocabulary(
        vocab_size=60, model_file=str(path), special_tokens=t5
    )
    vocabulary = spec.trained([])
    ids = vocabulary.encode(["the house"])[0]
    # A model may have more ids than there are pieces.
    assert vocabulary.decode([*ids, vocabulary.size]) == "the house"


def test_vocabularies_that_cannot_be():
    with pytest.raises(ValueError, match="vocab_size is 100: make it, or .*VOCAB_SIZE"):
        SentencePieceVocabulary(vocab_size=100)
    spec = SentencePieceVocabulary(vocab_size=5000)
    with pytest.raises(ValueError, match="5000 pieces.*301 texts.*ce: Vocabulary"):
        spec.trained(TEXTS, ["de"])


def test_a_language_that_is_held_out_alone_has_its_tag(tmp_path):
    messages = dict(zip(TEXTS, TEXTS, strict=True))
    install(tmp_path, "de", messages)
    files = GettextCatalogues(root=str(tmp_path), held_out_one_in=2)
    held_out = next(p.source for p in files.pairs(Split.HELD_OUT))
    install(tmp_path, "rom", {held_out: held_out})
    text = TranslationInput(
        files=dataclasses.replace(files, languages=("de", "rom")),
        vocabulary=SentencePieceVocabulary(vocab_size=300),
        source_length=40,
        target_length=40,
    )
    assert text.rows(Split.HELD_OUT).directions == ("en-de", "en-rom")


def test_a_model_that_counts_otherwise_is_refused(tmp_path):
    path = tmp_path / "model"
    spec = SentencePieceVocabulary(vocab_size=300, model_file=str(path))
    with pytest.raises(FileNotFoundError, match=r"no file .*model to read \(No such"):
        spec.trained([], ["de"])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=(model := io.BytesIO()),
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    message = r"at \(-1, 1, 2\): train a model with them at \(0, 1, 2\), by --pad_id"
    with pytest.raises(ValueError, match=message):
        spec.trained([], ["de"])
