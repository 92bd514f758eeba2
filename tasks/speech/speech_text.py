"""What is said: characters as labels, and how well they were recognized."""

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
    """What spells transcripts as labels."""

    @property
    def sha256(self) -> str:
        """Runs that resume must agree on it."""

    def normalized(self, text: str) -> str:
        """`text` as it is encoded."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The labels of each text, below `vocab_size`; none is `BLANK_ID`.

        Raises:
          ValueError: a text that cannot be spelled.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """The text of labels; what is no label of text is left out."""


@runtime_checkable
class TranscriptVocabulary(Protocol):
    """What becomes a vocabulary: `CharacterVocabulary`, `SentencePieceVocabulary`."""

    vocab_size: int

    def trained(
        self, texts: Sequence[str], languages: Iterable[str]
    ) -> TrainedVocabulary:
        """The vocabulary of `texts`, with a tag for each language."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CharacterVocabulary:
    """Each character is a label; text is in lower case, with single spaces.

    It stands in for `SentencePieceVocabulary` and for what that one trains: there is
    nothing to train.

    Args:
      characters: what transcripts may hold.
      vocab_size: V; the blank and the characters, or more, to divide by a mesh axis.

    Raises:
      ValueError: a character twice, or in upper case; a V that is too small.
    """

    characters: str = " 'abcdefghijklmnopqrstuvwxyz"
    vocab_size: int = 32

    def __post_init__(self):
        if len(set(self.characters)) < len(self.characters):
            raise ValueError(
                f"CharacterVocabulary.characters {self.characters!r} has one twice: "
                "name each once"
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
        """Runs that resume must agree on it."""
        return hashlib.sha256(self.characters.encode()).hexdigest()

    def normalized(self, text: str) -> str:
        """`text` as it is encoded."""
        return " ".join(text.lower().split())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The labels of each text, from 1 on.

        Raises:
          ValueError: a character that is no label.
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
        """The text of labels; what is no character is left out."""
        known = range(1, 1 + len(self.characters))
        return "".join(self.characters[i - 1] for i in map(int, ids) if i in known)


def greedy_search(log_probs: np.ndarray, frames: np.ndarray) -> list[list[int]]:
    """The labels of the likeliest alignments, see `beam_search`."""
    with tf.device("CPU"):
        (found,), _ = tf.nn.ctc_greedy_decoder(
            _time_major(log_probs), frames, blank_index=BLANK_ID
        )
        return _lists(found)


def beam_search(
    log_probs: np.ndarray, frames: np.ndarray, beams: int
) -> list[list[int]]:
    """The likeliest labels by prefix beam search (Graves et al. 2006, 3.2).

    Args:
      log_probs: [B, S, V].
      frames: int32 [B], how many of S count.
      beams: prefixes that are kept.
    """
    blank_last = np.roll(log_probs, -1, axis=-1)
    with tf.device("CPU"):
        (found,), _ = tf.nn.ctc_beam_search_decoder(
            _time_major(blank_last), frames, beam_width=beams
        )
        return [[label + 1 for label in row] for row in _lists(found)]


def _time_major(log_probs: np.ndarray) -> np.ndarray:
    return log_probs.transpose(1, 0, 2)


def _lists(labels: tf.SparseTensor) -> list[list[int]]:
    rows = tf.sparse.to_dense(labels, default_value=-1).numpy()
    return [row[row >= 0].tolist() for row in rows]


@dataclasses.dataclass(frozen=True)
class Recognized:
    """One utterance.

    Args:
      reference: what was said.
      greedy: what the likeliest alignment says.
      beam: what prefix beam search says.
    """

    reference: str
    greedy: str
    beam: str


def error_rates(recognized: Sequence[Recognized]) -> dict[str, float]:
    """Word and character error rates, errors a word or character of the references.

    Returns:
      `wer` and `cer` by beam search, `wer/greedy` and `cer/greedy`; empty if nothing
      was recognized.

    Raises:
      ImportError: jiwer is not installed.
    """
    if not recognized:
        return {}
    said = [one.reference for one in recognized]
    found = {}
    for suffix, field in (("", "beam"), ("/greedy", "greedy")):
        heard = [getattr(one, field) for one in recognized]
        found[f"wer{suffix}"] = float(_jiwer().wer(said, heard))
        found[f"cer{suffix}"] = float(_jiwer().cer(said, heard))
    return found


def samples(recognized: Sequence[Recognized], count: int = 20) -> str:
    """A Markdown table of some, evenly spread."""
    step = max(1, -(-len(recognized) // count))
    lines = ["| said | beam search | greedy |", "|---|---|---|"]
    for one in recognized[::step][:count]:
        cells = (one.reference, one.beam, one.greedy)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def _jiwer():
    try:
        import jiwer  # Only speech wants it.
    except ImportError as e:
        raise ImportError(
            "word error rates need jiwer, which is not installed: pip install "
            "'meshwright[asr]'"
        ) from e
    return jiwer
