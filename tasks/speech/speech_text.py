"""Transcripts: characters as labels, and the error rates of recognition."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import gin
import numpy as np
import tensorflow as tf

BLANK_ID = 0


class TrainedVocabulary(Protocol):
    """A vocabulary that spells transcripts as labels."""

    @property
    def sha256(self) -> str:
        """Digest that runs which resume must agree on."""

    def normalized(self, text: str) -> str:
        """`text` as it is encoded."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The labels of each text, below `vocab_size`; none is `BLANK_ID`.

        Raises:
          ValueError: a text cannot be spelled.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """The text of labels; ids that are no label of text are left out."""


@runtime_checkable
class TranscriptVocabulary(Protocol):
    """A vocabulary's settings: `CharacterVocabulary`, `SentencePieceVocabulary`."""

    vocab_size: int

    def trained(
        self, texts: Sequence[str], languages: Iterable[str]
    ) -> TrainedVocabulary:
        """The vocabulary of `texts`, with a tag for each language."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CharacterVocabulary:
    """Each character is a label; text is in lower case, with single spaces.

    It stands in for `SentencePieceVocabulary` and for its trained vocabulary, as there
    is nothing to train.

    Args:
      characters: the characters that transcripts may have.
      vocab_size: V; the blank and the characters, or more, for a mesh axis to divide.

    Raises:
      ValueError: a character occurs twice, or is in upper case; V is too small.
    """

    characters: str = " 'abcdefghijklmnopqrstuvwxyz"
    vocab_size: int = 32

    def __post_init__(self):
        if len(set(self.characters)) < len(self.characters):
            raise ValueError(
                f"CharacterVocabulary.characters {self.characters!r} has a character "
                "twice: name each once"
            )
        if self.characters != self.characters.lower():
            raise ValueError(
                f"CharacterVocabulary.characters {self.characters!r} has upper case, "
                "and text is put into lower case: leave it out"
            )
        needed = len(self.characters) + 1
        if self.vocab_size < needed:
            raise ValueError(
                f"CharacterVocabulary.vocab_size is {self.vocab_size}: make it "
                f"{needed} or more, for {needed - 1} characters and the blank"
            )

    def trained(
        self, texts: Sequence[str], languages: Iterable[str]
    ) -> CharacterVocabulary:
        """Itself."""
        del texts, languages
        return self

    @property
    def sha256(self) -> str:
        """Digest that runs which resume must agree on."""
        return hashlib.sha256(self.characters.encode()).hexdigest()

    def normalized(self, text: str) -> str:
        """`text` as it is encoded."""
        return " ".join(text.lower().split())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The labels of each text, from 1 on.

        Raises:
          ValueError: a character is no label.
        """
        return [[self._label(c, text) for c in self.normalized(text)] for text in texts]

    def _label(self, character: str, text: str) -> int:
        if character not in self.characters:
            raise ValueError(
                f"{text!r} has {character!r}, which is not in "
                "CharacterVocabulary.characters: spell it otherwise, or add it there"
            )
        return 1 + self.characters.index(character)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of labels; ids that are no character are left out."""
        known = range(1, 1 + len(self.characters))
        return "".join(self.characters[i - 1] for i in map(int, ids) if i in known)


def greedy_search(log_probs: np.ndarray, frames: np.ndarray) -> list[list[int]]:
    """The labels of the likeliest alignments, see `beam_search`."""
    with tf.device("CPU"):
        (labels,), _ = tf.nn.ctc_greedy_decoder(
            _time_major(log_probs), frames, blank_index=BLANK_ID
        )
        return _lists(labels)


def beam_search(
    log_probs: np.ndarray, frames: np.ndarray, beams: int
) -> list[list[int]]:
    """The likeliest labels by prefix beam search (Graves et al. 2006, 3.2).

    Args:
      log_probs: [B, S, V].
      frames: int32 [B], how many of the S frames count.
      beams: number of prefixes that are kept.
    """
    blank_last = np.roll(log_probs, -1, axis=-1)
    with tf.device("CPU"):
        (labels,), _ = tf.nn.ctc_beam_search_decoder(
            _time_major(blank_last), frames, beam_width=beams
        )
        return [[i + 1 for i in row] for row in _lists(labels)]


def _time_major(log_probs: np.ndarray) -> np.ndarray:
    return log_probs.transpose(1, 0, 2)


def _lists(labels: tf.SparseTensor) -> list[list[int]]:
    rows = tf.sparse.to_dense(labels, default_value=-1).numpy()
    return [row[row >= 0].tolist() for row in rows]


@dataclasses.dataclass(frozen=True)
class Recognized:
    """One recognized utterance.

    Args:
      reference: the true transcript.
      greedy: the transcript of the likeliest alignment.
      beam: the transcript by prefix beam search.
    """

    reference: str
    greedy: str
    beam: str


def error_rates(recognized: Sequence[Recognized]) -> dict[str, float]:
    """Word and character error rates: errors per word or character of the references.

    Returns:
      `wer` and `cer` by beam search, `wer/greedy` and `cer/greedy`; empty if nothing
      was recognized.

    Raises:
      ImportError: jiwer is not installed.
    """
    if not recognized:
        return {}
    references = [r.reference for r in recognized]
    rates = {}
    for suffix, field in (("", "beam"), ("/greedy", "greedy")):
        texts = [getattr(r, field) for r in recognized]
        rates[f"wer{suffix}"] = float(_jiwer().wer(references, texts))
        rates[f"cer{suffix}"] = float(_jiwer().cer(references, texts))
    return rates


def samples(recognized: Sequence[Recognized], count: int = 20) -> str:
    """A Markdown table of some utterances, evenly spread."""
    step = max(1, -(-len(recognized) // count))
    lines = ["| said | beam search | greedy |", "|---|---|---|"]
    for utterance in recognized[::step][:count]:
        cells = (utterance.reference, utterance.beam, utterance.greedy)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def _jiwer():
    try:
        import jiwer  # Only speech needs it.
    except ImportError as e:
        raise ImportError(
            "word error rates need jiwer, which is not installed: pip install "
            "'meshwright[asr]'"
        ) from e
    return jiwer
