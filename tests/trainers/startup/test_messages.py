"""What the binaries print: errors cannot write to a terminal, nor fill it; progress."""

import logging
import os
import re
import threading
import time

import pytest
import tqdm
from absl import flags
from absl.testing import flagsaver

from meshwright.trainers import cli
from meshwright.trainers.startup import messages
from meshwright.trainers.startup.messages import printable


def test_what_does_not_print_is_escaped():
    text = "a.tsv:3 names '\x1b[2J\x00\u202e\ud800', naïve 日本\nsee there"
    message = "a.tsv:3 names '\\x1b[2J\\x00\\u202e\\ud800', naïve 日本\nsee there"
    assert printable(text) == message


def test_what_is_long_is_cut():
    text = printable("x" * 10**6)
    assert text == "x" * 5000 + "... (1000000 characters)"


def test_an_error_is_told_so():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["meshwright"])
    given = {"gin_file": ["lm/stdlib_tiny"], "gin_param": ["\x1b[2J = 1"]}
    with flagsaver.flagsaver(**given), pytest.raises(SystemExit) as stopped:
        cli.call("meshwright", ["meshwright"], lambda: cli.Command(run=lambda *_: None))
    assert "    \\x1b[2J = 1\n" in stopped.value.code


def test_long_lines_of_a_log_are_folded_on_a_terminal(monkeypatch):
    text = "a name " + "x" * 90 + "\n  and words" * 2 + " of a long line" * 5
    record = logging.LogRecord("absl", logging.INFO, "", 0, "%s", (text,), None)
    monkeypatch.setattr(messages, "is_live", lambda: False)
    assert messages.LogFormat().format(record).endswith(f" INFO {text}")
    monkeypatch.setattr(messages, "is_live", lambda: True)
    first, *others = messages.LogFormat().format(record).splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO a name", first)
    assert others[:3] == [f"    {'x' * 90}", "  and words", others[2]]
    assert others[2].startswith("  and words of") and others[3].startswith("    ")
    assert max(map(len, others[1:])) <= 80
    assert " ".join(part.strip() for part in others[2:]) == text.splitlines()[2].strip()


def test_progress_in_a_log_file_is_a_line_now_and_then(monkeypatch, caplog, capfd):
    monkeypatch.setattr(messages, "is_live", lambda: False)
    caplog.set_level("INFO", logger="absl")
    now = [0.0]
    monkeypatch.setattr(messages.tqdm.tqdm, "monitor_interval", 0)
    with messages.progress_bar(100, "training") as bar:
        bar._time = lambda: now[0]
        bar.start_t = bar.last_print_t = 0.0
        for step in range(1, 101):
            now[0] = float(step)
            bar.set_postfix_str(f"loss={step}", refresh=False)
            bar.update()
        bar.refresh()  # As at its end, if it was shown just before.
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "training: 15 of 100, 00:15 so far, 01:25 to go, loss=15"
    assert lines[-1] == "training: 100 of 100, 01:40 so far, 00:00 to go, loss=100"
    assert len(lines) == 7
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("level", ["INFO", "WARNING", "ERROR"])
def test_what_takes_long_is_told_again(level, monkeypatch, caplog, capfd):
    """In the log, or on stderr where it shows warnings alone."""
    monkeypatch.setattr(messages, "is_live", lambda: False)
    monkeypatch.setattr(messages, "_AGAIN_SECONDS", 0.02)
    caplog.set_level(level, logger="absl")
    with messages.told_bar(3, "compiling") as bar:
        bar.update()
        bar.set_postfix_str("data", refresh=False)
        time.sleep(1.2)  # Its clock has seconds: each is another line.
    logged = [record.getMessage() for record in caplog.records]
    printed = capfd.readouterr().err.splitlines()
    assert not printed if level != "WARNING" else not logged
    told = {"INFO": logged, "WARNING": printed, "ERROR": [*logged, *printed]}[level]
    while_it_waits = [line for line in told if "1 of 3" in line and ", data" in line]
    assert len(while_it_waits) >= 2 if level != "ERROR" else not told
    assert not [t for t in threading.enumerate() if t.name == "compiling"]


@pytest.mark.parametrize("size", [(0, 0), (80, 24)])
def test_on_a_terminal_there_is_a_bar(size, monkeypatch, caplog, capfd):
    monkeypatch.setattr(messages, "is_live", lambda: True)
    size = os.terminal_size(size)
    monkeypatch.setattr(messages.os, "get_terminal_size", lambda _: size)
    monkeypatch.setattr(tqdm.std, "_screen_shape_wrapper", lambda: lambda _: size)
    caplog.set_level("INFO", logger="absl")
    with messages.progress_bar(100, "training") as bar:
        bar.update(100)
    assert "training |" in capfd.readouterr().err
    assert not caplog.records
