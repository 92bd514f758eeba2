"""Speech made on the machine: which sentences, by whom, and once."""

import dataclasses
import pathlib
import shutil

import pytest

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.speech import espeak
from meshwright.tasks.speech.espeak import EspeakSpeech
from meshwright.tasks.speech.speech_audio import SAMPLE_RATE, read_wav
from meshwright.tasks.text.text_input import TextFiles

SOURCE = '''"""Says hello to the world."""

def f(x):
    """Return the answer: a list of numbers. It has 3 parts, `x` too.

    An empty string is never found. Too short
    """
    return """no sentence at all, really"""
'''
needs_espeak = pytest.mark.skipif(
    shutil.which("espeak-ng") is None, reason="espeak-ng is not installed"
)


@pytest.fixture
def speech(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text(SOURCE)
    espeak._made.cache_clear()
    return EspeakSpeech(
        folder=str(tmp_path / "made" / "here"),
        text=TextFiles(root=str(source)),
        held_out_one_in=2,
    )


def wavs(speech):
    return sorted(pathlib.Path(speech.folder).glob("*"))


def fake_espeak(monkeypatch, tmp_path, script):
    """Puts a program called espeak-ng, and nothing else, in the way."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "espeak-ng"
    program.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_sentences_are_words_alone(speech):
    wanted = {
        "says hello to the world",
        "a list of numbers",
        "return the answer",
        "an empty string is never found",
    }
    assert set(speech.sentences()) == wanted
    some = dataclasses.replace(speech, utterances=2)
    assert some.sentences() == speech.sentences()[:2]
    short = dataclasses.replace(speech, max_chars=20)
    assert set(short.sentences()) == {"a list of numbers", "return the answer"}
    with pytest.raises(ValueError, match="no docstring under .* at most 5 characters"):
        dataclasses.replace(speech, max_chars=5).sentences()


def test_the_standard_library_has_thousands():
    sentences = EspeakSpeech().sentences()
    assert len(sentences) == len(set(sentences)) > 1000
    assert all(len(sentence) <= 48 for sentence in sentences)


@needs_espeak
def test_each_is_spoken_once_and_kept(speech):
    listed = [utterance for split in Split for utterance in speech.read(split)]
    assert sorted(u.transcript for u in listed) == sorted(speech.sentences())
    for utterance in listed:
        seconds = len(read_wav(utterance.path)) / SAMPLE_RATE
        assert 0.5 < seconds < 4, utterance
    before = {path: path.stat().st_mtime_ns for path in wavs(speech)}
    # One is lost, and spoken again; the others are left alone.
    pathlib.Path(listed[0].path).unlink()
    espeak._made.cache_clear()
    again = [utterance for split in Split for utterance in speech.read(split)]
    assert again == listed
    after = {path: path.stat().st_mtime_ns for path in wavs(speech)}
    assert [str(p) for p in after if after[p] != before[p]] == [listed[0].path]
    assert len(after) == len(listed) + 1, "sounds and a manifest, no scratch"


@needs_espeak
def test_voices_and_speeds_differ(speech):
    lines = [speech._line(sentence) for sentence in EspeakSpeech().sentences()[:200]]
    assert {line.voice for line in lines} == set(speech.voices)
    assert {line.speed for line in lines} == set(speech.speeds)
    assert len({line.wav for line in lines}) == 200


def test_without_espeak_it_says_how_to_install_it(speech, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = "4 of 4 .*/meshwright/espeak, .*`apt-get install espeak-ng`"
    with pytest.raises(FileNotFoundError, match=message):
        dataclasses.replace(speech, folder=None).read(Split.TRAIN)


def test_a_voice_that_there_is_not(speech, monkeypatch, tmp_path):
    fake_espeak(monkeypatch, tmp_path, "echo 'no such voice' >&2; exit 1")
    with pytest.raises(ValueError, match=r"`espeak-ng -v .* failed: no such voice;"):
        speech.read(Split.TRAIN)
    assert not wavs(speech), "nothing half made is left"


def test_what_was_made_needs_no_espeak(speech, monkeypatch, tmp_path):
    fake_espeak(monkeypatch, tmp_path, 'echo sound > "$6"')
    listed = speech.read(Split.TRAIN)
    monkeypatch.setenv("PATH", "/nowhere")
    espeak._made.cache_clear()
    assert speech.read(Split.TRAIN) == listed


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"voices": ()}, "EspeakSpeech.voices is empty"),
        ({"speeds": ()}, "EspeakSpeech.speeds is empty"),
        ({"utterances": 0}, "EspeakSpeech.utterances is 0"),
        ({"held_out_one_in": 1}, "EspeakSpeech.held_out_one_in is 1"),
    ],
)
def test_wrong_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        EspeakSpeech(**kwargs)


@needs_espeak
def test_the_real_one_refuses_an_unknown_voice(speech):
    strange = dataclasses.replace(speech, voices=("xx-none",))
    with pytest.raises(ValueError, match="espeak-ng --voices=en"):
        strange.read(Split.TRAIN)
