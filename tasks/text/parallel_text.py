"""Parallel text: sentences with their translations, from files of three kinds."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import os
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import ClassVar

import gin
import tensorflow as tf
from absl import logging

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.input.places import on_disk
from meshwright.tasks.input.record_files import find_records, read_record

# Lines of a text or comment of a .po file; real programs have a few hundred at most.
_MOST_LINES = 5000


@dataclasses.dataclass(frozen=True, order=True)
class Pair:
    """A text and its translation.

    Args:
      source_language: language of the source, such as "en".
      target_language: language of the target, such as "de" or "pt_BR".
      source: one line of text.
      target: one line of text.
    """

    source_language: str
    target_language: str
    source: str
    target: str

    @property
    def direction(self) -> str:
        """Both languages, such as "en-de"."""
        return f"{self.source_language}-{self.target_language}"

    def reversed(self) -> Pair:
        """The pair with source and target exchanged."""
        return Pair(
            self.target_language, self.source_language, self.target, self.source
        )


@gin.constants_from_enum
class Direction(enum.Enum):
    """Which way pairs are translated: forward, backward, or both."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelFiles(Checked):
    """Base of sources of pairs. Construction does not touch the file system.

    Args:
      root: the folder.
      languages: languages to translate the source language to; none for all there are.
      source_language: the language of all sources.
      direction: which way to translate.
      held_out_one_in: about one text of the source language in so many is held out,
        with its translations to all languages, chosen by a hash of its text: adding
        files moves no other text. Translated backward, a source that is also trained
        on, as several texts may have one translation, is no longer held out.

    Raises:
      ValueError: nothing is left to train on; a language comes twice.
    """

    root: str
    languages: tuple[str, ...] = ()
    source_language: str = "en"
    direction: Direction = Direction.FORWARD
    held_out_one_in: int = bounded(20, at_least=2)

    hint: ClassVar[str] = ""
    """Where files may come from: the end of a sentence."""

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        object.__setattr__(self, "languages", tuple(self.languages))
        listed = [*self.languages, self.source_language]
        twice = sorted({language for language in listed if listed.count(language) > 1})
        if twice:
            raise ValueError(
                f"{name}.languages names {', '.join(twice)} twice, or as a translation "
                "of itself: name each language once"
            )

    def pairs(self, split: Split) -> list[Pair]:
        """The pairs of a split, sorted, each once; files are read once in a process.

        Raises:
          FileNotFoundError: no file has pairs of a requested language.
          ValueError: a file is malformed; the split is empty.
          OSError: a file cannot be read.
        """
        pairs = _load(self)[split]
        if not pairs:
            raise ValueError(
                f"no {split.value} pairs under {self.root!r}: add files, or change "
                f"{type(self).__name__}.held_out_one_in ({self.held_out_one_in})"
                f"{self.hint}"
            )
        return pairs

    def read(self) -> Iterator[Pair]:
        """All pairs of `languages`, in any order, forward."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def split_of(self, pair: Pair) -> Split:
        """The split of a forward pair, by its source, whatever the language."""
        return Split.by_hash(pair.source.encode(), self.held_out_one_in)

    def _files(self, suffixes: Sequence[str]) -> list[pathlib.Path]:
        root = on_disk(self.root, f"{type(self).__name__}.root")
        paths = sorted(
            pathlib.Path(parent, name)
            for parent, _, names in os.walk(root, onerror=_unreadable)
            for name in names
            if name.endswith(tuple(suffixes))
            # No pipe: reading it might never end.
            and os.path.isfile(os.path.join(parent, name))
        )
        if not paths:
            raise FileNotFoundError(
                f"no {' or '.join(suffixes)} files under {self.root!r}: set "
                f"{type(self).__name__}.root to a folder that has some{self.hint}"
            )
        return paths


def _unreadable(error: OSError) -> None:
    """Raises, so that no folder is left out in silence, except a missing root."""
    if not isinstance(error, FileNotFoundError):
        raise error


@functools.cache
def _load(files: ParallelFiles) -> dict[Split, list[Pair]]:
    splits = {split: set() for split in Split}
    read, missing = set(), set(files.languages)
    for pair in files.read():
        missing.discard(pair.target_language)
        if pair in read:
            continue
        read.add(pair)
        part = splits[files.split_of(pair)]
        if files.direction is not Direction.BACKWARD:
            part.add(pair)
        if files.direction is not Direction.FORWARD:
            part.add(pair.reversed())
    if missing:
        raise FileNotFoundError(
            f"no pairs of language {', '.join(sorted(missing))} under {files.root!r}: "
            f"take it out of {type(files).__name__}.languages, or add its files"
            f"{files.hint}"
        )
    if files.direction is not Direction.FORWARD:
        # English decides the split: sources of other languages may be in both.
        trained = {pair.source for pair in splits[Split.TRAIN]}
        held_out = splits[Split.HELD_OUT]
        splits[Split.HELD_OUT] = {p for p in held_out if p.source not in trained}
    return {split: sorted(part) for split, part in splits.items()}


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GettextCatalogues(ParallelFiles):
    """Messages of programs and their translations, from .mo and .po files.

    The language of a file is the folder around its LC_MESSAGES, else that of its
    header, else its name without suffix. Fuzzy and untranslated messages are left out,
    and so are plurals other than the first form, and messages of several lines. A
    catalogue that cannot be decoded is left out with a warning: most machines have such
    a file.

    Args:
      root: the folder of catalogues; on Debian the default, where `apt install
        iso-codes` puts names of languages, countries and currencies in over a hundred
        languages.
      domains: names, without suffix, of the catalogues to read in folders called
        LC_MESSAGES, such as "iso_639-3"; none for all.
      max_chars: most characters of a message or its translation; longer ones are left
        out.
    """

    root: str = "/usr/share/locale"
    domains: tuple[str, ...] = ()
    max_chars: int = 200

    hint = "; on Debian, `apt install iso-codes` brings names in most languages"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "domains", tuple(self.domains))

    def read(self) -> Iterator[Pair]:
        read = set()  # Packages link the old names of catalogues to the new ones.
        for path in self._files((".mo", ".po")):
            if path.resolve() not in read:
                read.add(path.resolve())
                yield from self._pairs_of(path)

    def _pairs_of(self, path: pathlib.Path) -> Iterator[Pair]:
        language = None
        if path.parent.name == "LC_MESSAGES":
            language = path.parent.parent.name
            is_wanted = not self.domains or path.stem in self.domains
            if not is_wanted or not self._is_wanted(language):
                return
        catalogue = _catalogue(path)
        language = language or catalogue.metadata.get("Language") or path.stem
        if self._is_wanted(language):
            for entry in catalogue:
                source, target = _texts_of(entry)
                longest = max(len(source), len(target))
                if source and target and longest <= self.max_chars:
                    yield Pair(self.source_language, language, source, target)

    def _is_wanted(self, language: str) -> bool:
        if not self.languages:
            return language != self.source_language
        return language in self.languages


def _catalogue(path: pathlib.Path):
    """The contents of a .mo or .po file; empty if it cannot be decoded."""
    polib = _import_polib()
    binary = path.suffix == ".mo"
    check, read = (_check_mo, polib.mofile) if binary else (_check_po, polib.pofile)
    try:
        check(path)
        return read(str(path))
    # polib raises these on broken files, some of which distributions install.
    except (OSError, LookupError, ValueError, TypeError, struct.error) as e:
        logging.warning("left out, as it is no gettext catalogue: %s (%s)", path, e)
        return polib.POFile()


def _check_mo(path: pathlib.Path) -> None:
    """Refuses a file whose strings are beyond its end, or overlap so as to fill memory.

    Raises:
      ValueError, struct.error: the file has such strings.
    """
    content = path.read_bytes()
    order = ">" if content.startswith(b"\x95\x04\x12\xde") else "<"
    count, *tables = struct.unpack_from(f"{order}III", content, 8)
    size = 0
    for table in tables:
        offsets = content[table : table + 8 * count]
        for length, start in struct.iter_unpack(f"{order}II", offsets):
            size += length
            if start + length > len(content):
                raise ValueError("a string is beyond its end")
    if size > len(content):
        raise ValueError(f"its strings have {size} bytes, more than the file")


def _check_po(path: pathlib.Path) -> None:
    """Refuses texts that would take polib hours: it copies a text for each of its
    lines.

    Raises:
      ValueError: a text or a comment has too many lines.
    """
    with path.open("rb") as file:
        for kind, lines in itertools.groupby(file, key=_kind_of_line):
            if kind and sum(1 for _ in lines) > _MOST_LINES:
                raise ValueError(f"a text has more than {_MOST_LINES} lines")


def _kind_of_line(line: bytes) -> bytes:
    """The kind of a line that polib joins with neighbours of its kind; else empty."""
    start = line.lstrip()[:2]
    if start.startswith(b'"'):
        return b'"'
    return start if start.startswith(b"#") and start != b"#~" else b""


def _import_polib():
    try:
        import polib  # Only catalogues need it.
    except ImportError as e:
        raise ImportError(
            "gettext catalogues need polib, which is not installed: "
            "pip install 'meshwright[mt]'"
        ) from e
    return polib


def _texts_of(entry) -> tuple[str, str]:
    """A message and its translation; empty unless both are of one line."""
    source = entry.msgid.strip()
    target = (entry.msgstr or entry.msgstr_plural.get(0, "")).strip()
    left_out = "fuzzy" in entry.flags or entry.obsolete
    if left_out or len(source.splitlines()) != 1 or len(target.splitlines()) != 1:
        return "", ""
    return source, target


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TsvFiles(ParallelFiles):
    """Files of two columns, source and translation, separated by a tab; UTF-8.

    A file is named after its languages: en-de.tsv holds English and German.
    """

    hint = "; a file is named after its two languages, such as en-de.tsv"

    def read(self) -> Iterator[Pair]:
        for path in self._files((".tsv",)):
            prefix = f"{self.source_language}-"
            target = path.stem.removeprefix(prefix)
            if not path.stem.startswith(prefix):
                logging.warning(
                    "left out, as its name is not %s and a language, as in %sde.tsv: "
                    "%s; rename it, or set TsvFiles.source_language",
                    *(prefix[:-1], prefix, path),
                )
            elif not self.languages or target in self.languages:
                yield from self._pairs_of(path, target)

    def _pairs_of(self, path: pathlib.Path, language: str) -> Iterator[Pair]:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as e:
            raise ValueError(f"{path} is not in UTF-8: {e}") from e
        # The end of the last line makes one more.
        if empty := sum(not line.rstrip("\r") for line in lines[:-1]):
            logging.warning("%s: skipped %d empty lines", path, empty)
        for number, line in enumerate(lines, start=1):
            columns = line.rstrip("\r").split("\t")
            if columns == [""]:
                continue
            if len(columns) != 2 or not all(map(str.strip, columns)):
                raise ValueError(
                    f"{path}:{number} has {len(columns)} columns, or an empty one: "
                    "write the source, one tab and the translation on each line, "
                    "without names of columns; the file's name has the languages"
                )
            source, target = map(str.strip, columns)
            yield Pair(self.source_language, language, source, target)


_FEATURES = {
    name: tf.io.FixedLenFeature([], tf.string)
    for name in ("source", "target", "target_language")
}


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TFRecordFiles(ParallelFiles):
    """Files of `tf.train.Example`, *.tfrecord, with bytes features in UTF-8.

    Features: source, target, target_language; others are ignored.
    """

    def read(self) -> Iterator[Pair]:
        for path in self._files((".tfrecord", ".tfrecords")):
            for number, (start, size) in enumerate(find_records(path).tolist()):
                name = f"record {number} of {path}"
                pair = self._pair(name, read_record(path, start, size, name=name))
                if not self.languages or pair.target_language in self.languages:
                    yield pair

    def _pair(self, name: str, record: bytes) -> Pair:
        try:
            example = tf.io.parse_single_example(record, _FEATURES)
            texts = [example[feature].numpy().decode().strip() for feature in _FEATURES]
        except (tf.errors.OpError, UnicodeDecodeError) as e:
            raise ValueError(
                f"{name} is no tf.train.Example with the bytes features "
                f"{', '.join(_FEATURES)} in UTF-8: {e}"
            ) from e
        source, target, language = texts
        if not source or not target:
            raise ValueError(f"{name} has an empty source or target: leave it out")
        return Pair(self.source_language, language, source, target)
