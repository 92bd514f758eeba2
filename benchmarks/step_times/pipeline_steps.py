"""Measured steps of the pipelined language model on eight CPU devices, in turns.

    python benchmarks/step_times/pipeline_steps.py [--programs=none,gpipe] [--rounds=6]
      [--steps=2] [--bindings="MODEL_DIMS = 256"]

Each program trains `lm/stdlib_tiny.gin` in a process of its own on eight virtual CPU
devices: without pipelining, on a mesh of (data, model), and as `lm/stdlib_pipeline.gin`
on one of (stages, data, model), by each schedule. The programs take turns, so that
other load of the machine meets them alike; a ratio is a program's time over that
without pipelining in the same round, and the table has medians.

All devices share the machine's cores, which do the work of bubbles too, as real devices
do in the time that they wait. So a ratio says how much more work a schedule is, and
nothing of links between chips. "bubbles" are the schedule's, of the stages' iterations.
Programs that train otherwise than the first are not compared, but a circular schedule:
its layers draw other first weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags
from interleave import (
    Turn,
    Worker,
    conditions,
    loss_difference,
    median_ratios,
    medians,
    take_turns,
)

from meshwright.layers.stacks.pipelines.pipeline_schedule import (
    PipelineOrder,
    PipelineSchedule,
)

VARIANTS = pathlib.Path(__file__).with_name("variants.py")
DEFERRED = r"Pipeline.deferred_gradients = ('feed_forward.*', 'attention.*')"
CHECKED_STEPS = 2
LOSS_TOLERANCE = 1e-4  # Relative.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A way to train the model.

    Args:
      label: its name in the table.
      mesh: devices along the axes: data and model, or stages before these.
      schedule: how its pipeline runs; None if it has none.
      deferred: whether gradients of weights are computed after the backward loop.
    """

    label: str
    mesh: tuple[int, ...]
    schedule: PipelineSchedule | None = None
    deferred: bool = False

    @property
    def arguments(self) -> list[str]:
        """The file and bindings of its job."""
        mesh = f"MESH_SHAPE = {self.mesh}"
        if self.schedule is None:
            return ["lm/stdlib_tiny.gin", mesh]
        return [
            "lm/stdlib_pipeline.gin",
            mesh,
            f"NUM_STAGES = {self.schedule.num_stages}",
            f"NUM_MICROBATCHES = {self.schedule.num_microbatches}",
            f"Pipeline.num_repeats = {self.schedule.num_repeats}",
            f"Pipeline.order = %PipelineOrder.{self.schedule.order.name}",
            *([DEFERRED] if self.deferred else []),
        ]


def _pipelined(
    label: str,
    mesh,
    microbatches: int,
    repeats: int = 1,
    *,
    order: PipelineOrder = PipelineOrder.FORWARD_FIRST,
    **more,
):
    schedule = PipelineSchedule(
        num_stages=mesh[0],
        num_microbatches=microbatches,
        num_repeats=repeats,
        order=order,
    )
    return Program(label=label, mesh=mesh, schedule=schedule, **more)


PROGRAMS = {
    "none": Program(label="no pipeline", mesh=(2, 4)),
    "gpipe": _pipelined("GPipe", (2, 2, 2), 4),
    "gpipe_after": _pipelined("GPipe, gradients after", (2, 2, 2), 4, deferred=True),
    "one_f_one_b": _pipelined("1F1B", (2, 2, 2), 4, order=PipelineOrder.ONE_F_ONE_B),
    "circular": _pipelined("circular, 2 rounds", (2, 2, 2), 4, 2),
    "circular_after": _pipelined(
        "circular, gradients after", (2, 2, 2), 4, 2, deferred=True
    ),
    "four_stages": _pipelined("GPipe", (4, 2, 1), 8),
    "four_stages_after": _pipelined(
        "GPipe, gradients after", (4, 2, 1), 8, deferred=True
    ),
    "four_stages_one_f_one_b": _pipelined(
        "1F1B", (4, 2, 1), 8, order=PipelineOrder.ONE_F_ONE_B
    ),
}
HEADER = (
    f"{'schedule':26} {'mesh':10} {'microbatches':>12} {'bubbles':>8} "
    f"{'CPU s':>8} {'wall s':>8} {'CPU':>6} {'wall':>6}"
)


def measured(
    names: Sequence[str], bindings: Sequence[str], rounds: int, steps: int
) -> tuple[dict[str, list[Turn]], Mapping[str, str]]:
    """The turns of each program, and versions of libraries.

    Raises:
      ValueError: programs do not train alike.
      RuntimeError: a worker ended.
    """
    with contextlib.ExitStack() as stack:
        workers, losses, versions = [], {}, {}
        for name in names:
            program = PROGRAMS[name]
            command = [sys.executable, str(VARIANTS), "meshwright", str(CHECKED_STEPS)]
            command += [*program.arguments, *bindings]
            worker = stack.enter_context(Worker(name, command))
            workers.append(worker)
            facts = worker.facts()  # One compiles after another.
            versions = facts["versions"]
            if program.schedule is None or program.schedule.num_repeats == 1:
                losses[name] = facts["losses"]
        if losses:  # Not of circular schedules alone.
            loss_difference(losses, LOSS_TOLERANCE)
        turns = take_turns(workers, rounds=rounds, steps=steps)
    return dict(zip(names, turns, strict=True)), versions


def row(program: Program, turns: Sequence[Turn], first: Sequence[Turn]) -> str:
    """A row of the table."""
    schedule, cells = program.schedule, ["", ""]
    if schedule is not None:
        cells = [str(schedule.num_microbatches), f"{schedule.bubble_fraction:.1%}"]
    mesh = "x".join(map(str, program.mesh))
    seconds = " ".join(f"{each:8.3f}" for each in medians(turns))
    ratios = " ".join(f"{each:6.2f}" for each in median_ratios(turns, first))
    numbers = f"{cells[0]:>12} {cells[1]:>8} {seconds} {ratios}"
    return f"{program.label:26} {mesh:10} {numbers}"


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_list("programs", [*PROGRAMS], "Programs; ratios are to the first.")
    flags.DEFINE_integer("rounds", 6, "Turns of each program.", lower_bound=1)
    flags.DEFINE_integer("steps", 2, "Steps of a turn.", lower_bound=1)
    flags.DEFINE_multi_string("bindings", [], "Gin bindings of all programs.")


def main(argv: Sequence[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    given = flags.FLAGS
    if unknown := [name for name in given.programs if name not in PROGRAMS]:
        raise app.UsageError(
            f"--programs: unknown {unknown[0]!r}: one of {[*PROGRAMS]}"
        )
    bindings = [*given.bindings, f"Experiment.steps_per_loop = {given.steps}"]
    try:
        turns, versions = measured(given.programs, bindings, given.rounds, given.steps)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"pipeline_steps.py: {error}")
    print(conditions(versions, given.rounds))
    print(HEADER)
    for name, own in turns.items():
        print(row(PROGRAMS[name], own, turns[given.programs[0]]))


if __name__ == "__main__":
    define_flags()
    app.run(main)
