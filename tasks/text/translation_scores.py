"""How good translations are: BLEU and chrF, by direction."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

# Languages written with few spaces between words, or none: BLEU counts characters.
_BY_CHARACTER = ("ja", "ko", "th", "lo", "km", "my", "zh")


@dataclasses.dataclass(frozen=True)
class Translated:
    """One translation by the model.

    Args:
      direction: such as "en-de".
      language: the translation's language, such as "de" or "zh_CN".
      source: the text.
      reference: its human translation.
      found: the model's translation.
    """

    direction: str
    language: str
    source: str
    reference: str
    found: str


def scores(translated: Sequence[Translated]) -> dict[str, float]:
    """Corpus scores from 0 to 100, by direction, and their means.

    Args:
      translated: translations of any directions.

    Returns:
      `bleu` and `chrf`, means over directions, and `bleu/en-de` and the like.

    Raises:
      ImportError: sacrebleu is not installed.
    """
    by_direction: dict[str, list[Translated]] = {}
    for translation in translated:
        by_direction.setdefault(translation.direction, []).append(translation)
    values: dict[str, float] = {}
    for direction, group in sorted(by_direction.items()):
        texts = [translation.found for translation in group]
        references = [[translation.reference for translation in group]]
        tokenizer = _tokenizer(group[0].language)
        bleu = _sacrebleu().corpus_bleu(texts, references, tokenize=tokenizer)
        values[f"bleu/{direction}"] = bleu.score
        values[f"chrf/{direction}"] = _sacrebleu().corpus_chrf(texts, references).score
    for name in ("bleu", "chrf"):
        of = [value for key, value in values.items() if key.startswith(f"{name}/")]
        if of:
            values[name] = float(np.mean(of))
    return values


def samples(translated: Sequence[Translated], count: int = 20) -> str:
    """A Markdown table of some translations, evenly spread."""
    step = max(1, -(-len(translated) // count))
    lines = ["| | source | reference | found |", "|---|---|---|---|"]
    for translation in translated[::step][:count]:
        cells = (
            translation.direction,
            translation.source,
            translation.reference,
            translation.found,
        )
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def _tokenizer(language: str) -> str:
    return "char" if re.split("[-_@]", language)[0] in _BY_CHARACTER else "13a"


def _sacrebleu():
    try:
        import sacrebleu  # Only translations need it.
    except ImportError as e:
        raise ImportError(
            "BLEU needs sacrebleu, which is not installed: pip install 'meshwright[mt]'"
        ) from e
    return sacrebleu
