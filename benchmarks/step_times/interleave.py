"""Variants of a training program, each in a process of its own, timed in turns.

A worker prints one JSON line when it is ready, then answers each number of steps on its
stdin with the seconds that they took. Other output of it or its libraries goes to
stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_CLOCKS = ("cpu", "wall")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a worker serves.

    Args:
      facts: facts to report about it; JSON.
      call: runs some steps and returns when they are done.
      steps: the number of these steps.
    """

    facts: dict[str, Any]
    call: Callable[[], Any]
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """Seconds per step, the mean of some steps.

    Args:
      wall: seconds by the clock.
      cpu: seconds of all the process's threads, user and system.
      faults: pages a step that the process touched and did not have (`getrusage`).
    """

    wall: float
    cpu: float
    faults: float = 0.0


def serve(make: Callable[[], Served]) -> None:
    """The worker's side: calls `make`, and serves its result until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    served = make()
    print(json.dumps(served.facts), file=answers)
    for line in sys.stdin:
        calls = math.ceil(int(line) / served.steps)
        wall, cpu, faults = time.perf_counter(), time.process_time(), _faults()
        for _ in range(calls):
            served.call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sums = {"wall": wall, "cpu": cpu, "faults": _faults() - faults}
        steps = calls * served.steps
        means = {name: total / steps for name, total in sums.items()}
        print(json.dumps(means), file=answers)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Worker:
    """A running variant; as a context it ends the process.

    Args:
      name: the worker's name, for messages.
      command: the command of a process that serves.
      environment: variables that it has beside this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (see __exit__)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | dict(environment or {}),
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def facts(self) -> dict[str, Any]:
        """The worker's facts, once it is ready; to be called first, and once."""
        return self._answer()

    def turn(self, steps: int) -> Turn:
        """Runs `steps` steps, rounded up to full calls.

        Raises:
          RuntimeError: the worker ended; the message has its last lines.
        """
        with contextlib.suppress(BrokenPipeError):
            print(steps, file=self._process.stdin, flush=True)
        return Turn(**self._answer())

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = "".join(self._log.readlines()[-20:])
            raise RuntimeError(f"worker {self.name!r} ended:\n{last}")
        return json.loads(line)


def take_turns(
    workers: Sequence[Worker], *, rounds: int, steps: int
) -> list[list[Turn]]:
    """Times all workers round after round, every second round in reverse order.

    Returns:
      The turns of each worker. Turns of the same index are from the same round, so that
      other load of the machine meets them alike.
    """
    turns: list[list[Turn]] = [[] for _ in workers]
    pairs = list(zip(workers, turns, strict=True))
    for number in range(rounds):
        for worker, own_turns in reversed(pairs) if number % 2 else pairs:
            own_turns.append(worker.turn(steps))
    return turns


def medians(turns: Sequence[Turn]) -> list[float]:
    """The median CPU and wall seconds of a step."""
    return [
        statistics.median(getattr(turn, clock) for turn in turns) for clock in _CLOCKS
    ]


def median_ratios(turns: Sequence[Turn], others: Sequence[Turn]) -> list[float]:
    """The median ratios of two programs' turns of the same round, CPU and wall."""
    pairs = [*zip(turns, others, strict=True)]
    return [
        statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)
        for clock in _CLOCKS
    ]


def table_row(
    label: str, turns: Sequence[Turn], first: Sequence[Turn] | None = None
) -> str:
    """A program's row: its median seconds, and the first program's over its own.

    Args:
      label: what the row begins with.
      turns: the program's.
      first: those of the program that it is compared with; None for no ratios.
    """
    cells = [label, *(f"{seconds:7.4f}" for seconds in medians(turns))]
    if first is not None:
        cells += [f"{ratio:7.2f}" for ratio in median_ratios(first, turns)]
    return "  ".join(cells)


def conditions(versions: Mapping[str, str], rounds: int) -> str:
    """A line with versions, cores and rounds, which stands above a table."""
    versions = {"Python": platform.python_version(), **versions}
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{names}; {os.cpu_count()} cores; {rounds} rounds"


def loss_difference(losses: Mapping[str, Sequence[float]], tolerance: float) -> float:
    """The largest relative difference between the first program's losses and another's.

    Args:
      losses: losses of the same steps, by the program's name for messages.
      tolerance: the largest relative difference.

    Raises:
      ValueError: a difference is above it, or NaN; the message names program and step.
    """
    (first, wanted), *rest = losses.items()
    largest = 0.0
    for name, values in rest:
        for step, (loss, want) in enumerate(zip(values, wanted, strict=True)):
            difference = abs(loss / want - 1.0)
            if not difference <= tolerance:
                raise ValueError(
                    f"{name} does not train as {first} does: loss {loss} against "
                    f"{want} at step {step}; the programs do not train alike, and the "
                    "times of different maths are not comparable"
                )
            largest = max(largest, difference)
    return largest
