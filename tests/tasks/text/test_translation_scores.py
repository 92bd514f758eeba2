"""BLEU by direction: characters where words are not set apart."""

import pytest

from meshwright.tasks.text.translation_scores import Translated, samples, scores


def translated(language, reference, text, direction=None):
    return Translated(direction or f"en-{language}", language, "x", reference, text)


@pytest.mark.parametrize("language", ["zh", "zh_CN", "zh-Hans", "ja", "my@latin"])
def test_some_languages_are_compared_by_character(language):
    # Five of six characters, which is one wrong word.
    pair = translated(language, "你好世界大家", "你好世界大人")
    assert scores([pair])[f"bleu/en-{language}"] > 50
    as_words = translated("de", "你好世界大家a", "你好世界大人a")
    assert scores([as_words])["bleu"] < 30


def test_samples_are_spread_over_all():
    all_ = [translated("de", f"r{i}", f"f{i}") for i in range(39)]
    lines = samples(all_).splitlines()[2:]
    assert len(lines) == 20 and "r0 " in lines[0] and "r38" in lines[-1]
