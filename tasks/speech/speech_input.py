"""Utterances as batches of log-mel features; the state of the input is the step number.

Sounds are read when their batch is due; memory holds only a list of them. An utterance
is in the shortest bucket that holds it, and a batch is of one bucket. The order of
training is arithmetic: a cycle has as many batches of each bucket as hold it once, a
stateless permutation mixes them anew in every cycle, and each bucket goes through its
utterances in a new order in each of its epochs.

Dims: B batch rows, T frames of the longest bucket, F mel bins, L labels, N utterances
in all, K buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import BatchedInput, read_batches
from meshwright.tasks.input.example_order import (
    SEEDS,
    BatchRows,
    Split,
    group_turns,
    shuffled_examples,
)
from meshwright.tasks.speech.speech_audio import (
    LogMel,
    Normalization,
    read_wav,
    wav_length,
)
from meshwright.tasks.speech.speech_manifest import SpeechFiles, Utterance
from meshwright.tasks.speech.speech_text import (
    TrainedVocabulary,
    TranscriptVocabulary,
)

# Number of utterances whose statistics stand for those of all.
_SAMPLED = 500


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Utterances:
    """The usable utterances of one split, by bucket.

    Args:
      listed: path and words of each of the N utterances.
      bounds: int64 [K + 1], where the utterances of each bucket begin, and N.
      frames: int32 [N].
      labels: int32 [N, L], 0 beyond the count.
      label_counts: int32 [N].
      too_long: number of utterances left out as longer than the longest bucket.
      too_wordy: number left out as having more than L labels.
      too_fast: number left out as having more labels than fit in their frames, which
        CTC cannot align.
    """

    listed: tuple[Utterance, ...]
    bounds: np.ndarray
    frames: np.ndarray
    labels: np.ndarray
    label_counts: np.ndarray
    too_long: int
    too_wordy: int
    too_fast: int

    @property
    def sha256(self) -> str:
        """Digest of lengths and words; processes and resumed runs must agree on it."""
        digest = hashlib.sha256(self.bounds)
        digest.update(self.frames)
        digest.update(self.labels)
        return digest.hexdigest()


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechInput(BatchedInput):
    """Batches of utterances. Construction does not touch the file system.

    A batch is a nested map of tensors:
      features: float32 [rows, T, F], 0 in padding.
      frames: int32 [rows], how many of the T frames count; 0 in rows that fill up a
        batch.
      labels: int32 [rows, L], 0 in padding.
      label_counts: int32 [rows].

    Args:
      files: the list of utterances: `Manifest` or `EspeakSpeech`.
      vocabulary: the vocabulary of transcripts: `CharacterVocabulary` or
        `SentencePieceVocabulary`.
      label_length: L.
      bucket_frames: the lengths that utterances are padded to, ascending; the last is
        T. One program has a part for each bucket, and compiles as much longer.
      log_mel: makes features.
      subsampling: number of frames that the model turns into one; transcripts must fit
        in the frames that are left.
      seed: seed of the training order.

    Raises:
      ValueError: a number is out of range, or buckets do not ascend.
    """

    files: SpeechFiles = instance(example="@Manifest()")
    vocabulary: TranscriptVocabulary = instance(example="@CharacterVocabulary()")
    label_length: int = bounded(at_least=1)
    bucket_frames: Sequence[int]
    log_mel: LogMel = LogMel()
    subsampling: int = bounded(4, at_least=1)
    seed: int = bounded(0, **SEEDS)

    def __post_init__(self):
        super().__post_init__()
        buckets = tuple(self.bucket_frames)
        object.__setattr__(self, "bucket_frames", buckets)
        if not buckets or list(buckets) != sorted({*buckets}) or buckets[0] < 1:
            raise ValueError(
                f"SpeechInput.bucket_frames is {buckets}: give one or more lengths, "
                "each more than the one before"
            )

    @property
    def vocab_size(self) -> int:
        """V, above every label."""
        return self.vocabulary.vocab_size

    @property
    def max_frames(self) -> int:
        """T."""
        return self.bucket_frames[-1]

    def element_spec(self, batch: int | None) -> NestedMap:
        return NestedMap(
            features=tf.TensorSpec([batch, self.max_frames, self.log_mel.bins]),
            frames=tf.TensorSpec([batch], tf.int32),
            labels=tf.TensorSpec([batch, self.label_length], tf.int32),
            label_counts=tf.TensorSpec([batch], tf.int32),
        )

    def trained_vocabulary(self) -> TrainedVocabulary:
        """The vocabulary of the training transcripts, trained once in a process."""
        return _vocabulary(self.files, self.vocabulary)

    def utterances(self, split: Split) -> Utterances:
        """The utterances of a split, checked once in a process.

        Raises:
          OSError, ValueError: see `Manifest.read` and `wav_length`; the vocabulary
            cannot spell a transcript, which is named; no utterance can be used.
        """
        return _utterances(self, split)

    def read_train(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        """Batches have `utterance` too, as the batches of `read_held_out`."""
        utterances = self.utterances(Split.TRAIN)
        order = BucketOrder.of(utterances.bounds, rows.global_batch, self.seed)
        within = tf.constant(rows.within)
        return self._dataset(utterances, steps, lambda step: order.rows(step, within))

    def held_out_rows(self, global_batch: int) -> int:
        return _rows_in_order(self.utterances(Split.HELD_OUT).bounds, global_batch).size

    def read_held_out(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        """Batches bucket by bucket; padding fills up the last batch of each bucket.

        A batch has `utterance` too, int32 [rows]: the number of each row's utterance in
        `utterances(Split.HELD_OUT).listed`, -1 in padding.
        """
        utterances = self.utterances(Split.HELD_OUT)
        every = _rows_in_order(utterances.bounds, rows.global_batch)[:, rows.within]
        return self._dataset(utterances, steps, lambda step: tf.gather(every, step))

    def _dataset(
        self,
        utterances: Utterances,
        steps: tf.data.Dataset,
        numbers: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.data.Dataset:
        """Batches of the utterances that `numbers` names for each of `steps`."""
        longest = self.log_mel.samples(self.max_frames)
        statistics = self._statistics()
        with tf.device("CPU"):  # Where there is a GPU, TF would use it.
            # An extra row of padding, which is row -1.
            columns = {
                name: tf.constant(
                    np.pad(column, [[0, 1], *[[0, 0]] * (column.ndim - 1)])
                )
                for name, column in (
                    ("frames", utterances.frames),
                    ("labels", utterances.labels),
                    ("label_counts", utterances.label_counts),
                )
            }

        def read(index: np.ndarray) -> np.ndarray:
            sounds = np.zeros([len(index), longest], np.float32)
            for row, number in zip(sounds, index, strict=True):
                if number >= 0:
                    sound = read_wav(utterances.listed[number].path)[:longest]
                    row[: len(sound)] = sound
            return sounds

        def batch(step):
            index = numbers(step)
            rows = index % (len(utterances.listed) + 1)
            out = NestedMap({name: tf.gather(c, rows) for name, c in columns.items()})
            sounds = tf.numpy_function(read, [index], tf.float32, stateful=False)
            sounds = tf.ensure_shape(sounds, [index.shape[0], longest])
            energies = self.log_mel.energies(sounds)
            out.features = self.log_mel.normalized(energies, out.frames, statistics)
            out.utterance = tf.cast(index, tf.int32)
            return out

        return read_batches(steps, batch)

    def _statistics(self) -> np.ndarray | None:
        is_global = self.log_mel.normalization is Normalization.GLOBAL
        return _global_statistics(self) if is_global else None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BucketOrder:
    """Which utterances each step of training reads.

    Args:
      bounds: int64 [K + 1], as in `Utterances`.
      batches: int64 [K + 1], where the batches of each bucket begin in a cycle, and the
        number of batches in a cycle.
      global_batch: rows of a batch.
      seed: seed of all permutations.
    """

    bounds: np.ndarray
    batches: np.ndarray
    global_batch: int
    seed: int

    @classmethod
    def of(cls, bounds: np.ndarray, global_batch: int, seed: int) -> BucketOrder:
        """The order whose cycle has as many batches of a bucket as hold it, rounded."""
        counts = np.diff(bounds)
        each = np.maximum(np.rint(counts / global_batch), counts > 0).astype(np.int64)
        batches = np.concatenate([[0], np.cumsum(each)])
        return cls(bounds=bounds, batches=batches, global_batch=global_batch, seed=seed)

    def rows(self, step: tf.Tensor, within: tf.Tensor) -> tf.Tensor:
        """Numbers of the utterances at indices int64 of a step's batch; -1: padding."""
        buckets, turns, _ = group_turns(step[None], shares=self.batches, seed=self.seed)
        bucket, turn = buckets[0], turns[0]
        count = tf.gather(np.diff(self.bounds), bucket)
        number = shuffled_examples(
            turn * self.global_batch + within,
            count=tf.fill(within.shape, count),
            seed=self.seed + 1,
        )
        return tf.where(number < count, tf.gather(self.bounds, bucket) + number, -1)


def _rows_in_order(bounds: np.ndarray, global_batch: int) -> np.ndarray:
    """int64 [batches, B]: numbers bucket by bucket, with -1 at the end of each."""
    parts = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        numbers = np.arange(start, end)
        fill = -len(numbers) % global_batch
        parts.append(np.pad(numbers, [0, fill], constant_values=-1))
    return np.concatenate(parts).reshape(-1, global_batch)


@functools.cache
def _vocabulary(files: SpeechFiles, spec: TranscriptVocabulary) -> TrainedVocabulary:
    return spec.trained(
        [utterance.transcript for utterance in files.read(Split.TRAIN)], ()
    )


@functools.cache
def _utterances(given: SpeechInput, split: Split) -> Utterances:
    listed = given.files.read(split)
    vocabulary = given.trained_vocabulary()
    kept, left_out = [], dict.fromkeys(("too_long", "too_wordy", "too_fast"), 0)
    for utterance in listed:
        labels = _labels(vocabulary, utterance)
        frames = given.log_mel.frames(wav_length(utterance.path))
        reason = _reason(given, frames, labels)
        if reason:
            left_out[reason] += 1
        else:
            bucket = int(np.searchsorted(given.bucket_frames, frames))
            kept.append((bucket, len(kept), utterance, frames, labels))
    if not kept:
        raise ValueError(
            f"no {split.value} utterance of {len(listed)} can be used: "
            f"{left_out['too_long']} are longer than SpeechInput.bucket_frames "
            f"{given.bucket_frames}, {left_out['too_wordy']} have more labels than "
            f"SpeechInput.label_length {given.label_length}, {left_out['too_fast']} "
            "more than fit in their frames: raise these, or cut the sounds"
        )
    kept.sort(key=lambda entry: entry[:2])
    buckets, _, used, frames, labels = zip(*kept, strict=True)
    table = np.zeros([len(kept), given.label_length], np.int32)
    for row, ids in zip(table, labels, strict=True):
        row[: len(ids)] = ids
    each = np.bincount(buckets, minlength=len(given.bucket_frames))
    return Utterances(
        listed=tuple(used),
        bounds=np.concatenate([[0], np.cumsum(each)]).astype(np.int64),
        frames=np.array(frames, np.int32),
        labels=table,
        label_counts=np.array([len(ids) for ids in labels], np.int32),
        **left_out,
    )


def _labels(vocabulary: TrainedVocabulary, utterance: Utterance) -> list[int]:
    try:
        return vocabulary.encode([utterance.transcript])[0]
    except ValueError as e:
        raise ValueError(f"{utterance.place}: {e}") from e


def _reason(given: SpeechInput, frames: int, labels: Sequence[int]) -> str | None:
    """The reason why an utterance cannot be used, or None."""
    if frames > given.max_frames:
        return "too_long"
    if len(labels) > given.label_length:
        return "too_wordy"
    steps = -(-frames // given.subsampling)
    return "too_fast" if steps < max(1, frames_needed(labels)) else None


def frames_needed(labels: Sequence[int]) -> int:
    """The fewest frames that can hold `labels`: equal neighbours need a blank."""
    repeats = sum(a == b for a, b in zip(labels, labels[1:], strict=False))
    return len(labels) + repeats


@functools.cache
def _global_statistics(given: SpeechInput) -> np.ndarray:
    """float32 [2, F]: mean and deviation of each bin over training utterances."""
    listed = given.utterances(Split.TRAIN).listed
    energies = [
        given.log_mel.energies(tf.constant(read_wav(utterance.path)[None]))[0].numpy()
        for utterance in listed[:: -(-len(listed) // _SAMPLED)]
    ]
    frames = np.concatenate(energies)
    return np.stack([frames.mean(axis=0), frames.std(axis=0)])
