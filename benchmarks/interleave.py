"""Variants of a program, each in a process of its own, timed in turns.

A worker prints one JSON line when it is ready, then answers each number of calls on its
stdin with the seconds that they took. What else it or its libraries print goes to
stderr.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What each of some calls took in the mean, in seconds.

    Args:
      wall: on the clock.
      cpu: of all the process's threads, user and system.
    """

    wall: float
    cpu: float


def serve(make: Callable[[], tuple[dict[str, Any], Callable[[], Any]]]) -> None:
    """The worker's side, until stdin ends.

    Args:
      make: gives what to announce and the function to call; it returns when its work
        is done.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    announced, call = make()
    print(json.dumps(announced), file=answers)
    for line in sys.stdin:
        calls = int(line)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"wall": wall / calls, "cpu": cpu / calls}), file=answers)


class Worker:
    """A running variant; use it as a context, or the process stays.

    Args:
      name: for messages.
      command: starts a process that serves.
    """

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def announced(self) -> dict[str, Any]:
        """What the worker says of itself; waits until it is ready."""
        return self._answer()

    def turn(self, calls: int) -> Turn:
        """Runs the variant so many times."""
        print(calls, file=self._process.stdin, flush=True)
        return Turn(**self._answer())

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended:\n{self._log.read()[-2000:]}")
        return json.loads(line)


def take_turns(workers: Sequence[Worker], *, rounds: int, calls: int) -> list[list]:
    """Times all workers in `rounds` rounds, every second one in reverse order.

    Returns:
      For each worker its `Turn`s; those with the same index are from the same round,
      so that what else the machine does meets all of a round alike.
    """
    turns: list[list[Turn]] = [[] for _ in workers]
    for number in range(rounds):
        order = list(zip(workers, turns, strict=True))
        for worker, of_worker in reversed(order) if number % 2 else order:
            of_worker.append(worker.turn(calls))
    return turns
