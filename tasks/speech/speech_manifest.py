"""Recorded utterances and their transcripts, from a list in a file."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import gin

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.input.places import on_disk


@dataclasses.dataclass(frozen=True)
class Utterance:
    """A sound and its words.

    Args:
      path: path of a wav file.
      transcript: its words, not empty.
      place: "file:line" of its entry, for messages.
    """

    path: str
    transcript: str
    place: str


@runtime_checkable
class SpeechFiles(Protocol):
    """A list of utterances, such as `Manifest` or `EspeakSpeech`."""

    def read(self, split: Split) -> Sequence[Utterance]:
        """The utterances of a split, the same in the same order each time."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Checked):
    """Utterances that a file lists, one per line; UTF-8. Construction reads nothing.

    A line has two columns separated by a tab, the path of a wav file and the
    transcript; or, in a file called *.jsonl, an object with "audio" and "text". Paths
    are relative to the file.

    Args:
      path: the file's path.
      held_out_one_in: about one transcript in so many is held out, with all its
        utterances, chosen by a hash of its words: none is in both splits, and adding
        lines moves no other.

    Raises:
      ValueError: nothing is left to train on.
    """

    path: str
    held_out_one_in: int = bounded(20, at_least=2)

    def read(self, split: Split) -> list[Utterance]:
        """The utterances of a split, in the file's order; read once in a process.

        Raises:
          FileNotFoundError: the file or that of a sound does not exist; it is named.
          ValueError: a line is malformed or has an empty transcript; the split is
            empty.
        """
        utterances = [u for u in _read(self.path) if self.split_of(u) is split]
        if not utterances:
            raise ValueError(
                f"{self.path} lists no {split.value} utterance: add some, or change "
                f"held_out_one_in, which holds out one in {self.held_out_one_in}"
            )
        return utterances

    def split_of(self, utterance: Utterance) -> Split:
        """The split of an utterance, by its words in whatever case."""
        words = " ".join(utterance.transcript.lower().split())
        return Split.by_hash(words.encode(), self.held_out_one_in)


@functools.cache
def _read(path: str) -> list[Utterance]:
    file = pathlib.Path(on_disk(path, "Manifest.path"))
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise FileNotFoundError(
            f"there is no manifest {path}: set Manifest.path to a manifest"
        ) from e
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not in UTF-8: {e}") from e
    columns = _objects if file.suffix == ".jsonl" else _columns
    utterances = []
    for place, sound, transcript in columns(path, text):
        if not transcript.strip():
            raise ValueError(
                f"{place} has an empty transcript of {sound!r}: write what is said, or "
                "take the line out"
            )
        wav = file.parent / sound
        if not os.path.isfile(wav):
            raise FileNotFoundError(f"{place} names {sound!r}, and there is no {wav}")
        utterances.append(Utterance(str(wav), transcript.strip(), place))
    if not utterances:
        raise ValueError(f"{path} is empty: write an utterance a line")
    return utterances


def _columns(path: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(place, path, transcript) of each line."""
    for number, line in enumerate(text.split("\n"), start=1):
        columns = line.rstrip("\r").split("\t")
        if columns == [""]:
            continue
        if len(columns) != 2:
            raise ValueError(
                f"{path}:{number} has {len(columns)} columns: write the path of a wav "
                "file, one tab and the transcript on each line"
            )
        yield f"{path}:{number}", *columns


def _objects(path: str, text: str) -> Iterator[tuple[str, str, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            sound, transcript = entry["audio"], entry["text"]
            both = f"{sound}{transcript}"
            if not isinstance(sound, str) or not isinstance(transcript, str):
                raise TypeError("they are to be strings")
            both.encode()  # JSON can spell invalid text.
        # ValueError means no JSON, no text, or a number of thousands of digits.
        except (ValueError, RecursionError, LookupError, TypeError) as e:
            raise ValueError(
                f'{path}:{number} is no object with "audio" and "text" ({e!r}): write '
                "such an object on each line"
            ) from e
        yield f"{path}:{number}", sound, transcript
