"""meshwright-generate as a user meets it: what it writes, and how it fails."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

from meshwright.trainers import generate as main_module
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving import generate_main
from meshwright.trainers.training import loop
from tests.trainers import small_run
from tests.trainers.parity import small_experiment
from tests.trainers.small_run import GIN_FILES, GIN_PARAMS, MESH


def call_main(model_dir, *params, **more_flags):
    given = {"model_dir": str(model_dir), "device_count": "8"}
    return small_run.status_of(main_module, *params, **given, **more_flags)


def parsed(text):
    return [json.loads(line) for line in text.splitlines()]


def typed(content):
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")


def test_a_prompt_is_continued_as_text_and_as_json(straight, tmp_path, capsys):
    _, folder = straight()
    assert call_main(folder, prompt=["de"]) is None
    text = capsys.readouterr().out
    file = tmp_path / "out.jsonl"
    assert call_main(folder, prompt=["de"], output=str(file)) is None
    assert capsys.readouterr().out == ""
    (line,) = parsed(file.read_text())
    assert line["prompt"] == "de"
    (found,) = line["continuations"]
    assert found["text"] + "\n" == text
    assert len(found["ids"]) == 8 - 3 and not found["ended"] and found["score"] < 0


def test_of_the_checkpoint_only_weights_are_read(straight, monkeypatch):
    _, folder = straight()
    read = []

    class Watched(TrainState):
        def __init__(self, programs, state):
            read.append(sorted(state))
            super().__init__(programs, state)

    monkeypatch.setattr(generate_main, "TrainState", Watched)
    assert call_main(folder, prompt=["de"], max_tokens="1") is None
    assert read == [["step", "theta"]]


@pytest.mark.parametrize(
    "param,message",
    [
        ("NUM_LAYERS = 2", r"model:\s+theta\..* in this model"),
        (
            "Experiment.ema = @ExponentialMovingAverage()",
            r"moving average, with the same weights:\s+ema\..* is not in the ch",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(straight, capfd, param, message):
    _, folder = straight()
    assert call_main(folder, param, prompt=["de"]) == 1
    message = rf"the checkpoint in \S+ is of another {message}"
    assert re.search(message, capfd.readouterr().err)


def test_the_text_of_beams_is_that_of_the_best(straight, tmp_path, capsys):
    """Also where beams share a cache."""
    _, folder = straight()
    flags = {"prompt": ["de"], "beams": "4"}
    assert call_main(folder, **flags) is None
    text = capsys.readouterr().out
    file = tmp_path / "out.jsonl"
    flags["flat_beams"] = "true"
    assert call_main(folder, **flags, output=str(file)) is None
    (line,) = parsed(file.read_text())
    assert text == line["continuations"][0]["text"] + "\n"


def test_lines_of_a_file_are_continued(straight, tmp_path, capsys):
    _, folder = straight()
    file = tmp_path / "prompts.jsonl"
    prompts = ["a", [1, 99], "much too long", "def"]
    file.write_text("\n\n".join(json.dumps({"prompt": p}) for p in prompts))
    assert call_main(folder, prompts_file=str(file), beams="2", max_tokens="3") == 1
    out, err = capsys.readouterr()
    lines = parsed(out)
    assert [line["prompt"] for line in lines] == prompts
    refused = lines.pop(2)
    assert refused["continuations"] == [] and refused["refused"] in err
    assert refused["refused"].startswith(f"line 5 of {file} has 14 tokens")
    for line in lines:
        best, other = line["continuations"]
        assert best["score"] >= other["score"] and best["ids"] != other["ids"]
    # "a" is byte 97, whose id is 99.
    assert lines[0]["continuations"] == lines[1]["continuations"]


def test_lines_of_standard_input_are_continued(straight, monkeypatch, capsys):
    _, folder = straight()
    monkeypatch.setattr("sys.stdin", typed(b"de\n\nmuch too long\n\xff\nx\n"))
    assert call_main(folder, temperature="1", seed="3") is None
    out, err = capsys.readouterr()
    assert out.count("\n") >= 2
    assert "line 3 has 14 tokens" in err
    assert "line 4 is no text in UTF-8" in err
    monkeypatch.setattr("sys.stdin", typed(b"de\n"))
    assert call_main(folder, temperature="1", seed="3") is None
    assert out.startswith(capsys.readouterr().out)


def test_a_run_from_the_command_line(straight, tmp_path):
    _, folder = straight()
    command = [sys.executable, "-m", "meshwright.trainers.generate"]
    command += [f"--gin_file={file}" for file in GIN_FILES]
    command += [f"--gin_param={param}" for param in (*GIN_PARAMS, MESH)]
    command += [f"--model_dir={folder}", "--prompt=de", "--prompt=imp", "--top_k=5"]
    done = subprocess.run(
        [*command, "--seed=2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # As XLA optimizes for users: it once fused draws for minutes.
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [line["prompt"] for line in parsed(done.stdout)] == ["de", "imp"]


def test_prompts_end_at_line_feeds_alone(straight, tmp_path, capsys):
    _, folder = straight()
    prompts = ["a\x0cb", "\u2028", "\x85"]
    file = tmp_path / "prompts.txt"
    file.write_bytes("\r\n".join([*prompts, "", "x"]).encode())
    assert call_main(folder, prompts_file=str(file), max_tokens="1") is None
    out = capsys.readouterr().out
    assert [line["prompt"] for line in parsed(out)] == [*prompts, "x"]
    assert out.replace("\n", "").isprintable()


def test_files_that_change_after_the_training_change_no_text(tmp_path, capfd):
    pytest.importorskip("sentencepiece")
    source, folder = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    params = (
        "NUM_LAYERS = 1",
        "VOCAB_SIZE = 320",
        f"TextFiles.root = '{source}'",
        "TextFiles.held_out_one_in = 4",
        "TextInput.vocabulary = @SentencePieceVocabulary()",
        "SentencePieceVocabulary.vocab_size = 320",
        "SentencePieceVocabulary.subwords = %Subwords.BPE",
        "Experiment.num_steps = 1",
    )

    def write(text):
        for number in range(20):
            (source / f"{number}.py").write_text(f"{text} {number}\n" * 9)

    def generate(*more):
        status = call_main(
            folder, gin_params=(*params, *more), prompt=["to be"], output=str(output)
        )
        return status, capfd.readouterr().err

    output = tmp_path / "out.jsonl"
    write("to be or not to be continued, that is what")
    programs = StepPrograms(small_experiment(*params, MESH))
    loop.train_and_evaluate(programs, loop.Run(model_dir=str(folder), evaluate=False))
    assert generate()[0] is None
    before = output.read_text()
    write("other words of another text, in other files:")
    # Settings that no cache of this process knows.
    assert generate("TextFiles.excluded_dirs = ()")[0] is None
    assert output.read_text() == before
    (folder / "vocabulary.model").unlink()
    status, error = generate("TextFiles.excluded_dirs = ('x',)")
    assert status == 1 and "the vocabulary is not the one that the weights" in error


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Closed(io.StringIO):
    """A pipe that nobody reads."""

    def __init__(self, file):
        super().__init__()
        self.fileno = file.fileno

    def write(self, text):
        raise BrokenPipeError


def test_a_terminal_gets_no_control_characters(straight, monkeypatch, capsys):
    _, folder = straight()
    control = "\x1b]0;title\x07\t\n\x9b"
    monkeypatch.setattr(generate_main, "_growing", lambda texts: [control])
    assert call_main(folder, prompt=["de"]) is None
    assert capsys.readouterr().out == control + "\n"
    monkeypatch.setattr("sys.stdout", Terminal())
    assert call_main(folder, prompt=["de"]) is None
    shown = sys.stdout.getvalue()
    assert shown == "\\x1b]0;title\\x07\t\n\\x9b\n"


def test_a_reader_who_has_enough_is_no_error(straight, monkeypatch, tmp_path, capfd):
    _, folder = straight()
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr("sys.stdout", Closed(file))
        assert call_main(folder, prompt=["de"]) is None
    assert "Broken" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more_flags", "message"),
    [
        ({"prompt": [""]}, "--prompt is empty: give text to continue"),
        ({"temperature": "-1"}, r"--temperature is -1.0; it must be .* at least 0"),
        ({"temperature": "nan"}, "--temperature is nan; it must be"),
        ({"temperature": "1e-41"}, "--temperature is 1e-41; it must be 0, .* at least"),
        ({"top_p": "0"}, "--top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": "1.5"}, "--top_p is 1.5; it must be above 0 and at most 1"),
        ({"top_k": "0"}, "--top_k is 0; it must be 1 or more"),
        ({"beams": "0"}, "--beams is 0; it must be 1 or more"),
        ({"flat_beams": "true"}, "--flat_beams without --beams: give their number"),
        ({"max_tokens": "0"}, "--max_tokens is 0; it must be 1 or more"),
        ({"beams": "2", "top_p": "0.5"}, "--beams and --top_p: .* leave out one or"),
        ({"temperature": "0", "top_k": "2"}, "--top_k with --temperature=0: nothing"),
        ({"beams": "265"}, "there are 265 beams, but the vocabulary has 264 tokens: t"),
        ({"step": "-1"}, "--step is -1; it must be 0 or more"),
        ({"seed": "-1"}, "--seed is -1; it must be 0 or more and below"),
        ({"seed": str(2**64)}, "--seed is 18446744073709551616; it must be 0 or more"),
        ({"prompt": ["\udcff"]}, "--prompt is no text in UTF-8 .*: give it in UTF-8"),
        ({"prompts_file": "x"}, "--prompt and --prompts_file: give one of them"),
        ({}, "there is no checkpoint in /none/checkpoints"),
        ({"prompt": ["a", "too long"]}, "--prompt 2 has 9 tokens, .* a cache of 8"),
        ({"output": "/proc/x"}, "--output=/proc/x cannot be written"),
    ],
)
def test_bad_flag(capfd, more_flags, message):
    assert call_main("/none", **{"prompt": ["a"], **more_flags}) == 1
    assert re.search(f"meshwright-generate: .*{message}", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n\n", "a.txt has no prompts: write one a line"),
        ("a.txt", b"a\n\xff", r"is no text in UTF-8 \(.* at byte 2\): save it"),
        ("a.jsonl", b"{", r'line 1 of \S+ is no JSON .*write {"prompt": "text"}'),
        ("a.jsonl", b'\n{"prompt": 5}', "line 2 of .* has no prompt: write"),
        ("a.jsonl", b'{"prompt": [true]}', "line 1 of .* has no prompt: write"),
        ("a.jsonl", b'{"prompt": [1, 999]}', "line 1 of .* has the id 999"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "line 1 of .* is no text in UTF-8"),
        ("a.jsonl", b'{"prompt": []}', "line 1 of .* is empty: give text"),
        ("missing", None, r"--prompts_file=\S+/missing cannot be read \(No such fi"),
    ],
)
def test_bad_file_of_prompts(tmp_path, capfd, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert call_main("/none", prompts_file=str(file)) == 1
    assert re.search(f"meshwright-generate: .*{message}", capfd.readouterr().err)


def test_a_task_that_continues_no_text_is_refused(capfd):
    files = ["rec/synthetic_ncf.gin"]
    assert call_main("/none", gin_files=files, gin_params=(), prompt=["a"]) == 1
    message = "Experiment.task is Recommendation, which does not continue text: gener"
    assert message in capfd.readouterr().err
