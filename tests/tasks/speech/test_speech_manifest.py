"""Lists of utterances: both forms, the split by sentence, and what is wrong in them."""

import json
import pathlib

import pytest

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.speech.speech_manifest import Manifest


@pytest.fixture
def folder(tmp_path):
    for name in ("a.wav", "sub/b.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def manifest(folder, text, name="m.tsv", **kwargs):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Manifest(path=str(path), **kwargs)


def both_splits(of):
    utterances = []
    for split in Split:
        try:
            utterances += of.read(split)
        except ValueError as error:
            assert f"lists no {split.value} utterance" in str(error)
    return utterances


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_paths_are_relative_to_the_list(folder, form):
    lines = [("a.wav", "one two"), ("sub/b.wav", "drei  vier ")]
    if form == "tsv":
        text = "".join(f"{sound}\t{words}\r\n\n" for sound, words in lines)
    else:
        objects = [{"audio": sound, "text": words, "id": 7} for sound, words in lines]
        text = "\n".join(map(json.dumps, objects))
    utterances = both_splits(manifest(folder, text, f"m.{form}"))
    assert {(utterance.path, utterance.transcript) for utterance in utterances} == {
        (str(folder / "a.wav"), "one two"),
        (str(folder / "sub/b.wav"), "drei  vier"),
    }
    first = next(u for u in utterances if u.path.endswith("a.wav"))
    assert first.place == f"{folder}/m.{form}:1"


def test_no_sentence_is_in_both_splits(folder):
    texts = [f"sentence {'abcdefghijklmnopqrstuvwxyz'[i]}" for i in range(26)] * 2
    texts += [text.upper() for text in texts[:26]]
    text = "".join(f"a.wav\t{text}\n" for text in texts)
    of = manifest(folder, text, held_out_one_in=4)
    transcripts = {
        split: [u.transcript.lower() for u in of.read(split)] for split in Split
    }
    train, held_out = transcripts[Split.TRAIN], transcripts[Split.HELD_OUT]
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == len(texts)
    assert all(held_out.count(t) == 3 for t in held_out), "whatever the case"
    # More lines move no other.
    more = manifest(folder, f"{text}a.wav\tanother\n", "n.tsv", held_out_one_in=4)
    assert set(held_out) <= {
        utterance.transcript.lower() for utterance in more.read(Split.HELD_OUT)
    }


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("m.tsv", "", ValueError, r"m\.tsv is empty: write an utterance a line"),
        ("m.tsv", "\n\n", ValueError, "is empty"),
        ("m.tsv", "a.wav\tx\na.wav\t \n", ValueError, r"m\.tsv:2 has an empty transc"),
        ("m.tsv", "a.wav x\n", ValueError, r"m\.tsv:1 has 1 columns"),
        ("m.tsv", "a.wav\tx\ty\n", ValueError, r"m\.tsv:1 has 3 columns"),
        ("m.tsv", "c.wav\tx\n", FileNotFoundError, r"m\.tsv:1 names 'c\.wav', and"),
        ("m.tsv", b"a.wav\t\xff\n", ValueError, r"m\.tsv is not in UTF-8"),
        ("m.jsonl", '{"audio": "a.wav"}', ValueError, r"m\.jsonl:1 is no object with"),
        ("m.jsonl", "[1]", ValueError, r"m\.jsonl:1 is no object with"),
        ("m.jsonl", "\n{", ValueError, r"m\.jsonl:2 is no object with"),
        ("m.jsonl", "[" * 10**5, ValueError, r"m\.jsonl:1 is no object .*Recursion"),
        ("m.jsonl", "9" * 5000, ValueError, r"m\.jsonl:1 is no object with .*digits"),
        (
            "m.jsonl",
            '{"audio": "a.wav", "text": null}',
            ValueError,
            r"m\.jsonl:1 is no object with .*are to be strings",
        ),
        (
            "m.jsonl",
            '{"audio": "a.wav", "text": "\\ud800"}',
            ValueError,
            r"m\.jsonl:1 is no object with .*surrogates",
        ),
        ("m.tsv", "a" * 5000 + "\tx", FileNotFoundError, r"m\.tsv:1 names 'aaa"),
        (
            "m.jsonl",
            '{"audio": "a.wav", "text": ""}',
            ValueError,
            "an empty transcript",
        ),
    ],
)
def test_what_is_wrong_is_named(folder, name, text, error, message):
    with pytest.raises(error, match=message):
        manifest(folder, text, name).read(Split.TRAIN)


def test_a_list_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="no manifest /nowhere/m.tsv: set"):
        Manifest(path="/nowhere/m.tsv").read(Split.TRAIN)
    assert not pathlib.Path("/nowhere").exists()


def test_nothing_left_to_train_on():
    with pytest.raises(ValueError, match="Manifest.held_out_one_in is 1"):
        Manifest(path="x", held_out_one_in=1)
