"""Batches of utterances: buckets, their order, and what is left out of them."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.speech.speech_audio import LogMel, Normalization, read_wav
from meshwright.tasks.speech.speech_input import BucketOrder, SpeechInput, frames_needed
from meshwright.tasks.speech.speech_manifest import Manifest
from meshwright.tasks.speech.speech_text import CharacterVocabulary
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary
from tests.tasks.speech.speech_files import install, sentences, sound, write_wav

BUCKETS = (70, 110, 200)
TEXTS = sentences(90)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    manifest = install(tmp_path_factory.mktemp("speech"), TEXTS)
    return Manifest(path=str(manifest), held_out_one_in=4)


def speech_input(files, **kwargs):
    kwargs = {"label_length": 30, "bucket_frames": BUCKETS, **kwargs}
    vocabulary = kwargs.pop("vocabulary", CharacterVocabulary())
    return SpeechInput(files=files, vocabulary=vocabulary, **kwargs)


def rows_of(batch):
    """(frames, labels without padding) of the rows that are no padding."""
    labels, counts = batch["labels"].numpy(), batch["label_counts"].numpy()
    frames = batch["frames"].numpy()
    return [
        (int(frames[i]), tuple(labels[i, : counts[i]]))
        for i in range(len(frames))
        if frames[i]
    ]


def test_held_out_utterances_come_once_each_in_its_bucket(files):
    given = speech_input(files)
    pairs = []
    for batch in given.held_out_batches(global_batch=4, rows=range(4)):
        longest = int(batch["frames"].numpy().max())
        bucket = np.searchsorted(BUCKETS, longest)
        for frames, labels in rows_of(batch):
            assert np.searchsorted(BUCKETS, frames) == bucket
            pairs.append(given.vocabulary.decode(labels))
        features, frames = batch["features"].numpy(), batch["frames"].numpy()
        for row, count in zip(features, frames, strict=True):
            assert not row[count:].any() and np.isfinite(row).all()
            assert count == 0 or row[:count].any(axis=-1).all()
        del batch["utterance"]
        assert batch.map(lambda t: tf.TensorSpec(t.shape, t.dtype)) == (
            given.element_spec(4)
        )
    wanted = [utterance.transcript for utterance in files.read(Split.HELD_OUT)]
    assert sorted(pairs) == sorted(wanted) and len(wanted) > 10


def test_numbers_lead_to_what_is_heard(files):
    given = speech_input(files)
    listed = given.utterances(Split.HELD_OUT).listed
    seen = []
    for batch in given.held_out_batches(global_batch=4, rows=range(4)):
        for row, number in enumerate(batch["utterance"].numpy()):
            if number < 0:
                assert batch["frames"][row] == 0 and batch["label_counts"][row] == 0
                continue
            seen.append(number)
            energies = given.log_mel.energies(read_wav(listed[number].path)[None])
            frames = energies.shape[1]
            assert frames == batch["frames"][row]
            want = given.log_mel.normalized(energies, tf.constant([frames]), None)[0]
            np.testing.assert_allclose(
                batch["features"][row, :frames], want, rtol=0, atol=1e-4
            )
    assert sorted(seen) == list(range(len(listed)))


def test_a_batch_follows_from_its_step_alone(files):
    given = speech_input(files)
    batches = given.train_batches(0, global_batch=4, rows=range(4)).take(6)
    later = given.train_batches(4, global_batch=4, rows=range(1, 3)).take(2)
    for full, part in zip(list(batches)[4:], later, strict=True):
        for name in full:
            np.testing.assert_array_equal(full[name][1:3], part[name])
    others = speech_input(files, seed=1).train_batches(0, global_batch=4, rows=range(4))
    first, other = next(iter(batches)), next(iter(others))
    assert rows_of(first) != rows_of(other)


def test_few_held_out_batches_are_spread_over_the_buckets(files):
    batches = speech_input(files).held_out_batches(
        global_batch=2, rows=range(2), max_batches=3
    )
    longest = [int(batch["frames"].numpy().max()) for batch in batches]
    assert len(longest) == 3 and len({*np.searchsorted(BUCKETS, longest)}) == 3


@pytest.mark.parametrize("counts", [[40, 20, 8], [5, 0, 33], [3, 1, 0], [70000, 9, 1]])
def test_a_batch_is_of_one_bucket_and_a_cycle_of_all(counts):
    bounds, B = np.concatenate([[0], np.cumsum(counts)]), 4
    order = BucketOrder.of(bounds, B, seed=3)
    steps = int(order.batches[-1]) if bounds[-1] < 1000 else 200
    place = tf.range(B, dtype=tf.int64)
    per_epoch = [
        np.array(order.rows(tf.constant(s, tf.int64), place)) for s in range(steps)
    ]
    assert all((rows < bounds[-1]).all() for rows in per_epoch)
    buckets = [
        set(np.searchsorted(bounds, r[r >= 0], side="right") - 1) for r in per_epoch
    ]
    assert all(len(bucket) == 1 for bucket in buckets)
    if bounds[-1] < 1000:
        each = collections.Counter(bucket.pop() for bucket in buckets)
        assert each == {k: max(1, round(n / B)) for k, n in enumerate(counts) if n}
        # Each bucket goes through all of it before one comes again.
        seen = collections.Counter(np.concatenate(per_epoch).tolist())
        for k, n in enumerate(counts):
            times = [seen[i] for i in range(bounds[k], bounds[k + 1])]
            assert not times or max(times) - min(times) <= 1, n
        again = np.array(order.rows(tf.constant(steps, tf.int64), place))
        assert again.shape == (B,)


def test_what_cannot_be_used_is_counted(tmp_path):
    texts = TEXTS[:30]
    long, wordy, fast = "ab " * 9 + "a", "a" * 20, "bbb"
    manifest = install(tmp_path, [*texts, long, wordy, fast])
    write_wav(tmp_path / "31.wav", sound(wordy[:10]))  # 20 labels, in few frames.
    write_wav(tmp_path / "32.wav", sound("bb"))  # 3 labels, 2 repeats: 5 of 4 frames.
    files = Manifest(path=str(manifest), held_out_one_in=10**9)
    short = [text for text in texts if len(text) <= 15]
    given = speech_input(files, bucket_frames=(130,), label_length=15)
    utterances = given.utterances(Split.TRAIN)
    # A letter is 8 frames, so that what is over 16 letters is over 130 frames.
    assert utterances.too_long == 1 + sum(len(text) > 16 for text in texts)
    assert utterances.too_wordy == 1 + sum(len(text) == 16 for text in texts)
    assert utterances.too_fast == 1
    assert sorted(u.transcript for u in utterances.listed) == sorted(short)
    assert (utterances.labels > 0).sum() == utterances.label_counts.sum()


@pytest.mark.parametrize(
    ("labels", "frames"), [([], 0), ([4], 1), ([4, 5], 2), ([4, 4], 3), ([4, 4, 4], 5)]
)
def test_equal_neighbours_need_a_blank_between_them(labels, frames):
    assert frames_needed(labels) == frames


def test_nothing_that_can_be_used(files):
    given = speech_input(files, bucket_frames=(10,))
    with pytest.raises(
        ValueError, match=r"\d+ are longer than .*bucket_frames \(10,\)"
    ):
        given.utterances(Split.TRAIN)


def test_a_transcript_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    manifest = install(tmp_path, ["abc", "ab8"])
    given = speech_input(Manifest(path=str(manifest), held_out_one_in=10**9))
    with pytest.raises(
        ValueError, match=r"manifest\.tsv:2: 'ab8' has '8', which is no"
    ):
        given.utterances(Split.TRAIN)


def test_a_file_that_is_no_wav_is_found_before_training(tmp_path):
    manifest = install(tmp_path, ["abc", "abd"])
    (tmp_path / "1.wav").write_bytes(b"OggS, not wav")
    given = speech_input(Manifest(path=str(manifest), held_out_one_in=10**9))
    with pytest.raises(ValueError, match=r"1\.wav is no wav file .* b'OggS, not wa'"):
        given.train_batches(0, global_batch=1, rows=range(1))


def test_subwords(files):
    given = speech_input(files, vocabulary=SentencePieceVocabulary(vocab_size=290))
    vocabulary, utterances = given.trained_vocabulary(), given.utterances(Split.TRAIN)
    assert given.vocab_size == 290 and utterances.labels.max() < 290
    for row, count, utterance in zip(
        utterances.labels, utterances.label_counts, utterances.listed, strict=True
    ):
        assert (row[:count] > 0).all()
        assert vocabulary.decode(row[:count]) == utterance.transcript


def test_global_statistics_are_of_the_training_data(files):
    given = speech_input(
        files, log_mel=LogMel(bins=8, normalization=Normalization.GLOBAL)
    )
    count = len(given.utterances(Split.TRAIN).listed)
    assert given._statistics().shape == (2, 8)
    batches = given.train_batches(0, global_batch=1, rows=range(1)).take(count)
    frames = np.concatenate(
        [batch["features"][0, : batch["frames"][0]] for batch in batches]
    )
    np.testing.assert_allclose(frames.mean(axis=0), 0, atol=0.05)
    np.testing.assert_allclose(frames.std(axis=0), 1, atol=0.05)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bucket_frames": ()}, r"bucket_frames is \(\)"),
        ({"bucket_frames": (100, 80)}, "each more than the one before"),
        ({"bucket_frames": (0, 80)}, "bucket_frames is"),
        ({"label_length": 0}, "SpeechInput.label_length is 0"),
        ({"subsampling": 0}, "SpeechInput.subsampling is 0"),
    ],
)
def test_wrong_settings(files, kwargs, message):
    with pytest.raises(ValueError, match=message):
        speech_input(files, **kwargs)


def test_rows_outside_the_batch(files):
    with pytest.raises(ValueError, match="not part of a global batch of 4"):
        speech_input(files).train_batches(0, global_batch=4, rows=range(2, 6))
