"""The text input: a pure function of the step that loses and repeats no byte."""

import dataclasses
import io
import math
import os
import random

import gin
import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.text.text_input import (
    ByteTokenizer,
    Corpus,
    TextFiles,
    TextInput,
    load_corpus,
    pack_rows,
)
from meshwright.tasks.text.vocabulary import (
    SentencePieceVocabulary,
    SpecialTokens,
    Subwords,
)

TOKENIZER = ByteTokenizer()
S = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Fifty small files of random bytes, all values included, and an empty one."""
    root = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    for number in range(50):
        folder = root / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_bytes(rng.randbytes(rng.randrange(1, 60)))
    (root / "empty.txt").touch()
    return TextFiles(root=str(root), pattern="*.txt", held_out_one_in=4)


def pack(documents, sequence_length):
    """All examples of `documents`, as one batch of NumPy arrays."""
    corpus = Corpus.from_documents(documents)
    index = tf.range(corpus.example_count(sequence_length), dtype=tf.int64)
    rows = pack_rows(
        tf.constant(corpus.stream),
        tf.constant(corpus.bounds),
        index,
        sequence_length=sequence_length,
    )
    return rows.map(lambda tensor: tensor.numpy())


def packed_by_hand(documents, sequence_length):
    """What `pack` says, token by token."""
    tokens = [
        (number, token)
        for number, document in enumerate(documents)
        for token in [TOKENIZER.start_id, *TOKENIZER.encode(document)]
    ]
    names = ("ids", "labels", "segment_ids", "segment_positions", "weights")
    rows = {name: [] for name in names}
    for first in range(0, len(tokens) - 1, sequence_length):
        row = {name: [0] * sequence_length for name in names}
        segment, position = 0, 0
        for at in range(first, min(first + sequence_length, len(tokens) - 1)):
            document, token = tokens[at]
            new = at == first or document != tokens[at - 1][0]
            segment, position = (segment + 1, 0) if new else (segment, position + 1)
            labelled = tokens[at + 1][0] == document
            row["ids"][at - first] = token
            row["labels"][at - first] = tokens[at + 1][1] if labelled else 0
            row["segment_ids"][at - first] = segment
            row["segment_positions"][at - first] = position
            row["weights"][at - first] = float(labelled)
        for name in names:
            rows[name].append(row[name])
    return rows


def assert_same(batch, other):
    assert set(batch) == set(other)
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


def test_tokenizer_round_trip_and_special_ids():
    text = bytes(range(256))
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert len(set(ids)) == 256 and max(ids) < TOKENIZER.vocab_size
    assert not {TOKENIZER.padding_id, TOKENIZER.start_id} & set(ids)
    last = TOKENIZER.vocab_size - 1
    assert TOKENIZER.decode([TOKENIZER.start_id, *ids[65:68], 0, last]) == b"ABC"


def test_packing_segments_by_example():
    rows = pack([b"abc", b"d"], 4)
    a, b, c, d = TOKENIZER.encode(b"abcd")
    start = TOKENIZER.start_id
    np.testing.assert_array_equal(rows.ids, [[start, a, b, c], [start, 0, 0, 0]])
    np.testing.assert_array_equal(rows.labels, [[a, b, c, 0], [d, 0, 0, 0]])
    np.testing.assert_array_equal(rows.weights, [[1, 1, 1, 0], [1, 0, 0, 0]])
    rows = pack([b"a", b"bcd"], 4)
    np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 2, 2], [1, 0, 0, 0]])
    np.testing.assert_array_equal(rows.segment_positions, [[0, 1, 0, 1], [0, 0, 0, 0]])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    documents=strategies.lists(strategies.binary(min_size=1, max_size=20), min_size=1),
    sequence_length=strategies.integers(1, 17),
)
def test_packing_is_what_it_says_and_labels_every_byte_once(documents, sequence_length):
    rows = pack(documents, sequence_length)
    assert_same(rows, packed_by_hand(documents, sequence_length))
    assert TOKENIZER.decode(rows.labels[rows.weights > 0]) == b"".join(documents)


def test_examples_past_the_last_are_padding():
    corpus = Corpus.from_documents([b"abc", b"d"])
    rows = pack_rows(
        tf.constant(corpus.stream),
        tf.constant(corpus.bounds),
        tf.constant([2, 3, 100], tf.int64),
        sequence_length=4,
    )
    assert all(not np.any(leaf) for leaf in rows.leaves())


def test_one_epoch_trains_on_every_byte_once(files):
    text_input = TextInput(files=files, sequence_length=S)
    corpus = load_corpus(files, Split.TRAIN)
    count = corpus.example_count(S)
    batches = text_input.train_batches(0, global_batch=count, rows=range(count))
    first, second = (batch.labels.numpy() for batch in batches.take(2))
    texts = [p for p in files.paths() if files.split_of(p) is Split.TRAIN]
    expected = sorted(b"".join(files.read(path) for path in texts))
    assert sorted(TOKENIZER.decode(first)) == expected
    assert sorted(TOKENIZER.decode(second)) == expected
    assert (first != second).any()
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))


@pytest.mark.parametrize("step", [1, 29, 1000])
def test_starting_at_a_step_equals_skipping_to_it(files, step):
    text_input = TextInput(files=files, sequence_length=S, seed=5)
    straight = text_input.train_batches(0, global_batch=6, rows=range(6))
    resumed = text_input.train_batches(step, global_batch=6, rows=range(6))
    for batch, other in zip(straight.skip(step).take(3), resumed.take(3), strict=True):
        assert_same(batch, other)


@pytest.mark.parametrize("split", list(Split))
def test_processes_together_read_the_batch_of_one(files, split):
    text_input = TextInput(files=files, sequence_length=S)

    def read(rows):
        if split is Split.HELD_OUT:
            dataset = text_input.held_out_batches(global_batch=6, rows=rows)
        else:
            dataset = text_input.train_batches(7, global_batch=6, rows=rows).take(9)
        return list(dataset)

    parts = zip(read(range(4)), read(range(4, 6)), strict=True)
    for batch, (left, right) in zip(read(range(6)), parts, strict=True):
        joined = left.map(lambda *pair: tf.concat(pair, 0), right)
        assert_same(batch, joined)


def test_held_out_pass_reads_every_byte_once_in_order_and_pads(files):
    text_input = TextInput(files=files, sequence_length=S)
    batches = list(text_input.held_out_batches(global_batch=6, rows=range(6)))
    assert all(batch.ids.shape == (6, S) for batch in batches)
    texts = [p for p in files.paths() if files.split_of(p) is Split.HELD_OUT]
    expected = b"".join(files.read(path) for path in texts)
    labels = np.concatenate([batch.labels for batch in batches])
    assert TOKENIZER.decode(labels) == expected
    assert sum(batch.weights.numpy().sum() for batch in batches) == len(expected)
    assert not np.any(batches[-1].segment_ids[-1])


def test_max_batches_spread_over_the_held_out_files(files):
    text_input = TextInput(files=files, sequence_length=S)
    every = list(text_input.held_out_batches(global_batch=2, rows=range(2)))
    some = list(
        text_input.held_out_batches(global_batch=2, rows=range(2), max_batches=3)
    )
    assert len(some) == 3
    for number, batch in enumerate(some):
        assert_same(batch, every[number * len(every) // 3])


def test_splits_are_disjoint_and_stable(tmp_path, files):
    paths = files.paths()
    held_out = {p for p in paths if files.split_of(p) is Split.HELD_OUT}
    assert 5 < len(held_out) < len(paths) - 5
    assert paths == sorted(paths) and len(paths) == 51
    elsewhere = TextFiles(root=str(tmp_path), held_out_one_in=4)
    assert held_out == {p for p in paths if elsewhere.split_of(p) is Split.HELD_OUT}


def test_element_spec_is_the_dataset_s(files):
    text_input = TextInput(files=files, sequence_length=S)
    for dataset in (
        text_input.train_batches(0, global_batch=6, rows=range(2, 5)),
        text_input.held_out_batches(global_batch=6, rows=range(2, 5)),
    ):
        assert dataset.element_spec == text_input.element_spec(3)


@pytest.mark.parametrize(
    ("text", "entropy"), [(b"ab", 1.0), (bytes(range(256)), 8.0), (b"a", 0.0)]
)
def test_statistics(tmp_path, text, entropy):
    for number in range(8):
        (tmp_path / f"{number}.py").write_bytes(text)
    files = TextFiles(root=str(tmp_path), held_out_one_in=2)
    text_input = TextInput(files=files, sequence_length=10)
    train, held_out = (text_input.statistics(split) for split in Split)
    assert train.documents + held_out.documents == 8
    assert train.text_bytes == train.documents * len(text)
    tokens = train.documents * (len(text) + 1)
    assert train.examples == math.ceil((tokens - 1) / 10)
    assert train.unigram_entropy == pytest.approx(entropy)
    assert train.sha256 != held_out.sha256


def test_standard_library_is_found_without_installed_packages():
    paths = TextFiles().paths()
    assert {"os.py", "json/decoder.py"} <= set(paths)
    assert not any("site-packages" in path or "__pycache__" in path for path in paths)


def test_planning_does_not_touch_the_files():
    text_input = TextInput(files=TextFiles(root="/nowhere"), sequence_length=8)
    assert text_input.element_spec(4).ids.shape == (4, 8)
    assert text_input.vocab_size == TOKENIZER.vocab_size
    assert hash(text_input) == hash(
        TextInput(files=TextFiles(root="/nowhere"), sequence_length=8)
    )


def test_gin_builds_it():
    with gin.unlock_config():
        gin.parse_config("""
            TextFiles.excluded_dirs = ["a", "b"]
            TextInput.files = @TextFiles()
            TextInput.sequence_length = 32
        """)
    try:
        text_input = gin.get_configurable(TextInput)()
    finally:
        gin.clear_config()
    assert text_input == TextInput(
        files=TextFiles(excluded_dirs=("a", "b")), sequence_length=32
    )


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("missing", "no folder '{}/missing': set"),
        (".", r"under '{}' match '\*.tex': set"),
    ],
)
def test_no_files_found(tmp_path, root, message):
    files = TextFiles(root=str(tmp_path / root), pattern="*.tex")
    message = rf"{message.format(tmp_path)} TextFiles\.root"
    with pytest.raises(FileNotFoundError, match=message):
        TextInput(files=files, sequence_length=8).statistics()


def test_what_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "a.py")
    with pytest.raises(OSError, match=r"cannot read '.*/a.py' \(it is no regular file"):
        load_corpus(TextFiles(root=str(tmp_path)), Split.TRAIN)


@pytest.mark.parametrize("content", [b"", b"text"])
def test_a_split_without_text(tmp_path, content):
    (tmp_path / "one.py").write_bytes(content)
    files = TextFiles(root=str(tmp_path), held_out_one_in=10**9)
    message = rf"no text in the held_out files.*{tmp_path}.*held_out_one_in"
    with pytest.raises(ValueError, match=message):
        TextInput(files=files, sequence_length=8).statistics(Split.HELD_OUT)


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match=r"cannot read '.*gone\.py'.*make it readable"):
        load_corpus(TextFiles(root=str(tmp_path)), Split.TRAIN)


@pytest.mark.parametrize("rows", [range(0), range(3, 7), range(-1, 2)])
def test_rows_outside_the_batch(files, rows):
    with pytest.raises(ValueError, match="not part of a global batch of 6"):
        TextInput(files=files, sequence_length=S).train_batches(
            0, global_batch=6, rows=rows
        )


def test_bad_hyperparameters():
    with pytest.raises(ValueError, match="sequence_length is 0"):
        TextInput(sequence_length=0)
    with pytest.raises(ValueError, match="held_out_one_in is 1"):
        TextFiles(held_out_one_in=1)


LINES = [
    "def walk(tree):\n    for node in tree:\n\tyield  node",
    "  indented, with  two spaces\r\n\n\nand naïve façades – 日本 ﬁne\n",
    "for tree in forest: walk(tree)\n" * 5,
    "return the node of the tree, and walk the forest\n" * 3,
]


@pytest.fixture(scope="module", params=SpecialTokens)
def subwords(request, tmp_path_factory):
    """An input of subwords of forty small files of text."""
    pytest.importorskip("sentencepiece")
    root = tmp_path_factory.mktemp("subwords")
    for number in range(40):
        text = f"{number} {LINES[number % len(LINES)]}"
        (root / f"{number}.txt").write_bytes(text.encode())
    return TextInput(
        files=TextFiles(root=str(root), pattern="*.txt", held_out_one_in=4),
        vocabulary=SentencePieceVocabulary(
            vocab_size=360, subwords=Subwords.BPE, special_tokens=request.param
        ),
        sequence_length=S,
    )


@pytest.mark.parametrize("text", [*LINES, "", " ", "\n", "unseen: ☃"])
def test_subwords_keep_text_as_it_is(subwords, text):
    start, *ids = subwords.encode(text)
    start_id, end_id = {
        SpecialTokens.WITH_START: (1, 2),
        SpecialTokens.T5: (0, 1),
    }[subwords.vocabulary.special_tokens]
    assert (start, subwords.end_id) == (start_id, end_id)
    assert all(end_id < i < 360 for i in ids)
    assert subwords.decode([start, *ids, subwords.end_id, 50]) == text
    assert subwords.decode([*ids, 10_000]) == text  # An id of a larger table.


@pytest.mark.parametrize("split", Split)
def test_each_subword_and_end_is_a_label_once(subwords, split):
    wanted = []
    for path in subwords.files.paths():
        if subwords.files.split_of(path) is split:
            text = subwords.files.read(path).decode()
            wanted.append(subwords.encode(text) + [subwords.end_id])
    corpus, count = subwords.corpus(split), 0
    rows = corpus.example_count(S)
    if split is Split.TRAIN:
        batches = subwords.train_batches(0, global_batch=rows, rows=range(rows)).take(1)
    else:
        batches = subwords.held_out_batches(global_batch=rows, rows=range(rows))
    (batch,) = batches.as_numpy_iterator()
    pairs = [pair for ids in wanted for pair in zip(ids, ids[1:], strict=False)]
    at = batch["weights"] > 0
    got = list(zip(batch["ids"][at], batch["labels"][at], strict=True))
    assert sorted(got) == sorted(pairs)
    count = sum(len(ids) - 1 for ids in wanted)
    statistics = subwords.statistics(split)
    assert statistics.tokens == count == len(got)
    files = [p for p in subwords.files.paths() if subwords.files.split_of(p) is split]
    assert statistics.text_bytes == sum(len(subwords.files.read(p)) for p in files)
    assert count < statistics.text_bytes
    frequency = np.bincount(batch["labels"][at]) / count
    share = frequency[frequency > 0]
    bits = -(share * np.log2(share)).sum() * count / statistics.text_bytes
    assert statistics.unigram_entropy == pytest.approx(bits)


def test_a_vocabulary_is_that_of_its_file_and_of_the_training_files(subwords, tmp_path):
    trained = subwords.trained_vocabulary()
    model = tmp_path / "model"
    model.write_bytes(trained.model)
    read = dataclasses.replace(subwords.vocabulary, model_file=str(model))
    other = dataclasses.replace(subwords, vocabulary=read)
    assert other.trained_vocabulary().sha256 == trained.sha256
    assert other.statistics().sha256 == subwords.statistics().sha256
    assert other.vocab_size == 360 and other.end_id == trained.end_id
    (wrong,) = set(SpecialTokens) - {read.special_tokens}
    wrong = dataclasses.replace(read, special_tokens=wrong)
    message = f"start and end at .*set .*special_tokens to %{read.special_tokens}"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(subwords, vocabulary=wrong).trained_vocabulary()


def test_rows_of_a_model_of_t5_begin_with_its_padding(tmp_path):
    """Its ids are padding 0, end 1, unknown 2, and it has no start, nor bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    rng, model = random.Random(0), io.BytesIO()
    words = ["".join(rng.choices("abcdefghijklmnop", k=5)) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=8)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=300,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "t5.model").write_bytes(model.getvalue())
    for number, content in enumerate(texts[:8]):
        (tmp_path / f"{number}.py").write_text(content)
    text = TextInput(
        files=TextFiles(root=str(tmp_path), held_out_one_in=4),
        vocabulary=SentencePieceVocabulary(
            vocab_size=300,
            model_file=str(tmp_path / "t5.model"),
            special_tokens=SpecialTokens.T5,
        ),
        sequence_length=64,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    files = [p for p in text.files.paths() if text.files.split_of(p) is Split.TRAIN]
    wanted = [
        [0, *processor.encode(text.files.read(path).decode()), 1] for path in files
    ]
    flat = [token for ids in wanted for token in ids]
    rows = -(-(len(flat) - 1) // 64)
    batches = text.train_batches(0, global_batch=rows, rows=range(rows)).take(1)
    (batch,) = batches.as_numpy_iterator()
    at = batch["weights"] > 0
    got = zip(batch["ids"][at], batch["labels"][at], strict=True)
    pairs = [pair for ids in wanted for pair in zip(ids, ids[1:], strict=False)]
    assert sorted(got) == sorted(pairs)
    # Padding is told from starts by its segment.
    starts = (batch["ids"] == 0) & (batch["segment_ids"] > 0)
    assert starts.sum() == len(files)
    assert text.decode([*text.encode(texts[0]), 1, 5]) == texts[0]


def test_files_without_enough_text_for_a_vocabulary_are_refused(subwords):
    large = dataclasses.replace(
        subwords, vocabulary=SentencePieceVocabulary(vocab_size=30_000)
    )
    with pytest.raises(
        ValueError, match="no vocabulary of 30000 pieces can be trained"
    ):
        large.statistics()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n \n\t\n", "there is no text .* blank: give files with text, or Sent"),
        ("x" * 4193, "all lines of the text are longer than 4192 bytes, .*: break"),
        ("é" * 2097, "all lines of the text are longer than 4192 bytes, .*: break"),
    ],
)
def test_lines_that_train_no_vocabulary_are_refused(tmp_path, content, message):
    for number in range(8):
        (tmp_path / f"{number}.py").write_text(content)
    text = TextInput(
        files=TextFiles(root=str(tmp_path), held_out_one_in=4),
        vocabulary=SentencePieceVocabulary(vocab_size=300),
        sequence_length=S,
    )
    with pytest.raises(ValueError, match=message):
        text.trained_vocabulary()
