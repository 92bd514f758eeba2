"""Synthetic speech: sentences of docstrings, spoken by espeak-ng."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import gin
from absl import logging

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.user_cache import user_cache
from meshwright.tasks.input.atomic_files import atomic_write
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.speech.speech_manifest import Manifest, Utterance
from meshwright.tasks.text.text_input import TextFiles

# Only words that can be spoken: text that speech spells out or omits, such as digits,
# abbreviations, code and brackets, makes no sentence.
_WORD = "[a-z']*[aeiouy][a-z']*"
_SENTENCE = re.compile(f"{_WORD}(?: {_WORD}){{2,}}")
_TIMEOUT_SECONDS = 60


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class EspeakSpeech(Checked):
    """Sentences of Python docstrings, each spoken once, by one of several voices.

    Missing files are made when utterances are requested, several at once, and kept;
    only making them needs espeak-ng. The same Python gives the same sentences, and a
    hash of each chooses its voice and speed.

    Args:
      folder: the folder of wav files and manifests; default: meshwright/espeak in the
        user's cache.
      text: the source of docstrings.
      utterances: number of utterances wanted; there may be fewer sentences.
      voices: voices of espeak-ng (`espeak-ng --voices=en`); "+f2" and the like are
        variants.
      speeds: words per minute.
      max_chars: longer sentences are left out.
      held_out_one_in: as in `Manifest`.

    Raises:
      ValueError: a number is out of range, or there is no voice or speed.
    """

    folder: str | None = None
    text: TextFiles = TextFiles()
    utterances: int = bounded(3000, at_least=1)
    voices: tuple[str, ...] = ("en-us", "en-gb", "en-us+f2", "en-gb+m3")
    speeds: tuple[int, ...] = (170, 200)
    max_chars: int = bounded(48, at_least=1)
    held_out_one_in: int = bounded(10, at_least=2)

    def __post_init__(self):
        super().__post_init__()
        for name in ("voices", "speeds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise ValueError(f"EspeakSpeech.{name} is empty: name at least one")

    def read(self, split: Split) -> list[Utterance]:
        """As `Manifest.read`, after missing files were made.

        Raises:
          FileNotFoundError: a file is missing, and so is espeak-ng.
          ValueError: there is no sentence; espeak-ng fails.
          OSError: the folder cannot be written.
        """
        manifest = Manifest(path=str(_made(self)), held_out_one_in=self.held_out_one_in)
        return manifest.read(split)

    def sentences(self) -> list[str]:
        """The sentences to speak, in a mixed order that is always the same.

        Raises:
          ValueError: there is no sentence.
        """
        sentences = set()
        for path in self.text.paths():
            for docstring in _docstrings(self.text.read(path)):
                sentences.update(_sentences_of(docstring, self.max_chars))
        if not sentences:
            raise ValueError(
                f"no docstring under {self.text.folder!r} has a sentence of words "
                f"alone with at most {self.max_chars} characters: raise "
                "EspeakSpeech.max_chars, or set TextFiles.root to Python sources"
            )
        return sorted(sentences, key=lambda s: _digest(s))[: self.utterances]

    def _line(self, sentence: str) -> _Line:
        choice = int(_digest(sentence)[:8], 16)
        voice = self.voices[choice % len(self.voices)]
        speed = self.speeds[choice // len(self.voices) % len(self.speeds)]
        return _Line(sentence, voice, speed)


@dataclasses.dataclass(frozen=True)
class _Line:
    """A sentence, with its voice and speed."""

    sentence: str
    voice: str
    speed: int

    @property
    def wav(self) -> str:
        """Name of its wav file."""
        return _digest(f"{self.voice} {self.speed} {self.sentence}")[:16] + ".wav"

    def speak(self, folder: pathlib.Path) -> None:
        """Makes the file, all of it or nothing."""
        with atomic_write(folder / self.wav) as new:
            command = ["espeak-ng", "-v", self.voice, "-s", str(self.speed)]
            command += ["-w", str(new), "--", self.sentence]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
            )
            if done.returncode or not new.is_file():
                raise ValueError(
                    f"`{' '.join(command)}` failed: {done.stderr.strip()}; set "
                    "EspeakSpeech.voices to some that `espeak-ng --voices=en` names"
                )


@functools.cache
def _made(speech: EspeakSpeech) -> pathlib.Path:
    """The manifest; its sounds are made unless they exist."""
    lines = [speech._line(sentence) for sentence in speech.sentences()]
    folder = pathlib.Path(speech.folder or user_cache("espeak")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [line for line in lines if not (folder / line.wav).is_file()]
    if missing:
        if shutil.which("espeak-ng") is None:
            raise FileNotFoundError(
                f"{len(missing)} of {len(lines)} utterances are not in {folder}, and "
                "espeak-ng, which makes them, is not installed: install it, on "
                "Debian by `apt-get install espeak-ng`"
            )
        logging.info("espeak-ng says %d sentences, into %s", len(missing), folder)
        # Threads suffice: each waits for a process.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [pool.submit(line.speak, folder) for line in missing]
            try:
                for done in concurrent.futures.as_completed(made):
                    done.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return _written(folder, lines)


def _written(folder: pathlib.Path, lines: list[_Line]) -> pathlib.Path:
    text = "".join(f"{line.wav}\t{line.sentence}\n" for line in lines)
    manifest = folder / f"manifest-{_digest(text)[:16]}.tsv"
    if not manifest.is_file():
        with atomic_write(manifest) as new:
            new.write_text(text, encoding="utf-8")
    return manifest


def _docstrings(source: bytes) -> list[str]:
    """The texts between triple quotes; parsing for docstrings would take 20 s."""
    return re.findall(r'"""(.*?)"""', source.decode(errors="replace"), re.DOTALL)


def _sentences_of(docstring: str, max_chars: int) -> Iterator[str]:
    for paragraph in docstring.split("\n\n"):
        for sentence in re.split(r"[.:;!?](?:\s+|$)", " ".join(paragraph.split())):
            sentence = sentence[:1].lower() + sentence[1:]
            if len(sentence) <= max_chars and _SENTENCE.fullmatch(sentence):
                yield sentence


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
