"""Parallel text as batches of packed rows; the state of the input is the step number.

A row holds pairs of one direction, one after the other, sources in one tensor and
targets in another. Rows are packed once; then the order of training is arithmetic: a
cycle has places for each direction in proportion to its sampled share, a stateless
permutation mixes them anew in every cycle, and each direction goes through its own rows
in a new order in each of its epochs. A batch is a function of the step alone.

Dims: B batch rows, S source, T target, N rows in all, D directions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import TokenInput, read_batches
from meshwright.tasks.input.example_order import (
    SEEDS,
    BatchRows,
    Split,
    group_turns,
    shuffled_examples,
)
from meshwright.tasks.text.parallel_text import Pair, ParallelFiles
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary, Vocabulary

# Rows that are being filled at a time: more rows fill better, and take longer.
_OPEN_ROWS = 64


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedPairs:
    """Rows of one split.

    Args:
      directions: D names such as "en-de", sorted.
      bounds: int64 [D + 1], where the rows of each direction begin, and N.
      columns: int32 arrays by name, source_* [N, S] and target_* [N, T].
      pairs: number of pairs in the rows.
      too_long: number of pairs left out, having more tokens than a row.
    """

    directions: tuple[str, ...]
    bounds: np.ndarray
    columns: dict[str, np.ndarray]
    pairs: int
    too_long: int

    @property
    def sha256(self) -> str:
        """Digest of all rows; processes, and runs that resume, must agree on it."""
        digest = hashlib.sha256(self.bounds)
        for _, column in sorted(self.columns.items()):
            digest.update(column)
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Encoded:
    """A pair as tokens: [tag, *source, end] and [*target, end]."""

    source: Sequence[int]
    target: Sequence[int]

    def fits(self, source_room: int, target_room: int) -> bool:
        return len(self.source) <= source_room and len(self.target) <= target_room


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationInput(TokenInput):
    """Batches of packed pairs. Construction does not touch the file system.

    A batch is a nested map of tensors, source_* [rows, S] and target_* [rows, T]:
      source_ids: int32, the tag of the target language, the source, and an end.
      target_ids: int32, the decoder's input: a start, and the translation.
      target_labels: int32, the tokens to predict: the translation, and an end.
      source_segment_ids, target_segment_ids: int32, pairs counted from 1 within the
        row; 0 is padding.
      source_positions, target_positions: int32, position within the pair.
      target_weights: float32, 1 where there is a label, else 0.

    Args:
      files: the source of pairs; None where a model is only served, which needs no
        more than the vocabulary.
      vocabulary: the vocabulary of sources and targets of all languages.
      source_length: S; pairs with more tokens are left out, and counted.
      target_length: T; likewise.
      temperature: directions are sampled in proportion to rows ** (1 / temperature): 1
        samples all pairs alike, infinity all directions (GShard 4.1 takes 5).
      seed: seed of the training order.

    Raises:
      ValueError: a length or temperature out of range.
    """

    files: ParallelFiles | None = None
    vocabulary: SentencePieceVocabulary
    source_length: int = bounded(at_least=2)
    target_length: int = bounded(at_least=2)
    temperature: float = bounded(1.0, at_least=1)
    seed: int = bounded(0, **SEEDS)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.vocab_size

    def element_spec(self, batch: int | None) -> NestedMap:
        source, target = (
            [batch, self.source_length],
            [batch, self.target_length],
        )
        int32 = ("ids", "segment_ids", "positions")
        spec = {f"source_{name}": tf.TensorSpec(source, tf.int32) for name in int32}
        for name in (*int32, "labels"):
            spec[f"target_{name}"] = tf.TensorSpec(target, tf.int32)
        return NestedMap(spec, target_weights=tf.TensorSpec(target, tf.float32))

    def trained_vocabulary(self) -> Vocabulary:
        """The vocabulary of the training pairs, trained once in a process.

        Reads no pairs where there is a model file.
        """
        if self.vocabulary.model_file:
            return _of_model(self.vocabulary)
        return _vocabulary(self.given_files(), self.vocabulary)

    def given_files(self) -> ParallelFiles:
        """The source of pairs.

        Raises:
          ValueError: there is none.
        """
        if self.files is None:
            raise ValueError(
                "TranslationInput.files is not set: bind it to your text, such as "
                "@TsvFiles() with TsvFiles.root; only a model that is served needs "
                "none, and then SentencePieceVocabulary.model_file, or its model_dir "
                "with the vocabulary of the training"
            )
        return self.files

    def rows(self, split: Split) -> PackedPairs:
        """The rows of a split, packed once in a process."""
        return _packed(
            self.given_files(),
            self.vocabulary,
            self.source_length,
            self.target_length,
            split,
        )

    def read_train(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        packed = self.rows(Split.TRAIN)
        order = SampledOrder.of(packed.bounds, self.temperature, self.seed)
        return _dataset(packed, steps, lambda step: order.rows(rows.indices(step)))

    def held_out_rows(self, global_batch: int) -> int:
        return int(self.rows(Split.HELD_OUT).bounds[-1])

    def read_held_out(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        return _dataset(self.rows(Split.HELD_OUT), steps, rows.indices)

    def source_spec(self, batch: int) -> NestedMap:
        """The `tf.TensorSpec` of each tensor in a batch to translate."""
        names = ("ids", "segment_ids", "positions")
        shape = [batch, self.source_length]
        spec = {f"source_{name}": tf.TensorSpec(shape, tf.int32) for name in names}
        return NestedMap(spec, pair=tf.TensorSpec([batch], tf.int32))

    def encode(self, text: str, language: str | None) -> list[int]:
        """The ids of a source to be translated to `language`: tag, text and end.

        There is no tag if the language is None, for a vocabulary without any.
        """
        vocabulary = self.trained_vocabulary()
        (ids,) = vocabulary.encode([text])
        tag = [] if language is None else [vocabulary.tag_id(language)]
        return [*tag, *ids, vocabulary.end_id]

    def to_translate(
        self, sources: Sequence[Sequence[int]], numbers: Sequence[int], rows: int
    ) -> NestedMap:
        """A batch as `source_spec`, a source per row, filled up with empty rows.

        Args:
          sources: the ids of each, S at most.
          numbers: `pair` of each.
          rows: B.
        """
        fill = rows - len(sources)
        texts = [*([source] for source in sources), *[[]] * fill]
        return NestedMap(
            _side("source", texts, self.source_length),
            pair=np.array([*numbers, *[-1] * fill], np.int32),
        )

    def source_batches(
        self, global_batch: int, *, max_batches: int | None = None
    ) -> Iterator[NestedMap]:
        """Held-out sources, one per row, as `source_spec`; `pair` is the number of each
        pair in `files.pairs`, -1 for rows that fill up the last batch.

        Args:
          global_batch: rows.
          max_batches: number of batches at most, their pairs spread evenly over all.
        """
        pairs = self.given_files().pairs(Split.HELD_OUT)
        encoded = encode_pairs(self.trained_vocabulary(), pairs)
        fits = [i for i, e in enumerate(encoded) if len(e.source) <= self.source_length]
        if max_batches is not None and len(fits) > max_batches * global_batch:
            wanted = max_batches * global_batch
            fits = [fits[i * len(fits) // wanted] for i in range(wanted)]
        for at in range(0, len(fits), global_batch):
            numbers = fits[at : at + global_batch]
            sources = [encoded[i].source for i in numbers]
            yield self.to_translate(sources, numbers, global_batch)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SampledOrder:
    """Which row each index of the training order stands for.

    Args:
      bounds: int64 [D + 1], as in `PackedPairs`.
      shares: int64 [D + 1], where the places of each direction begin in a cycle, and
        the number of places in a cycle.
      seed: seed of all permutations.
    """

    bounds: np.ndarray
    shares: np.ndarray
    seed: int

    @classmethod
    def of(cls, bounds: np.ndarray, temperature: float, seed: int) -> SampledOrder:
        """The order whose cycle gives a direction its share of N places, or one."""
        counts = np.diff(bounds)
        weights = (counts / counts.max()) ** (1 / temperature)
        wanted = np.rint(weights / weights.sum() * counts.sum()).astype(np.int64)
        shares = np.concatenate([[0], np.cumsum(np.maximum(wanted, 1))])
        return cls(bounds=bounds, shares=shares, seed=seed)

    def rows(self, index: tf.Tensor) -> tf.Tensor:
        """Numbers of the rows at indices int64 [B] of the endless training order.

        Rows from N on are padding.
        """
        direction, turn, is_padding = group_turns(
            index, shares=self.shares, seed=self.seed
        )
        count = tf.gather(np.diff(self.bounds), direction)
        within = shuffled_examples(turn, count=count, seed=self.seed + 1)
        is_padding |= within == count
        row = tf.gather(self.bounds, direction) + within
        return tf.where(is_padding, tf.cast(self.bounds[-1], row.dtype), row)


@functools.cache
def _of_model(spec: SentencePieceVocabulary) -> Vocabulary:
    return spec.trained(())


@functools.cache
def _vocabulary(files: ParallelFiles, spec: SentencePieceVocabulary) -> Vocabulary:
    pairs = files.pairs(Split.TRAIN)
    texts = sorted({text for pair in pairs for text in (pair.source, pair.target)})
    # A language of few pairs may be in the held-out pairs alone.
    every = [*pairs, *files.pairs(Split.HELD_OUT)]
    return spec.trained(texts, [pair.target_language for pair in every])


@functools.cache
def _packed(
    files: ParallelFiles,
    spec: SentencePieceVocabulary,
    source_length: int,
    target_length: int,
    split: Split,
) -> PackedPairs:
    vocabulary = _vocabulary(files, spec)
    by_direction = itertools.groupby(
        sorted(files.pairs(split), key=lambda pair: pair.direction),
        key=lambda pair: pair.direction,
    )
    directions, rows, bounds, pairs, too_long = [], [], [0], 0, 0
    for direction, group in by_direction:
        encoded = encode_pairs(vocabulary, sorted(group, key=_mixed))
        kept = [pair for pair in encoded if pair.fits(source_length, target_length)]
        too_long += len(encoded) - len(kept)
        pairs += len(kept)
        if kept:
            directions.append(direction)
            rows += _fill(kept, source_length, target_length)
            bounds.append(len(rows))
    if not rows:
        raise ValueError(
            f"all {too_long} {split.value} pairs are longer than source_length "
            f"{source_length} or target_length {target_length}: make these larger"
        )
    return PackedPairs(
        directions=tuple(directions),
        bounds=np.array(bounds, np.int64),
        columns=_columns(rows, source_length, target_length, vocabulary.start_id),
        pairs=pairs,
        too_long=too_long,
    )


def _mixed(pair: Pair) -> bytes:
    """A sort key by which alphabetic neighbours are not neighbours."""
    return hashlib.sha256(f"{pair.source}\t{pair.target}".encode()).digest()


def encode_pairs(vocabulary: Vocabulary, pairs: Sequence[Pair]) -> list[_Encoded]:
    """Pairs as tokens."""
    tags = {
        language: vocabulary.tag_id(language)
        for language in {pair.target_language for pair in pairs}
    }
    sources = vocabulary.encode([pair.source for pair in pairs])
    targets = vocabulary.encode([pair.target for pair in pairs])
    end = vocabulary.end_id
    return [
        _Encoded([tags[pair.target_language], *source, end], [*target, end])
        for pair, source, target in zip(pairs, sources, targets, strict=True)
    ]


def _fill(pairs: Sequence[_Encoded], S: int, T: int) -> list[list[_Encoded]]:
    """Rows of pairs, each pair in the first open row that has room."""
    full, open_rows = [], []  # Of an open row: source room, target room, pairs.
    for pair in pairs:
        for row in open_rows:
            if pair.fits(row[0], row[1]):
                break
        else:
            if len(open_rows) == _OPEN_ROWS:
                fullest = min(open_rows, key=lambda row: row[0] / S + row[1] / T)
                open_rows.remove(fullest)
                full.append(fullest[2])
            row = [S, T, []]
            open_rows.append(row)
        row[0] -= len(pair.source)
        row[1] -= len(pair.target)
        row[2].append(pair)
    return [*full, *(row[2] for row in open_rows)]


def _columns(rows: Sequence[Sequence[_Encoded]], S: int, T: int, start: int) -> dict:
    """The tensors of a batch that would hold all rows."""
    labels = [[pair.target for pair in row] for row in rows]
    return {
        **_side("source", [[pair.source for pair in row] for row in rows], S),
        **_side("target", [[[start, *text[:-1]] for text in row] for row in labels], T),
        "target_labels": _side_by_side(labels, T),
    }


def _side(name: str, rows: Sequence[Sequence[Sequence[int]]], length: int) -> dict:
    """Tokens of each row's texts, their numbers from 1, and their positions."""
    numbers = [[[i] * len(text) for i, text in enumerate(row, 1)] for row in rows]
    positions = [[range(len(text)) for text in row] for row in rows]
    return {
        f"{name}_ids": _side_by_side(rows, length),
        f"{name}_segment_ids": _side_by_side(numbers, length),
        f"{name}_positions": _side_by_side(positions, length),
    }


def _side_by_side(rows: Sequence[Sequence[Sequence[int]]], length: int) -> np.ndarray:
    """int32 [N, length], the parts of each row one after another, then 0."""
    out = np.zeros([len(rows), length], np.int32)
    for i, parts in enumerate(rows):
        flat = list(itertools.chain.from_iterable(parts))
        out[i, : len(flat)] = flat
    return out


def _dataset(packed: PackedPairs, steps: tf.data.Dataset, numbers) -> tf.data.Dataset:
    """Batches of the rows that `numbers` names for each of `steps`."""
    with tf.device("CPU"):  # Where there is a GPU, TF would use it.
        # An extra row of padding.
        columns = {
            name: tf.constant(np.pad(column, [[0, 1], [0, 0]]))
            for name, column in packed.columns.items()
        }

    def batch(step):
        at = tf.minimum(numbers(step), int(packed.bounds[-1]))
        tensors = NestedMap({name: tf.gather(c, at) for name, c in columns.items()})
        tensors.target_weights = tf.cast(tensors.target_segment_ids > 0, tf.float32)
        return tensors

    return read_batches(steps, batch)
