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
    """One translation found.

    Args:
      direction: such as "en-de".
      language: of the translation, such as "de" or "zh_CN".
      source: the text.
      reference: its translation by people.
      found: the model's.
    """

    direction: str
    language: str
    source: str
    reference: str
    found: str


def scores(translated: Sequence[Translated]) -> dict[str, float]:
    """Corpus scores from 0 to 100, of each direction and their means.

    Args:
      translated: of any directions.

    Returns:
      `bleu` and `chrf`, means over directions, and `bleu/en-de` and the like.

    Raises:
      ImportError: sacrebleu is not installed.
    """
    by_direction: dict[str, list[Translated]] = {}
    for one in translated:
        by_direction.setdefault(one.direction, []).append(one)
    found: dict[str, float] = {}
    for direction, group in sorted(by_direction.items()):
        texts = [one.found for one in group]
        references = [[one.reference for one in group]]
        tokenizer = _tokenizer(group[0].language)
        bleu = _sacrebleu().corpus_bleu(texts, references, tokenize=tokenizer)
        found[f"bleu/{direction}"] = bleu.score
        found[f"chrf/{direction}"] = _sacrebleu().corpus_chrf(texts, references).score
    for name in ("bleu", "chrf"):
        of = [value for key, value in found.items() if key.startswith(f"{name}/")]
        if of:
            found[name] = float(np.mean(of))
    return found


def samples(translated: Sequence[Translated], count: int = 20) -> str:
    """A Markdown table of some, evenly spread."""
    step = max(1, -(-len(translated) // count))
    lines = ["| | source | reference | found |", "|---|---|---|---|"]
    for one in translated[::step][:count]:
        cells = (one.direction, one.source, one.reference, one.found)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def _tokenizer(language: str) -> str:
    return "char" if re.split("[-_@]", language)[0] in _BY_CHARACTER else "13a"


def _sacrebleu():
    try:
        import sacrebleu  # Only translations want it.
    except ImportError as e:
        raise ImportError(
            "BLEU needs sacrebleu, which is not installed: pip install 'meshwright[mt]'"
        ) from e
    return sacrebleu
