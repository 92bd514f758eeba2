"""What a signal ends at once, and what it leaves for later."""

import contextlib
import os
import signal
import sys
import threading
import time
from unittest import mock

import pytest

from meshwright.trainers import cli
from meshwright.trainers.training import program_report, training_main
from meshwright.trainers.training.program_report import ProgramWriter
from meshwright.trainers.training.stop_signals import StopRequest, stop_on_signals


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_at_once_until_the_first_step(signum, capfd):
    before = signal.getsignal(signum)
    left, has_left = [], threading.Event()

    def leave(number):
        left.append((number, threading.current_thread() is threading.main_thread()))
        has_left.set()

    with stop_on_signals(None, leave) as stop:
        signal.raise_signal(signum)
        assert has_left.wait(10)
        stop.leave = stop.received = None
        signal.raise_signal(signum)
        assert stop.reached()
    assert left == [(signum, False)]
    assert "stopping with nothing to save" in capfd.readouterr().err
    assert signal.getsignal(signum) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_leaves_a_process_without_standard_output(monkeypatch):
    statuses = []
    monkeypatch.setattr(sys, "__stdout__", None)
    monkeypatch.setattr(os, "_exit", statuses.append)
    with contextlib.suppress(AttributeError):
        training_main._leave(signal.SIGINT)
    assert statuses == [cli.INTERRUPTED]


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_signal_to_a_forked_child_does_not_end_its_parent():
    left = []
    with stop_on_signals(None, left.append) as stop:
        if (child := os.fork()) == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
        assert left == [] and stop.received is None


def test_one_of_several_processes_does_not_leave_the_others():
    assert StopRequest(peers=object(), leave=print).leave is None


def test_a_stop_abandons_the_page_of_the_program(tmp_path, monkeypatch, capfd):
    begun = threading.Event()

    def report_of(*args, **kwargs):
        begun.set()
        while True:
            pass

    monkeypatch.setattr(program_report, "report_of", report_of)
    monkeypatch.setattr(program_report, "digest_of", lambda *a: "")
    stop = StopRequest()
    writer = ProgramWriter(str(tmp_path), "", stop)
    writer.start(mock.Mock(), 0.0)
    assert begun.wait(10)
    stop.received = signal.SIGTERM
    start = time.monotonic()
    writer.close()
    assert time.monotonic() - start < 10
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(
    sys.gettrace() is not None,
    reason="traced, Python 3.11 hangs while another thread has an exception to raise",
)
def test_saving_waits_little_for_the_page(tmp_path, monkeypatch):
    """XLA at work for the page cannot be interrupted, and a grace is short."""
    done = threading.Event()
    monkeypatch.setattr(program_report, "report_of", lambda *a, **k: done.wait(10))
    monkeypatch.setattr(program_report, "digest_of", lambda *a: "")
    stop = StopRequest()
    writer = ProgramWriter(str(tmp_path), "", stop)
    writer.start(mock.Mock(), 0.0)
    stop.received = signal.SIGTERM
    start = time.monotonic()
    writer.close(0.5)
    assert time.monotonic() - start < 3
    done.set()
    writer.close()
