"""Kills a training again and again, and checks whether anything is lost.

    python benchmarks/chaos.py [--training=lm] [--kills=50] [--processes=1] [--steps=60]
        [--seed=0]

A small language model, or a Keras model with batch normalization and dropout, is
trained once undisturbed, by the command that users run. Then it is killed (SIGKILL) at
random moments: while it starts, between steps, or in the middle of a save, and started
again by the same command, as often as requested; a training that gets to its end makes
room for another. Of several processes one is killed, and the others have to end by
themselves and name it.

Each restart has to go on from the newest checkpoint, and each end has to have the
undisturbed run's state, bit by bit. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags

from meshwright.trainers import cli
from meshwright.trainers.experiment.bindings.outside_names import import_modules
from meshwright.trainers.startup import quiet

_TRAINING = flags.DEFINE_enum(
    "training", "lm", ["lm", "keras"], "The language model, or the Keras model."
)
_KILLS = flags.DEFINE_integer("kills", 50, "Number of kills.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer("processes", 1, "Of a training.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 60, "Of a training.", lower_bound=10)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the moments.")

_INTERVAL = 3
_PARAMS = (
    "Experiment.global_batch = 8",
    "Experiment.steps_per_loop = 1",
    "Experiment.eval_interval = 0",
    "Experiment.eval_batches = 2",
    f"Experiment.checkpoint_interval = {_INTERVAL}",
    "Experiment.keep_checkpoints = 3",
)
PHASES = ("starting", "in steps", "in a save")
_SHARES = (1, 2, 4)
_PATIENCE = 900.0
_TMP = "orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on four devices.

    Args:
      gin_file: its configuration.
      params: bindings that make it small.
      modules: that the gin file names.
    """

    gin_file: str
    params: tuple[str, ...]
    modules: tuple[str, ...] = ()


_EXAMPLES = pathlib.Path(__file__).parents[1] / "docs" / "examples"
TRAININGS = {
    "lm": Training(
        gin_file="lm/stdlib_tiny.gin",
        params=(
            "MESH_SHAPE = (2, 2)",
            "MODEL_DIMS = 32",
            "HIDDEN_DIMS = 64",
            "HEAD_DIM = 8",
            "NUM_LAYERS = 1",
            "SEQUENCE_LENGTH = 16",
        ),
    ),
    "keras": Training(
        gin_file=str(_EXAMPLES / "my_models.gin"),
        params=("ShardingPlan.mesh_shape = (2, 2)",),
        modules=("my_models",),
    ),
}


class ChaosError(RuntimeError):
    """Something was lost, or did not come back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations of an undisturbed training, in seconds.

    Args:
      start: time until the first step.
      steps: time from there to the end.
    """

    start: float
    steps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill.

    Args:
      phase: one of `PHASES`.
      kept: the newest checkpoint afterwards, 0 for none.
      in_save: whether a save was under way.
      seconds: time until the other processes had ended.
    """

    phase: str
    kept: int
    in_save: bool
    seconds: float


class Life:
    """One start of the training's processes.

    Args:
      folder: the training's `--model_dir`.
      log: a folder for their output.
    """

    def __init__(self, folder: pathlib.Path, log: pathlib.Path):
        log.mkdir(parents=True)
        self.folder = folder
        self.began = time.monotonic()
        self._has_begun = False
        count = _PROCESSES.value
        self.logs = [log / f"{number}.log" for number in range(count)]
        group = [f"--coordinator=127.0.0.1:{_free_port()}", f"--num_processes={count}"]
        group += ["--peer_timeout=120", "--start_timeout=60"]
        self.processes = [
            _start([*group, f"--process_id={n}"] if count > 1 else [], folder, log)
            for n, log in enumerate(self.logs)
        ]

    @property
    def is_running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    @property
    def has_begun(self) -> bool:
        """Whether the training has compiled its program and makes steps."""
        self._has_begun = self._has_begun or "compiled in" in self.logs[0].read_text()
        return self._has_begun

    @property
    def resumed_from(self) -> int:
        match = re.search(r"restoring step (\d+)", self.logs[0].read_text())
        return int(match[1]) if match else 0

    def wait_until(self, happens: Callable[[], bool]) -> bool:
        """Whether `happens` comes true before the processes end."""
        deadline = time.monotonic() + _PATIENCE
        while self.is_running:
            if happens():
                return True
            if time.monotonic() > deadline:
                raise ChaosError(f"nothing happens any more:\n{self.output()}")
            time.sleep(0.001)
        return False

    def kill(self, rng: random.Random) -> float:
        """Kills one process; returns the seconds until the others had ended."""
        victim = rng.randrange(len(self.processes))
        start = time.monotonic()
        self._kill(victim, alone=rng.random() < 0.5)
        for number, process in enumerate(self.processes):
            status = process.wait(_PATIENCE)
            output = self.logs[number].read_text()
            if number != victim and not _names(victim, status, output):
                raise ChaosError(
                    f"process {number} ended with {status} and did not name process "
                    f"{victim}, which was killed:\n{output[-2000:]}"
                )
        return time.monotonic() - start

    def _kill(self, victim: int, *, alone: bool) -> None:
        """Kills a process, or its training alone."""
        pid = str(self.processes[victim].pid)
        pgrep = subprocess.run(
            ["pgrep", "-P", pid], capture_output=True, text=True, check=False
        )
        children = [int(child) for child in pgrep.stdout.split()]
        if not alone or not children:
            os.killpg(int(pid), signal.SIGKILL)
        for child in children:
            # The child ends with its parent.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def wait(self) -> None:
        """Waits for the training to end well."""
        for process in self.processes:
            if process.wait(_PATIENCE) != 0:
                raise ChaosError(f"the training failed:\n{self.output()}")

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def output(self) -> str:
        return "\n".join(log.read_text()[-2000:] for log in self.logs)


def _names(victim: int, status: int, output: str) -> bool:
    """Whether a process that ended with `status` names the victim."""
    from meshwright.trainers.processes.peers import LOST

    if status == LOST:
        last = output[max(output.rfind("lost a peer"), output.rfind("a peer failed")) :]
        return f"process {victim}" in last
    # The processes had not come together yet.
    waited = f"within the start timeout: {victim}" in output
    return status == 1 and (waited or (victim == 0 and "process 0" in output))


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    # Imported here, so that wrong flags are told at once.
    with quiet.importing_tensorflow():
        from meshwright import framework as mw

    mw.set_platform("cpu", 4)
    sys.path.append(str(_EXAMPLES))
    import_modules(_training().modules)
    rng = random.Random(_SEED.value)
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        scratch = pathlib.Path(name)
        timing, want = _undisturbed(scratch)
        print(
            f"undisturbed: {_STEPS.value} steps, {timing.start:.1f} s until the first "
            f"and {timing.steps:.1f} s from there on",
            flush=True,
        )
        try:
            kills, ends = _disturbed(scratch, timing, want, rng)
        except ChaosError as error:
            print(f"LOST: {error}", file=sys.stderr)
            return 1
    _print_table(kills, ends)
    return 0


def _undisturbed(scratch: pathlib.Path) -> tuple[Timing, dict[str, np.ndarray]]:
    life = Life(scratch / "undisturbed", scratch / "logs" / "undisturbed")
    try:
        life.wait_until(lambda: life.has_begun)
        begun = time.monotonic()
        life.wait()
    finally:
        life.end()
    timing = Timing(start=begun - life.began, steps=time.monotonic() - begun)
    return timing, _weights(life.folder)


def _disturbed(
    scratch: pathlib.Path, timing: Timing, want: dict[str, np.ndarray], rng
) -> tuple[list[Kill], int]:
    """The kills, and the number of trainings that came to their end."""
    kills: list[Kill] = []
    ends = lives = 0
    while len(kills) < _KILLS.value or ends == 0:
        folder = scratch / f"training_{ends}"
        before = _newest(folder)
        life = Life(folder, scratch / "logs" / str(lives))
        lives += 1
        try:
            killed = None
            if len(kills) < _KILLS.value:
                killed = _killed(life, timing, rng)
            if killed is None:
                life.wait()
        finally:
            life.end()
        if life.has_begun and life.resumed_from != before:
            raise ChaosError(
                f"the newest checkpoint was {before}, but it went on from "
                f"{life.resumed_from}:\n{life.output()}"
            )
        if killed is not None:
            kills.append(killed)
            print(f"kill {len(kills)} {killed}", flush=True)
        else:
            _compare(_weights(folder), want)
            ends += 1
    return kills, ends


def _killed(life: Life, timing: Timing, rng: random.Random) -> Kill | None:
    """Kills at a random moment; None if the training ends before that."""
    (phase,) = rng.choices(PHASES, _SHARES)
    if phase == "starting":
        has_come = _passes(life, rng.uniform(0, timing.start))
    else:
        # It comes after some saves, so that trainings get on however slow the machine
        # is.
        step = _newest(life.folder) + rng.randrange(4) * _INTERVAL
        has_come = life.wait_until(lambda: life.has_begun)
        has_come = has_come and life.wait_until(lambda: _newest(life.folder) >= step)
        has_come = has_come and _passes(life, rng.uniform(0, timing.steps / 20))
    if has_come and phase == "in a save":
        has_come = life.wait_until(lambda: _is_saving(life.folder))
        time.sleep(rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.2))))
    if not has_come or not life.is_running:
        return None
    seconds = life.kill(rng)
    return Kill(
        phase=phase,
        kept=_newest(life.folder),
        # Before the training begins, the leftovers of an earlier kill are still there.
        in_save=life.has_begun and _is_saving(life.folder),
        seconds=seconds,
    )


def _passes(life: Life, seconds: float) -> bool:
    """Whether the processes run for `seconds` longer."""
    moment = time.monotonic() + seconds
    return life.wait_until(lambda: time.monotonic() > moment)


def _is_saving(folder: pathlib.Path) -> bool:
    """Whether a checkpoint exists under its temporary name."""
    try:
        return any(_TMP in name for name in os.listdir(folder / "checkpoints"))
    except FileNotFoundError:
        return False


def _newest(folder: pathlib.Path) -> int:
    try:
        names = os.listdir(folder / "checkpoints")
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    from meshwright.trainers.checkpoints.checkpoints import Access, Checkpoints
    from meshwright.trainers.experiment.state import TrainState
    from meshwright.trainers.experiment.step_programs import StepPrograms

    experiment, _ = cli.build_experiment([_training().gin_file], _params())
    abstract = TrainState.abstract(StepPrograms(experiment))
    with Checkpoints(folder / "checkpoints", access=Access.READ) as checkpoints:
        state = checkpoints.restore(_STEPS.value, abstract)
    return {path: np.asarray(leaf) for path, leaf in state.items_by_path()}


def _compare(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    differ = [path for path in want if not np.array_equal(got[path], want[path])]
    if differ:
        raise ChaosError(
            f"{len(differ)} of {len(want)} parts of the state differ from the "
            f"undisturbed run's, among them {differ[0]}"
        )


def _training() -> Training:
    return TRAININGS[_TRAINING.value]


def _params() -> list[str]:
    return [*_PARAMS, *_training().params, f"Experiment.num_steps = {_STEPS.value}"]


def _start(group: list[str], folder, log) -> subprocess.Popen:
    command = [
        pathlib.Path(sys.executable).parent / "meshwright-train",
        *(f"--import={module}" for module in _training().modules),
        f"--gin_file={_training().gin_file}",
        *(f"--gin_param={param}" for param in _params()),
        f"--model_dir={folder}",
        "--mode=train",
        *group,
    ]
    with open(log, "w") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=_EXAMPLES,
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _print_table(kills: list[Kill], ends: int) -> None:
    phases = collections.defaultdict(list)
    for kill in kills:
        phases[kill.phase].append(kill)
    print("\n| killed | times | a save was cut off | longest until the others ended |")
    print("|---|---|---|---|")
    for phase in PHASES:
        of_phase = phases[phase]
        cut = sum(kill.in_save for kill in of_phase)
        longest = max((kill.seconds for kill in of_phase), default=0.0)
        print(f"| {phase} | {len(of_phase)} | {cut} | {longest:.1f} s |")
    print(
        f"\n{len(kills)} kills, {ends} trainings came to their end; every restart went "
        "on from the newest checkpoint, all final states are bit-equal to the "
        "undisturbed run's"
    )


if __name__ == "__main__":
    app.run(main)
