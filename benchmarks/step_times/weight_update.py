"""Step time and memory with weight updates sharded or not, on virtual CPU devices.

    python benchmarks/step_times/weight_update.py [--models=resnet,transformer,ncf]
      [--modes=all,auto] [--rounds=9] [--steps=N]

Data parallelism over eight devices, of small models whose update is a large part of a
step: few examples and many weights, LARS or Adam. The programs of a model differ in
`Experiment.weight_update_sharding` alone, start from the same weights and train on the
same random batches; programs that do not train alike are not compared. They take turns,
as in `step_time.py`. A ratio is a mode's time over that of "off" in the same round;
times and ratios are medians over rounds. On a busy machine trust CPU seconds more.

Megabytes are of a device: arguments and peak as compiled, beside the peak that
weight-update sharding 4.2 promises: max(W + V/N + P, W + V) instead of W + V + P, where
W is the size of weights, V that of the optimizer's slots, N the number of devices, and
P the rest of the peak of "off" beyond W + V.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import app, flags
from interleave import Turn, loss_difference, take_turns

from meshwright import framework as mw
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms

DEVICES = 8
OFF, MODES = "off", ("all", "auto")
CHECKED_STEPS = 4
LOSS_TOLERANCE = 1e-4  # Relative.


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_list("models", ["resnet", "transformer", "ncf"], "Models to train.")
    flags.DEFINE_list("modes", [*MODES], 'Modes to compare with "off".')
    flags.DEFINE_integer("rounds", 9, "Turns of each program.", lower_bound=1)
    flags.DEFINE_integer("steps", None, "Steps of a turn.", lower_bound=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train.

    Args:
      gin_files: gin files of its experiment.
      bindings: bindings that override these.
      below: upper bounds of a batch's integers, by name; others are 0.
      steps: steps of a turn, enough for a second.
    """

    gin_files: Sequence[str]
    bindings: Sequence[str]
    below: Mapping[str, int]
    steps: int


MODELS = {
    "resnet": Model(
        gin_files=("image/synthetic_resnet.gin",),
        bindings=(
            "IMAGE_SIZE = 32",
            "ResNet.widths = (64, 128, 256)",
            "Experiment.global_batch = 8",
        ),
        below={"image": 256, "label": 8},
        steps=4,
    ),
    "transformer": Model(
        gin_files=("lm/stdlib_tiny.gin", "plans/data.gin"),
        bindings=(
            "MODEL_DIMS = 256",
            "HIDDEN_DIMS = 1024",
            "HEAD_DIM = 64",
            "SEQUENCE_LENGTH = 16",
            "Experiment.global_batch = 8",
        ),
        below={"ids": 264, "labels": 264, "segment_ids": 2, "segment_positions": 16},
        steps=4,
    ),
    "ncf": Model(
        gin_files=("rec/synthetic_ncf.gin",),
        bindings=(
            "USERS = 60000",
            "ITEMS = 15000",
            "Experiment.global_batch = 1024",
        ),
        below={"user": 60000, "item": 15000},
        steps=4,
    ),
    # For the test of this file.
    "smallest": Model(
        gin_files=("rec/synthetic_ncf.gin",),
        bindings=(
            "USERS = 4096",
            "ITEMS = 2048",
            "NeuMF.factors = 8",
            "NeuMF.mlp_dims = (16, 8)",
            "Experiment.global_batch = 16",
        ),
        below={"user": 4096, "item": 2048},
        steps=1,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory in bytes.

    Args:
      weights: the model's weights, unsharded.
      slots: its optimizer's slots, unsharded.
      arguments: state and batch on a device.
      peak: the peak on a device.
    """

    weights: int
    slots: int
    arguments: int
    peak: int

    @property
    def beyond(self) -> int:
        """P, if this is of "off"."""
        return self.peak - self.weights - self.slots

    def promised(self) -> int:
        """The peak of a device by the paper's formula, if this is of "off"."""
        sharded = self.weights + self.slots // DEVICES + self.beyond
        return max(sharded, self.weights + self.slots)


class Trainer:
    """Trains a model on random batches.

    Args:
      model: the model to train.
      mode: the mode of weight-update sharding.
      start: the state before step 0 as host arrays; by default the model's own.
    """

    def __init__(self, model: Model, mode: str, start: NestedMap | None = None):
        bindings = [
            *model.bindings,
            f"MESH_SHAPE = ({DEVICES},)",
            "Experiment.steps_per_loop = 1",
            f"Experiment.weight_update_sharding = '{mode}'",
        ]
        experiment, _ = build_experiment(list(model.gin_files), bindings)
        self._programs = StepPrograms(experiment)
        self.start = start or _initial_state(self._programs)
        self._state = TrainState(self._programs, self.start)
        self._batches = random_batches(self._programs, model.below)
        self.losses = [self.step() for _ in range(CHECKED_STEPS)]

    def step(self) -> float:
        """Makes one more step; returns its loss."""
        out = self._programs.main(self._state.stored(), self._batches)
        self._state.update(out["state"])
        return np.asarray(out["metrics"].loss).item()

    def turn(self, steps: int) -> Turn:
        """Times some steps."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Turn(wall=wall / steps, cpu=cpu / steps)

    def memory(self) -> Memory:
        """The memory that the step takes."""
        specs = self._programs.state_specs
        usage = self._programs.main.memory()
        return Memory(
            weights=_bytes(specs.theta),
            slots=_bytes(specs.slots),
            arguments=usage.arguments,
            peak=usage.peak,
        )


def _initial_state(programs: StepPrograms) -> NestedMap:
    return programs.init.unshard(programs.init(programs.seed()))


def _bytes(specs: NestedMap) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.size for spec in specs.leaves())


def random_batches(programs: StepPrograms, below: Mapping[str, int]) -> NestedMap:
    """Batches of one call: integers below `Model.below`, floats in [0, 1)."""
    random = np.random.default_rng(0)

    def draw(path: str, spec: tf.TensorSpec) -> np.ndarray:
        kind = spec.dtype.as_numpy_dtype
        if spec.dtype.is_integer:
            return random.integers(below.get(path, 1), size=spec.shape, dtype=kind)
        return random.random(spec.shape, dtype=kind)

    return programs.abstract_batches().map_with_path(draw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The measurements of a mode.

    Args:
      turns: turns by round.
      memory: memory of its program.
    """

    turns: Sequence[Turn]
    memory: Memory


def compare(
    model: Model, modes: Sequence[str], rounds: int, steps: int | None
) -> dict[str, Found]:
    """Trains a model in some modes, in turns; returns measurements, "off" first.

    Raises:
      ValueError: the losses differ.
    """
    trainers = {OFF: Trainer(model, OFF)}
    for mode in modes:
        trainers[mode] = Trainer(model, mode, trainers[OFF].start)
        check_losses(mode, trainers[mode].losses, trainers[OFF].losses)
    turns = take_turns([*trainers.values()], rounds=rounds, steps=steps or model.steps)
    return {
        mode: Found(turns=mode_turns, memory=trainer.memory())
        for (mode, trainer), mode_turns in zip(trainers.items(), turns, strict=True)
    }


def check_losses(mode: str, losses: Sequence[float], off: Sequence[float]) -> None:
    """Checks that a mode trains as "off" does.

    Raises:
      ValueError: it does not; the message names the mode and the step.
    """
    loss_difference({'"off"': off, f'"{mode}"': losses}, LOSS_TOLERANCE)


HEADER = f"""\
{"":18}{"seconds a step":^17} {"mode / off":^14} {"MB a device":^27}
{"model":12}{"mode":6}{"CPU":>8} {"wall":>8} {"CPU":>6} {"wall":>7} \
{"arguments":>10} {"peak":>7} {"formula":>8}
{"-" * 77}"""


def table_rows(name: str, by_mode: Mapping[str, Found]) -> list[str]:
    """The lines below `HEADER` for one model."""
    off, rows = by_mode[OFF], []
    for mode, result in by_mode.items():
        cells = [f"{name if mode == OFF else '':12}{mode:6}"]
        seconds = {
            clock: statistics.median(getattr(turn, clock) for turn in result.turns)
            for clock in ("cpu", "wall")
        }
        cells[0] += f"{seconds['cpu']:8.4f}"
        cells.append(f"{seconds['wall']:8.4f}")
        for clock, width in (("cpu", 6), ("wall", 7)):
            shown = "" if mode == OFF else f"{_ratio(result, off, clock):.2f}"
            cells.append(f"{shown:>{width}}")
        formula = off.memory.peak if mode == OFF else off.memory.promised()
        cells.append(f"{result.memory.arguments / 1e6:10.1f}")
        cells.append(f"{result.memory.peak / 1e6:7.1f} {formula / 1e6:8.1f}")
        rows.append(" ".join(cells))
    return [*rows, f"  MB: {sizes(off.memory)}"]


def _ratio(result: Found, off: Found, clock: str) -> float:
    pairs = zip(result.turns, off.turns, strict=True)
    return statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)


def sizes(off: Memory) -> str:
    """W, V and P of a model."""
    parts = {"W": off.weights, "V": off.slots, "P": off.beyond}
    return ", ".join(f"{name} {size / 1e6:.1f}" for name, size in parts.items())


def check_known(flag: str, names: Sequence[str], known: Collection[str]) -> None:
    """Checks that a flag has known names only.

    Raises:
      ValueError: a name is unknown; the message has the flag and the known names.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--{flag}: {unknown[0]!r} is none of {', '.join(known)}")


def main(argv: Sequence[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    options = flags.FLAGS
    try:
        check_known("models", options.models, MODELS)
        check_known("modes", options.modes, MODES)
        mw.set_platform("cpu", DEVICES)
        print(f"{DEVICES} devices on {os.cpu_count()} cores; {options.rounds} rounds")
        print(HEADER, flush=True)
        for name in options.models:
            by_mode = compare(
                MODELS[name], options.modes, options.rounds, options.steps
            )
            print(*table_rows(name, by_mode), sep="\n", flush=True)
    except ValueError as error:
        sys.exit(f"weight_update.py: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
