"""Whole runs of a small language model on this project's own sources, few programs.

Compiling is what takes time here, so tests share programs: `small_programs` are cached,
and `at` gives the same ones another length or interval.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from absl.testing import flagsaver
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)
from tensorboard.util import tensor_util

from meshwright.trainers.checkpoints.checkpoints import Access, Checkpoints
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.trainers.parity import DATA, small_experiment

ROOT = pathlib.Path(__file__).parents[2]
GIN_FILES = (
    str(DATA / "small_lm.gin"),
    "plans/finalized.gin",
    str(DATA / "small_adam.gin"),
)
GIN_PARAMS = (
    "NUM_LAYERS = 1",
    f"TextFiles.root = '{ROOT / 'framework'}'",
    "TextFiles.held_out_one_in = 4",
    "Experiment.num_steps = 20",
    "Experiment.checkpoint_interval = 5",
    "Experiment.keep_checkpoints = None",
    "Experiment.summary_interval = 5",
    "Experiment.eval_interval = 10",
    "Experiment.eval_batches = 2",
)


MESH = "MESH_SHAPE = (2, 4)"


def call_main(
    module: types.ModuleType,
    *params: str,
    gin_files: Sequence[str] = GIN_FILES,
    gin_params: Sequence[str] = GIN_PARAMS,
    **more_flags: Any,
) -> int | None:
    """Runs a command's main in this process, whose eight devices are in use.

    Returns:
      Its status.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS([module.NAME])
    with flagsaver.as_parsed(
        gin_file=list(gin_files),
        gin_param=[*gin_params, MESH, *params],
        **more_flags,
    ):
        return module.main([module.NAME])


def status_of(module: types.ModuleType, *params: str, **how: Any) -> int | None:
    """`call_main`, which says on standard error why it stopped."""
    try:
        return call_main(module, *params, **how)
    except SystemExit as stopped:
        print(stopped.code, file=sys.stderr)
        return 1


@functools.cache
def small_programs(*params: str, plan: str = "finalized") -> StepPrograms:
    """Programs for 20 steps, not compiled yet; checkpoints at 5, 10, 15, 20."""
    if not any(param.startswith("MESH_SHAPE") for param in params):
        params = (MESH, *params)
    return StepPrograms(small_experiment(*GIN_PARAMS, *params, plan=plan))


def at(programs: StepPrograms, **changes) -> StepPrograms:
    """`programs` under an experiment with `changes` that do not change them."""
    for name in ("init", "main", "eval", "finite"):
        getattr(programs, name)  # Compiled once, for all copies.
    other = copy.copy(programs)
    other.experiment = dataclasses.replace(programs.experiment, **changes)
    return other


@functools.cache
def five_steps_a_loop() -> StepPrograms:
    """The programs of `small_programs()` with `steps_per_loop` 5."""
    other = at(small_programs(), steps_per_loop=5)
    for name in ("main", "traced_main", "histograms"):
        vars(other).pop(name, None)
    return other


def train(programs: StepPrograms, folder, **changes) -> loop.TrainResult:
    """Trains in `folder`; `changes` as for `at`."""
    if changes:
        programs = at(programs, **changes)
    return loop.train_and_evaluate(programs, loop.Run(model_dir=str(folder)))


def saved_steps(folder) -> list[int]:
    with Checkpoints(f"{folder}/checkpoints", access=Access.READ) as checkpoints:
        return checkpoints.steps()


def saved_state(programs: StepPrograms, folder, step: int) -> dict[str, np.ndarray]:
    """The state in a checkpoint, by dotted path."""
    with Checkpoints(f"{folder}/checkpoints", access=Access.READ) as checkpoints:
        state = checkpoints.restore(step, TrainState.abstract(programs))
    return {path: np.asarray(leaf) for path, leaf in state.items_by_path()}


def points(folder, run: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard's server reads them.

    Texts are strings, pictures tuples of bytes.
    """
    events = EventAccumulator(f"{folder}/{run}")
    events.Reload()

    def value(event):
        item, *more = tensor_util.make_ndarray(event.tensor_proto).flatten()
        if more:
            return (item, *more)
        return item.decode() if isinstance(item, bytes) else float(item)

    return {
        tag: [(event.step, value(event)) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
