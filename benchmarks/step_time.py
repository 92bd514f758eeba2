"""Step times of Meshwright, of hand-written JAX and of TF's own compiler, in turns.

    python benchmarks/step_time.py [--rounds=6] [--steps=10] [--settings=tiny,large]
      [--meshes=1x1,2x1,2x4]

Every program trains the language model of `lm/stdlib_tiny.gin` in a process of its own:
the same maths, initial weights, tokens and shardings, as many steps in a compiled call,
the state donated. `reference_jax.py` is the JAX one, twice: its layers in a `lax.scan`,
as Meshwright's are in a loop, and one after another. TF runs on one device only.

The programs of a mesh take turns, so that what else the machine does meets them alike.
A ratio is Meshwright's time over another program's in the same round, and the table has
medians over rounds: below 1 Meshwright is faster. On a shared machine trust CPU seconds
more than the clock. Nothing is printed if the programs do not train alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Sequence

import interleave
from absl import app, flags
from interleave import Turn

VARIANTS = pathlib.Path(__file__).with_name("variants.py")
LABELS = {
    "meshwright": "Meshwright",
    "jax_scan": "JAX, scan",
    "jax_unrolled": "JAX, unrolled",
    "tf_jit": "TF jit_compile",
}
"""Variants and what the table calls them."""
CHECKED_STEPS = 4
LOSS_TOLERANCE = 1e-4  # relative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A size of the model.

    Args:
      bindings: over those of `lm/stdlib_tiny.gin`.
      steps: default length of a turn: seconds, not milliseconds.
    """

    bindings: Sequence[str]
    steps: int


SETTINGS = {
    "tiny": Setting(bindings=(), steps=10),
    # A second a step on one device over two cores.
    "large": Setting(
        bindings=(
            "MODEL_DIMS = 512",
            "HIDDEN_DIMS = 2048",
            "NUM_HEADS = 8",
            "HEAD_DIM = 64",
            "NUM_LAYERS = 6",
            "Experiment.global_batch = 8",
            "Experiment.steps_per_loop = 1",
        ),
        steps=1,
    ),
    # For the test of this file.
    "smallest": Setting(
        bindings=(
            "MODEL_DIMS = 16",
            "HIDDEN_DIMS = 32",
            "NUM_HEADS = 2",
            "HEAD_DIM = 8",
            "NUM_LAYERS = 2",
            "SEQUENCE_LENGTH = 16",
            "Experiment.global_batch = 4",
            "Experiment.steps_per_loop = 2",
        ),
        steps=2,
    ),
}

_ROUNDS = flags.DEFINE_integer("rounds", 6, "Turns of each program.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Steps of a turn, made up to whole calls; default: by setting.", 1
)
_SETTINGS = flags.DEFINE_multi_enum(
    "settings", ["tiny", "large"], list(SETTINGS), "Sizes of the model."
)
_MESHES = flags.DEFINE_list("meshes", ["1x1", "2x1", "2x4"], "Device meshes XxY.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The turns of one variant, in seconds a step.

    Args:
      setting: name.
      mesh: such as "2x4".
      variant: name.
      turns: by round.
    """

    setting: str
    mesh: str
    variant: str
    turns: Sequence[Turn]


def measure(setting: str, mesh: str, rounds: int, steps: int | None) -> list[Measured]:
    """Starts the variants for one mesh, checks that they train alike, times them.

    Raises:
      RuntimeError: a process ended.
      ValueError: losses differ.
    """
    variants = [v for v in LABELS if v != "tf_jit" or mesh == "1x1"]
    bindings = [*SETTINGS[setting].bindings, f"MESH_SHAPE = ({mesh.replace('x', ',')})"]
    arguments = [str(CHECKED_STEPS), *bindings]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                interleave.Worker(
                    f"{setting} {mesh} {variant}",
                    [sys.executable, str(VARIANTS), variant, *arguments],
                )
            )
            for variant in variants
        ]
        announced = [worker.announced() for worker in workers]
        check_losses({w.name: a["losses"] for w, a in zip(workers, announced)})
        in_call = announced[0]["steps_per_call"]
        calls = -(-(steps or SETTINGS[setting].steps) // in_call)
        turns = interleave.take_turns(workers, rounds=rounds, calls=calls)
