"""Subword vocabularies, trained from the text itself."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import io
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence

import gin
import tensorflow as tf

VOCABULARY_FILE = "vocabulary.model"
"""A vocabulary's SentencePiece model, in the folder of a training."""
_TAG = re.compile("<2(.+)>")
_SOURCES = re.compile(r"^\w+: \S+\(\d+\) \[.*?\] (?=[A-Z])")  # Places in C++.
_LONGEST = 4192  # Bytes of a text; SentencePiece leaves out longer ones.


@gin.constants_from_enum
class Subwords(enum.Enum):
    """How pieces are chosen: by their likelihood, or by merging pairs."""

    UNIGRAM = "unigram"
    BPE = "bpe"


@gin.constants_from_enum
class SpecialTokens(enum.Enum):
    """The ids of tokens that are no text.

    WITH_START: padding is 0, the start of a text 1, its end 2. T5: as in models of T5
    and mT5, padding is 0, which starts texts too, and their end 1.
    """

    WITH_START = "with_start"
    T5 = "t5"

    @property
    def in_model(self) -> tuple[int, int, int]:
        """The ids of padding, start and end in a model; -1 for what it lacks."""
        return (0, 1, 2) if self is SpecialTokens.WITH_START else (0, -1, 1)

    @property
    def start_id(self) -> int:
        """The id before a text's first token: the padding's, if there is no other."""
        padding, start, _ = self.in_model
        return padding if start < 0 else start

    @property
    def end_id(self) -> int:
        """The id after a text's last token."""
        return self.in_model[2]


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceVocabulary:
    """Settings for SentencePiece (Kudo and Richardson 2018) to train a vocabulary.

    Construction reads nothing, so that a task can be planned without its data. The same
    text gives the same vocabulary in every process.

    Args:
      vocab_size: V, which counts control symbols and 256 bytes for text without a
        piece; with `model_file` the number of pieces in the file.
      subwords: how pieces are chosen.
      character_coverage: share of all characters that get a piece; others are spelled
        as bytes.
      max_texts: the most texts to train on; a larger corpus is sampled evenly.
      model_file: a trained model to read instead of training, on a disk or in a
        bucket.
      special_tokens: the ids of padding, start and end; `SpecialTokens.T5` for a
        `model_file` of T5.

    Raises:
      ValueError: the size of a vocabulary to train is too small for bytes and control
        symbols.
    """

    vocab_size: int
    subwords: Subwords = Subwords.UNIGRAM
    character_coverage: float = 0.9995
    max_texts: int = 1_000_000
    model_file: str | None = None
    special_tokens: SpecialTokens = SpecialTokens.WITH_START

    def __post_init__(self):
        least = 256 + 8
        if self.model_file is None and self.vocab_size < least:
            raise ValueError(
                f"SentencePieceVocabulary.vocab_size is {self.vocab_size}: make it, or "
                f"the macro VOCAB_SIZE of the shipped files, {least} or more, as every "
                "byte has a piece"
            )

    def trained(
        self,
        texts: Sequence[str],
        languages: Iterable[str] = (),
        *,
        verbatim: bool = False,
    ) -> Vocabulary:
        """The vocabulary of `texts`, with a tag for each language.

        Args:
          texts: a line each; longer ones than 4192 bytes are left out.
          languages: their names.
          verbatim: keeps text as it is, spaces included, where otherwise it is brought
            to Unicode's NFKC; a model file keeps what it says itself.

        Raises:
          ValueError: the text has too few pieces for V; the file is no such model, or
            one of other settings.
        """
        tags = tuple(map(tag_of, sorted(set(languages))))
        if self.model_file is None:
            _check_texts(texts)
            step = -(-len(texts) // self.max_texts)
            model = self._train(texts[::step], tags, verbatim=verbatim)
            return Vocabulary(model, self.special_tokens)
        return self._read(tags)

    def _train(
        self, texts: Sequence[str], tags: tuple[str, ...], *, verbatim: bool
    ) -> bytes:
        model = io.BytesIO()
        padding, start, end = self.special_tokens.in_model
        try:
            _sentencepiece().SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=model,
                vocab_size=self.vocab_size,
                model_type=self.subwords.value,
                character_coverage=self.character_coverage,
                control_symbols=list(tags),
                byte_fallback=True,
                normalization_rule_name="identity" if verbatim else "nfkc",
                remove_extra_whitespaces=not verbatim,
                add_dummy_prefix=not verbatim,
                pad_id=padding,
                bos_id=start,
                eos_id=end,
                unk_id=end + 1,
                num_threads=1,  # The number is written into the model.
                minloglevel=2,
            )
        except RuntimeError as e:
            raise ValueError(
                f"no vocabulary of {self.vocab_size} pieces can be trained on "
                f"{len(texts)} texts: change SentencePieceVocabulary.vocab_size, the "
                f"macro VOCAB_SIZE of the shipped files, or give more text. "
                f"SentencePiece: {_SOURCES.sub('', str(e))}"
            ) from e
        return model.getvalue()

    def _read(self, tags: tuple[str, ...]) -> Vocabulary:
        path = os.path.expanduser(self.model_file)
        try:
            with tf.io.gfile.GFile(path, "rb") as file:
                model = file.read()
        except tf.errors.OpError as e:
            raise FileNotFoundError(
                f"SentencePieceVocabulary.model_file: there is no file {path} to read "
                f"({e.message.removeprefix(f'{path}; ')})"
            ) from e
        try:
            vocabulary = Vocabulary(model, self.special_tokens)
            size = vocabulary.size
            vocabulary.check_text()
        except (RuntimeError, UnicodeDecodeError) as e:
            raise ValueError(
                f"{path} is no SentencePiece model: set "
                "SentencePieceVocabulary.model_file to one, or leave it out"
            ) from e
        if vocabulary.control_ids != self.special_tokens.in_model:
            raise ValueError(
                f"{path} has padding, start and end at {vocabulary.control_ids}: "
                + self._remedy(vocabulary.control_ids)
            )
        missing = [tag for tag in tags if not vocabulary.has(tag)]
        if size != self.vocab_size:
            raise ValueError(
                f"SentencePieceVocabulary.vocab_size must be {size}, not "
                f"{self.vocab_size}: that is how many pieces {path} has"
            )
        if missing:
            raise ValueError(
                f"{path} lacks the tags {missing}: it must have a tag for each "
                "language, as a model has that was trained for this task"
            )
        return vocabulary

    def _remedy(self, ids: tuple[int, int, int]) -> str:
        """What to do about a model with padding, start and end at other `ids`."""
        for other in SpecialTokens:
            if ids == other.in_model:
                field = "SentencePieceVocabulary.special_tokens"
                return f"set {field} to %SpecialTokens.{other.name}"
        return (
            f"train a model with them at {self.special_tokens.in_model}, by --pad_id, "
            "--bos_id and --eos_id"
        )


def _check_texts(texts: Sequence[str]) -> None:
    """Refuses texts of which SentencePiece leaves nothing to train on."""
    if not any(map(str.strip, texts)):
        raise ValueError(
            "there is no text to train a vocabulary on, or all lines of it are blank: "
            "give files with text, or SentencePieceVocabulary.model_file"
        )
    if all(len(text.encode(errors="replace")) > _LONGEST for text in texts):
        raise ValueError(
            f"all lines of the text are longer than {_LONGEST} bytes, on which no "
            "vocabulary is trained: break them, or give "
            "SentencePieceVocabulary.model_file"
        )


def tag_of(language: str) -> str:
    """The symbol that requests a translation to `language`."""
    return f"<2{language}>"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A trained vocabulary.

    Args:
      model: SentencePiece's serialized model.
      special_tokens: the ids of padding, start and end.
    """

    model: bytes
    special_tokens: SpecialTokens = SpecialTokens.WITH_START

    @property
    def start_id(self) -> int:
        """The id before a text's first token."""
        return self.special_tokens.start_id

    @property
    def end_id(self) -> int:
        """The id after a text's last token."""
        return self.special_tokens.end_id

    @property
    def size(self) -> int:
        """V."""
        return len(self._processor)

    @property
    def sha256(self) -> str:
        """Digest of the model; runs that resume must agree on it."""
        return hashlib.sha256(self.model).hexdigest()

    @property
    def control_ids(self) -> tuple[int, int, int]:
        """The ids of padding, start and end in the model; -1 for what it lacks."""
        processor = self._processor
        return processor.pad_id(), processor.bos_id(), processor.eos_id()

    def normalized(self, text: str) -> str:
        """`text` as it is encoded."""
        return unicodedata.normalize("NFKC", text)

    def has(self, symbol: str) -> bool:
        """Whether `symbol` is a piece."""
        return (
            self._processor.id_to_piece(self._processor.piece_to_id(symbol)) == symbol
        )

    def check_text(self) -> None:
        """Checks that all pieces are text; a damaged model's may not be.

        Raises:
          UnicodeDecodeError: a piece is not text.
        """
        for i in range(self.size):
            self._processor.id_to_piece(i)

    def tag_id(self, language: str) -> int:
        """The id of the tag of `language`.

        Raises:
          ValueError: the language has no tag.
        """
        if not self.has(tag_of(language)):
            raise ValueError(f"the vocabulary has no tag for language {language!r}")
        return self._processor.piece_to_id(tag_of(language))

    @functools.cached_property
    def languages(self) -> list[str]:
        """The languages that have tags, sorted."""
        processor = self._processor
        controls = filter(processor.is_control, range(self.size))
        tags = (_TAG.fullmatch(processor.id_to_piece(i)) for i in controls)
        return sorted(tag[1] for tag in tags if tag)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without start, end and tag."""
        return self._processor.encode(list(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` up to the first end.

        Control symbols are left out, and ids from V on, which a model with a larger
        vocabulary than this one may give.
        """
        kept = []
        for i in map(int, ids):
            if i == self.end_id:
                break
            if i < self.size:
                kept.append(i)
        return self._processor.decode(kept)

    @functools.cached_property
    def _processor(self):
        return _sentencepiece().SentencePieceProcessor(model_proto=self.model)


def _sentencepiece():
    try:
        import sentencepiece  # Only tasks on subwords need it.
    except ImportError as e:
        raise ImportError(
            "subword vocabularies need sentencepiece, which is not installed: "
            "pip install 'meshwright[mt]'"
        ) from e
    return sentencepiece
