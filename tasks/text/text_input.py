"""Text files as language-model batches; the state of the input is the step number.

Files become bytes or subwords, these one token stream, and the stream rows of S tokens.

B batch rows, S sequence, T tokens of the stream, D documents, N examples (rows of S).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input import places
from meshwright.tasks.input.batched_input import TokenInput, read_batches
from meshwright.tasks.input.example_order import (
    SEEDS,
    BatchRows,
    Split,
    shuffled_examples,
)
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary, Vocabulary

_T = TypeVar("_T")


class ByteTokenizer:
    """Byte b is token b + 2; 0 pads, 1 starts a document and so ends the one before.

    The 258 ids in use are rounded up to 264, so that a vocabulary dim divides by 8.
    """

    padding_id = 0
    start_id = 1
    end_id = 1
    first_byte_id = 2
    vocab_size = 264

    def encode(self, text: bytes) -> np.ndarray:
        """The int32 ids of `text`, without a start token."""
        return np.frombuffer(text, np.uint8).astype(np.int32) + self.first_byte_id

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes among `ids`; padding, start and unused ids are left out."""
        values = np.asarray(ids, np.int64).ravel() - self.first_byte_id
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes()


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles(Checked):
    """Files of a folder, each a document. Construction does not touch the file system.

    Args:
      root: the folder, on a disk or in a bucket, such as "gs://bucket/texts"; None: the
        sources of the Python standard library.
      pattern: shell pattern that a file's name, without its folder, must match.
      excluded_dirs: names of folders to leave out, at any depth.
      held_out_one_in: about one file in so many is held out, chosen by a hash of its
        path below `root`, so that adding files moves no other file.
    """

    root: str | None = None
    pattern: str = "*.py"
    excluded_dirs: tuple[str, ...] = ("site-packages", "dist-packages", "__pycache__")
    held_out_one_in: int = bounded(20, at_least=2)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "excluded_dirs", tuple(self.excluded_dirs))

    @property
    def folder(self) -> str:
        """`root`, or the folder of the standard library."""
        return sysconfig.get_path("stdlib") if self.root is None else self.root

    def paths(self) -> list[str]:
        """Sorted paths below `folder`, with forward slashes.

        Raises:
          FileNotFoundError: there is no folder, or no file matches.
          OSError: a folder cannot be listed.
        """
        if not _readable(places.is_folder, self.folder):
            raise FileNotFoundError(
                f"there is no folder {self.folder!r}: set TextFiles.root to a "
                "folder of text files"
            )
        paths = []
        for parent, folders, names in places.walk(self.folder, onerror=_unreadable):
            folders[:] = [d for d in folders if d.rstrip("/") not in self.excluded_dirs]
            below = pathlib.PurePath(parent.removeprefix(self.folder).lstrip("/"))
            matching = fnmatch.filter(names, self.pattern)
            paths += [(below / name).as_posix() for name in matching]
        if not paths:
            raise FileNotFoundError(
                f"no text files under {self.folder!r} match {self.pattern!r}: set "
                "TextFiles.root to a folder that has some, or change TextFiles.pattern"
            )
        return sorted(paths)

    def split_of(self, path: str) -> Split:
        """The split of the file at `path`, relative to `folder`."""
        return Split.by_hash(os.fsencode(path), self.held_out_one_in)

    def read(self, path: str) -> bytes:
        """The content of the file at `path`, relative to `folder`.

        Raises:
          OSError: it cannot be read, or is a pipe or device, which might never end.
        """
        return _readable(places.read, os.path.join(self.folder, path))


def _readable(look: Callable[[str], _T], path: str) -> _T:
    """What `look` says of `path`; its errors name the remedy."""
    try:
        return look(path)
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise OSError(
        f"cannot read {str(error.filename)!r} ({error.strerror}): make it readable, or "
        "name its folder in TextFiles.excluded_dirs"
    ) from error


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Documents as one stream of tokens, with a start token before each one's.

    Args:
      stream: [T], uint8 bytes or int32 ids of subwords, with an ignored 0 for every
        start token.
      bounds: int64 [D + 1], where each document starts in the stream, and T.
      text_bytes: the documents' bytes.
      first_id: the id of a 0 in the stream.
      start_id: the id of a start token.
    """

    stream: np.ndarray
    bounds: np.ndarray
    text_bytes: int
    first_id: int
    start_id: int

    @classmethod
    def from_documents(cls, documents: Sequence[bytes]) -> Corpus:
        """Packs `documents`, at least one not empty; empty ones are left out."""
        documents = [document for document in documents if document]
        return cls(
            stream=np.frombuffer(b"\0" + b"\0".join(documents), np.uint8),
            bounds=_bounds(documents),
            text_bytes=sum(map(len, documents)),
            first_id=ByteTokenizer.first_byte_id,
            start_id=ByteTokenizer.start_id,
        )

    @classmethod
    def of_subwords(cls, documents: Sequence[bytes], vocabulary: Vocabulary) -> Corpus:
        """The same in subwords, with an end token after each document's.

        What is no text in UTF-8 becomes U+FFFD.
        """
        documents = [document for document in documents if document]
        texts = [document.decode(errors="replace") for document in documents]
        ids = [[*each, vocabulary.end_id] for each in vocabulary.encode(texts)]
        parts = [np.array([0, *each], np.int32) for each in ids]
        return cls(
            stream=np.concatenate(parts),
            bounds=_bounds(ids),
            text_bytes=sum(map(len, documents)),
            first_id=0,
            start_id=vocabulary.start_id,
        )

    @property
    def tokens(self) -> int:
        """How many tokens there are but for start tokens."""
        return len(self.stream) - len(self.bounds) + 1

    def example_count(self, sequence_length: int) -> int:
        """N: the number of rows with every token but the last, which has no next."""
        return -(-(len(self.stream) - 1) // sequence_length)


def _bounds(documents: Sequence[Sequence]) -> np.ndarray:
    lengths = np.array([len(document) + 1 for document in documents], np.int64)
    return np.concatenate([[0], np.cumsum(lengths)])


def _documents(files: TextFiles) -> dict[Split, list[bytes]]:
    documents = {split: [] for split in Split}
    for path in files.paths():
        documents[files.split_of(path)].append(files.read(path))
    return documents


@functools.cache
def _trained(files: TextFiles, vocabulary: SentencePieceVocabulary) -> Vocabulary:
    lines = []
    if vocabulary.model_file is None:
        for document in _documents(files)[Split.TRAIN]:
            text = document.decode(errors="replace")
            lines += [line for line in text.split("\n") if line]
    return vocabulary.trained(lines, verbatim=True)


@functools.cache
def _load(
    files: TextFiles, vocabulary: SentencePieceVocabulary | None
) -> dict[Split, Corpus | None]:
    def corpus(texts: list[bytes]) -> Corpus | None:
        if not any(texts):
            return None
        if vocabulary is None:
            return Corpus.from_documents(texts)
        return Corpus.of_subwords(texts, _trained(files, vocabulary))

    return {split: corpus(texts) for split, texts in _documents(files).items()}


def load_corpus(
    files: TextFiles,
    split: Split,
    vocabulary: SentencePieceVocabulary | None = None,
) -> Corpus:
    """The documents of a split, sorted by path; read once in a process.

    Args:
      files: the files.
      split: the split.
      vocabulary: of subwords, trained on the training split if it has no model file;
        None: of bytes.

    Raises:
      FileNotFoundError: no file matches.
      ImportError: there is a vocabulary and no SentencePiece.
      OSError: a file or folder cannot be read; the message names it.
      ValueError: the split has no text; see `SentencePieceVocabulary.trained`.
    """
    corpus = _load(files, vocabulary)[split]
    if corpus is None:
        raise ValueError(
            f"no text in the {split.value} files under {files.folder!r} that "
            f"match {files.pattern!r}: add files, or change "
            f"TextFiles.held_out_one_in, which holds out one in {files.held_out_one_in}"
        )
    return corpus


def pack_rows(
    stream: tf.Tensor,
    bounds: tf.Tensor,
    index: tf.Tensor,
    *,
    sequence_length: int,
    first_id: int = ByteTokenizer.first_byte_id,
    start_id: int = ByteTokenizer.start_id,
) -> NestedMap:
    """Examples by number: example i has the S tokens from i * S on.

    Every byte or subword of the stream is a label of weight 1 in exactly one example
    below N. Examples from N on are all padding.

    Args:
      stream: [T], as in `Corpus`.
      bounds: int64 [D + 1], as in `Corpus`.
      index: int64 [B], numbers of examples.
      sequence_length: S.
      first_id: as in `Corpus`.
      start_id: as in `Corpus`.

    Returns:
      As `TextInput` describes them, each [B, S].
    """
    last = bounds[-1] - 1
    place = index[:, None] * sequence_length + tf.range(sequence_length, dtype=tf.int64)
    is_read = place < last
    place = tf.minimum(place, last)
    document = tf.searchsorted(bounds, tf.reshape(place, [-1]), side="right") - 1
    document = tf.reshape(document, tf.shape(place))
    start = tf.gather(bounds, document)
    is_byte = place + 1 < tf.gather(bounds, document + 1)

    def masked(where, values):
        return tf.where(where, tf.cast(values, tf.int32), ByteTokenizer.padding_id)

    def token_id(at):
        return tf.cast(tf.gather(stream, at), tf.int32) + first_id

    ids = tf.where(place == start, start_id, token_id(place))
    return NestedMap(
        ids=masked(is_read, ids),
        labels=masked(is_byte, token_id(tf.minimum(place + 1, last))),
        segment_ids=masked(is_read, document - document[:, :1] + 1),
        segment_positions=masked(is_read, place - tf.maximum(start, place[:, :1])),
        weights=tf.cast(is_byte, tf.float32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStatistics:
    """Statistics of a split.

    Args:
      documents: number of files that are not empty.
      text_bytes: their total size.
      tokens: how many bytes, or subwords and ends, they are.
      examples: number of rows of S tokens in an epoch.
      unigram_entropy: bits per byte of the best model without context: a model whose
        loss is not well below it has learned nothing but frequencies.
      sha256: digest of the token stream; processes, and runs that resume, must agree on
        it.
    """

    documents: int
    text_bytes: int
    tokens: int
    examples: int
    unigram_entropy: float
    sha256: str


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInput(TokenInput):
    """Batches of packed text. Construction does not touch the file system.

    A batch is a nested map of tensors [rows, S]:
      ids: int32, tokens to read.
      labels: int32, the byte that follows each token, 0 where the document ends; or the
        subword, of which the last is an end.
      segment_ids: int32, documents counted from 1 within the row; 0 is padding.
      segment_positions: int32, position within the document's part of this row.
      weights: float32, 1 where the label is of the same document, else 0.

    Only bytes or subwords carry weight: never a start token, never padding. So bits per
    byte are exactly sum(weights * loss in nats) / sum(weights) / ln 2 where tokens are
    bytes. A row may begin in the
    middle of a document, whose earlier part it then lacks.

    Args:
      files: the source of text.
      vocabulary: of subwords, trained on the training files if it names no model; None:
        tokens are bytes.
      sequence_length: S.
      seed: seed of the order of the training examples.
    """

    files: TextFiles = TextFiles()
    vocabulary: SentencePieceVocabulary | None = None
    sequence_length: int = bounded(at_least=1)
    seed: int = bounded(0, **SEEDS)

    @property
    def vocab_size(self) -> int:
        if self.vocabulary is None:
            return ByteTokenizer.vocab_size
        return self.vocabulary.vocab_size

    @property
    def start_id(self) -> int:
        """The id before a document's first token."""
        if self.vocabulary is None:
            return ByteTokenizer.start_id
        return self.vocabulary.special_tokens.start_id

    @property
    def end_id(self) -> int:
        """The id after a document's last token."""
        if self.vocabulary is None:
            return ByteTokenizer.end_id
        return self.vocabulary.special_tokens.end_id

    def trained_vocabulary(self) -> Vocabulary:
        """The vocabulary of subwords; reads the files if it names no model.

        Raises:
          ImportError: there is no SentencePiece.
          OSError: see `load_corpus`.
          ValueError: see `SentencePieceVocabulary.trained`.
        """
        return _trained(self.files, self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of a document's beginning, its start token included."""
        if self.vocabulary is None:
            ids = ByteTokenizer().encode(text.encode()).tolist()
        else:
            (ids,) = self.trained_vocabulary().encode([text])
        return [self.start_id, *ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; what is no text is U+FFFD, other ids are left out."""
        if self.vocabulary is None:
            return ByteTokenizer().decode(ids).decode(errors="replace")
        return self.trained_vocabulary().decode(ids)

    def corpus(self, split: Split) -> Corpus:
        """The tokens of a split, see `load_corpus`."""
        return load_corpus(self.files, split, self.vocabulary)

    def element_spec(self, batch: int | None) -> NestedMap:
        shape = [batch, self.sequence_length]
        names = ("ids", "labels", "segment_ids", "segment_positions")
        spec = NestedMap({name: tf.TensorSpec(shape, tf.int32) for name in names})
        return NestedMap(spec, weights=tf.TensorSpec(shape, tf.float32))

    def read_train(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        corpus = self.corpus(Split.TRAIN)
        count = corpus.example_count(self.sequence_length)

        def examples(step):
            return shuffled_examples(rows.indices(step), count=count, seed=self.seed)

        return self._dataset(corpus, steps, examples)

    def held_out_rows(self, global_batch: int) -> int:
        corpus = self.corpus(Split.HELD_OUT)
        return corpus.example_count(self.sequence_length)

    def read_held_out(self, steps: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
        corpus = self.corpus(Split.HELD_OUT)
        return self._dataset(corpus, steps, rows.indices)

    def statistics(self, split: Split = Split.TRAIN) -> TextStatistics:
        """Statistics of the files of `split`; reads them."""
        corpus = self.corpus(split)
        digest = hashlib.sha256(corpus.bounds)
        digest.update(corpus.stream)
        parts = np.array_split(corpus.stream, len(corpus.stream) // 2**20 + 1)
        counts = sum(np.bincount(part, minlength=self.vocab_size) for part in parts)
        counts[0] -= len(corpus.bounds) - 1  # Start tokens do not count.
        share = counts[counts > 0] / corpus.tokens
        entropy = float(-(share * np.log2(share)).sum())
        return TextStatistics(
            documents=len(corpus.bounds) - 1,
            text_bytes=corpus.text_bytes,
            tokens=corpus.tokens,
            examples=corpus.example_count(self.sequence_length),
            unigram_entropy=entropy * corpus.tokens / corpus.text_bytes,
            sha256=digest.hexdigest(),
        )

    def _dataset(
        self,
        corpus: Corpus,
        steps: tf.data.Dataset,
        examples: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.data.Dataset:
        """Batches of the examples that `examples` names for each of `steps`."""
        with tf.device("CPU"):  # Where there is a GPU, TF would use it.
            stream, bounds = tf.constant(corpus.stream), tf.constant(corpus.bounds)

        def batch(step):
            S = self.sequence_length
            return pack_rows(
                stream,
                bounds,
                examples(step),
                sequence_length=S,
                first_id=corpus.first_id,
                start_id=corpus.start_id,
            )

        return read_batches(steps, batch)
