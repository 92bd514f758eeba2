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
from meshwright.tasks.input.record_files import find_records, read_record

# Of a text or comment of a .po file; long ones of real programs have a few hundred.
_MOST_LINES = 5000


@dataclasses.dataclass(frozen=True, order=True)
class Pair:
    """A text and its translation.

    Args:
      source_language: what the source is written in, such as "en".
      target_language: what the target is written in, such as "de" or "pt_BR".
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
        """The translation, and the text as its translation."""
        return Pair(
            self.target_language, self.source_language, self.target, self.source
        )


@gin.constants_from_enum
class Direction(enum.Enum):
    """Which way pairs are translated: as they are, the other way, or both."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelFiles(Checked):
    """Base of where pairs come from. Making one does not touch the file system.

    Args:
      root: the folder.
      languages: those to translate the source language to; none for all there are.
      source_language: of all sources.
      direction: which way to translate.
      held_out_one_in: about one text of the source language in so many is held out,
        with its translations to all languages, chosen by a hash of its text: adding
        files moves no other. Translated backward, what is trained on as well, as
        several texts may have one translation, is no longer held out.

    Raises:
      ValueError: nothing is left to train on; a language comes twice.
    """

    root: str
    languages: tuple[str, ...] = ()
    source_language: str = "en"
    direction: Direction = Direction.FORWARD
    held_out_one_in: int = bounded(20, at_least=2)

    hint: ClassVar[str] = ""
    """Where files may come from, the end of a sentence."""

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        object.__setattr__(self, "languages", tuple(self.languages))
        listed = [*self.languages, self.source_language]
        twice = sorted({one for one in listed if listed.count(one) > 1})
        if twice:
            raise ValueError(
                f"{name}.languages names {', '.join(twice)} twice, or as a translation "
                "of itself: name each language once"
            )

    def pairs(self, split: Split) -> list[Pair]:
        """The pairs of a split, sorted, each once; files are read once in a process.

        Raises:
          FileNotFoundError: no file has pairs of a language that is asked for.
          ValueError: a file is malformed; the split is empty.
          OSError: a file cannot be read.
        """
        found = _load(self)[split]
        if not found:
            raise ValueError(
                f"no {split.value} pairs under {self.root!r}: add files, or change "
                f"{type(self).__name__}.held_out_one_in ({self.held_out_one_in})"
            )
        return found

    def read(self) -> Iterator[Pair]:
        """All pairs of `languages`, in any order, forward."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def split_of(self, pair: Pair) -> Split:
        """Where a forward pair belongs: by its source, whatever the language."""
        return Split.by_hash(pair.source.encode(), self.held_out_one_in)

    def _files(self, suffixes: Sequence[str]) -> list[pathlib.Path]:
        root = pathlib.Path(self.root).expanduser()
        found = sorted(
            pathlib.Path(parent, name)
            for parent, _, names in os.walk(root, onerror=_unreadable)
            for name in names
            if name.endswith(tuple(suffixes))
            # No pipe, which could be waited at for ever.
            and os.path.isfile(os.path.join(parent, name))
        )
        if not found:
            raise FileNotFoundError(
                f"no {' or '.join(suffixes)} files under {self.root!r}: set "
                f"{type(self).__name__}.root to a folder that has some{self.hint}"
            )
        return found


def _unreadable(error: OSError) -> None:
    """Lets no folder be left out in silence, but a root that is not there."""
    if not isinstance(error, FileNotFoundError):
        raise error


@functools.cache
def _load(files: ParallelFiles) -> dict[Split, list[Pair]]:
    found = {split: set() for split in Split}
    read, missing = set(), set(files.languages)
    for pair in files.read():
        missing.discard(pair.target_language)
        if pair in read:
            continue
        read.add(pair)
        part = found[files.split_of(pair)]
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
        trained = {pair.source for pair in found[Split.TRAIN]}
        held_out = found[Split.HELD_OUT]
        found[Split.HELD_OUT] = {p for p in held_out if p.source not in trained}
    return {split: sorted(part) for split, part in found.items()}


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GettextCatalogues(ParallelFiles):
    """Messages of programs and their translations, from .mo and .po files.

    The language of a file is the folder around its LC_MESSAGES, else what its header
    says, else its name without suffix. Fuzzy and untranslated messages are left out,
    and so are plurals other than the first form, and messages of several lines. A
    catalogue that cannot be decoded is left out with a warning: most machines have one.

    Args:
      root: where catalogues lie; on Debian the default, where `apt install iso-codes`
        puts names of languages, countries and currencies in over a hundred languages.
      domains: names of catalogues without suffix, such as "iso_639-3", of those in
        folders called LC_MESSAGES; none for all.
      max_chars: of a message or its translation; longer ones are left out.
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
            asked_for = not self.domains or path.stem in self.domains
            if not asked_for or not self._is_wanted(language):
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
    """What is in a .mo or .po file; nothing if it cannot be decoded."""
    polib = _import_polib()
    binary = path.suffix == ".mo"
    check, read = (_check_mo, polib.mofile) if binary else (_check_po, polib.pofile)
    try:
        check(path)
        return read(str(path))
    # What polib raises on broken files, some of which distributions install.
    except (OSError, LookupError, ValueError, TypeError, struct.error) as e:
        logging.warning("left out, as it is no gettext catalogue: %s (%s)", path, e)
        return polib.POFile()


def _check_mo(path: pathlib.Path) -> None:
    """Refuses strings beyond a file, or so many over each other that they fill memory.

    Raises:
      ValueError, struct.error: there are some.
    """
    content = path.read_bytes()
    order = ">" if content.startswith(b"\x95\x04\x12\xde") else "<"
    count, *tables = struct.unpack_from(f"{order}III", content, 8)
    size = 0
    for table in tables:
        places = content[table : table + 8 * count]
        for length, at in struct.iter_unpack(f"{order}II", places):
            size += length
            if at + length > len(content):
                raise ValueError("a string lies beyond its end")
    if size > len(content):
        raise ValueError(f"its strings have {size} bytes, more than all of it")


def _check_po(path: pathlib.Path) -> None:
    """Refuses what polib would take hours for: it copies a text for each of its lines.

    Raises:
      ValueError: a text or a comment has too many lines.
    """
    with path.open("rb") as file:
        for kind, lines in itertools.groupby(file, key=_kind_of_line):
            if kind and sum(1 for _ in lines) > _MOST_LINES:
                raise ValueError(f"a text has more than {_MOST_LINES} lines")


def _kind_of_line(line: bytes) -> bytes:
    """What polib joins with neighbours of the same kind; else empty."""
    start = line.lstrip()[:2]
    if start.startswith(b'"'):
        return b'"'
    return start if start.startswith(b"#") and start != b"#~" else b""


def _import_polib():
    try:
        import polib  # Only catalogues want it.
    except ImportError as e:
        raise ImportError(
            "gettext catalogues need polib, which is not installed: "
            "pip install 'meshwright[mt]'"
        ) from e
    return polib


def _texts_of(entry) -> tuple[str, str]:
    """A message and its translation, empty if it has none of one line."""
    source = entry.msgid.strip()
    target = (entry.msgstr or entry.msgstr_plural.get(0, "")).strip()
    left_out = "fuzzy" in entry.flags or entry.obsolete
    if left_out or len(source.splitlines()) != 1 or len(target.splitlines()) != 1:
        return "", ""
    return source, target


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TsvFiles(ParallelFiles):
    """Files of two columns, source and translation, parted by a tab; UTF-8.

    A file is called after its languages: en-de.tsv holds English and German.
    """

    def read(self) -> Iterator[Pair]:
        for path in self._files((".tsv",)):
            prefix = f"{self.source_language}-"
            target = path.stem.removeprefix(prefix)
            if not path.stem.startswith(prefix):
                logging.warning("left out, as it is not from %s: %s", prefix[:-1], path)
            elif not self.languages or target in self.languages:
                yield from self._pairs_of(path, target)

    def _pairs_of(self, path: pathlib.Path, language: str) -> Iterator[Pair]:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as e:
            raise ValueError(f"{path} is not in UTF-8: {e}") from e
        for number, line in enumerate(lines, start=1):
            columns = line.rstrip("\r").split("\t")
            if columns == [""]:
                continue
            if len(columns) != 2 or not all(map(str.strip, columns)):
                raise ValueError(
                    f"{path}:{number} has {len(columns)} columns, or an empty one: "
                    "write the source, one tab and the translation on each line"
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

    Features: source, target, target_language; others are left alone.
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
            one = tf.io.parse_single_example(record, _FEATURES)
            texts = [one[feature].numpy().decode().strip() for feature in _FEATURES]
        except (tf.errors.OpError, UnicodeDecodeError) as e:
            raise ValueError(
                f"{name} is no tf.train.Example with the bytes features "
                f"{', '.join(_FEATURES)} in UTF-8: {e}"
            ) from e
        source, target, language = texts
        if not source or not target:
            raise ValueError(f"{name} has an empty source or target: leave it out")
        return Pair(self.source_language, language, source, target)
