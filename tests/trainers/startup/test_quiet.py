"""Lines that are not ours are kept from the terminal, and nothing else is."""

import subprocess
import sys

import pytest

NOTES = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to "
    "STDERR",
    "I0000 00:00:1795506694.210274    1566 cudart_stub.cc:31] Could not find cuda "
    "drivers on your machine, GPU will not be used.",
    "E0000 00:00:1795506705.842194    1566 cuda_platform.cc:52] failed call to cuInit: "
    "INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)",
    "I0000 00:00:1795506705.842194    1566 port.cc:153] oneDNN custom operations are "
    "on. You may see slightly different numerical results due to floating-point "
    "round-off errors from different computation orders. To turn them off, set the "
    "environment variable `TF_ENABLE_ONEDNN_OPTS=0`.",
    "I0000 00:00:1795507404.818134   21723 cpu_feature_guard.cc:227] This TensorFlow "
    "binary is optimized to use available CPU instructions in performance-critical "
    "operations.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild "
    "TensorFlow with the appropriate compiler flags.",
)
WRITE = """
import os, sys
from meshwright.trainers.startup import quiet

print("before", file=sys.stderr)
with quiet._filtered():
    print("by Python", file=sys.stderr)
    os.write(2, sys.argv[1].encode())
    {then}
print("after", file=sys.stderr)
"""
IMPORT = """
import sys
from meshwright.trainers.startup import quiet

with quiet.importing_tensorflow():
    from meshwright.trainers.training import loop
quiet.look_for_devices()
assert "keras" not in sys.modules and "matplotlib" not in sys.modules
from tensorflow.keras import layers
print(layers.Dense.__name__)
"""


def run(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


BROKEN = "E0000 libfoo is broken\n"


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("", ""),
        ("\n".join((*NOTES, "")), ""),
        (f"{NOTES[0]}\n{BROKEN}{NOTES[1]}\n", BROKEN),
        (f"cut off: {NOTES[0]}\n", f"cut off: {NOTES[0]}\n"),
        ("no end", "no end"),
    ],
    ids=["nothing", "known", "unknown", "in a line", "no end"],
)
def test_what_is_not_known_is_passed_on(text, passed):
    done = run(WRITE.format(then=""), text)
    assert done.returncode == 0
    assert done.stderr == f"before\nby Python\n{passed}after\n"


def test_a_text_may_be_longer_than_a_pipe():
    done = run(WRITE.format(then="os.write(2, b'x' * 200_000)"), BROKEN)
    assert done.stderr == f"before\nby Python\n{BROKEN}{'x' * 200_000}after\n"


def test_last_words_are_not_lost():
    """As of a TF that is built for another processor."""
    done = run(WRITE.format(then="os.abort()"), "F0000 this CPU lacks AVX2\n")
    assert done.returncode != 0
    assert done.stderr == "before\nby Python\nF0000 this CPU lacks AVX2\n"


def test_stderr_may_be_closed():
    code = "import os; os.close(2)\n" + IMPORT
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Dense\n", "")


def test_tensorflow_is_imported_without_a_word():
    done = run(IMPORT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Dense\n", "")
