"""Whole runs of a small language model on this project's own sources, few programs.

Compiling is what takes time here, so tests share programs: `small_programs` are cached,
and `at` gives the same ones another length or interval.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib

import numpy as np
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


@functools.cache
def small_programs(*params: str, plan: str = "finalized") -> StepPrograms:
    """Programs for 20 steps, not compiled yet; checkpoints at 5, 10, 15, 20."""
    if not any(param.startswith("MESH_SHAPE") for param in params):
        params = ("MESH_SHAPE = (2, 4)", *params)
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
