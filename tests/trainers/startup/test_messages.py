"""What the binaries print of errors cannot write to a terminal, nor fill it."""

import pytest
from absl import flags
from absl.testing import flagsaver

from meshwright.trainers import cli
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
