"""A command whose process a compiler ends says so by one message."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from meshwright.trainers.processes import guarded

def main():
    with guarded.compiling():
        os.write(2, b"F0101 x.cc:1] Check failed: size == 2 (4 vs. 2)\\n@ frame\\n")
        if sys.argv[1] == "abort":
            os.abort()
        if sys.argv[1] == "ended":
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()
    print("done")
    if sys.argv[1] == "error":
        sys.exit("refused")
    return 3

sys.exit(guarded.call(main, "meshwright-plan", "take another mesh"))
"""


@pytest.mark.parametrize(
    ("how", "status", "out", "err"),
    [
        ("status", 3, "done\n", "frame\n"),
        ("error", 1, "done\n", "frame\nrefused\n"),
    ],
)
def test_a_command_that_ends_by_itself_is_as_without_its_parent(how, status, out, err):
    ran = _run(how)
    assert (ran.returncode, ran.stdout) == (status, out)
    assert ran.stderr.endswith(err)


def test_an_abort_is_a_message_with_the_check_and_without_frames():
    ran = _run("abort")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        "meshwright-plan: its process ended by SIGABRT (Check failed: size == 2 "
        "(4 vs. 2)): take another mesh\n"
    )


def test_a_command_that_somebody_ends_is_no_fault_of_a_compiler():
    ran = _run("ended")
    assert (ran.returncode, ran.stderr) == (-signal.SIGTERM, "")


def _run(how):
    command = [sys.executable, "-c", SCRIPT, how]
    return subprocess.run(command, capture_output=True, text=True, check=False)
