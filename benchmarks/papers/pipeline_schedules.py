"""What a pipeline's schedules leave idle, from programs compiled for TPUs.

    python benchmarks/papers/pipeline_schedules.py [--microbatches=16] [--repeats=1,2,4]
      [--orders=FORWARD_FIRST,ONE_F_ONE_B] [--deferred=,.*] [--parts=1]
      [--recompute=NOTHING] [--topology=v3:8x16] [--job=paper/table4_8x8x4.gin]
      [--own_batch]

The pipelined Transformer of GSPMD's Table 4 with 8 stages, in smaller batches or with
`--own_batch` in the job's: GPipe's schedule and the circular one, gradients of weights
in the backward loop or after it (`Pipeline.deferred_gradients`), backward passes after
all forward passes, or in turns with them (`Pipeline.order`). In `parts` a step goes
through the pipeline that often, with so many times fewer microbatches
(`Experiment.gradient_accumulation_steps`).

"idle" is the bubbles' part of the time that the stages take, "formula" that part if
forward, input gradients and weight gradients took equally long; "alive" is for how many
microbatches a stage keeps activations. Times are estimated for the compiled programs
(docs/reference/planning/step_times.md); nothing is run.
Below are formulas of schedules that other frameworks have: of 1F1B, ZB-H1 and ZBV by
Qi et al. (2023, sections 2 and 6), of DualPipe by DeepSeek-V3 (2024, Table 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from absl import app, flags

from meshwright.framework.modeling.recompute import Recompute
from meshwright.layers.stacks.pipelines.pipeline_schedule import (
    PipelineOrder,
    PipelineSchedule,
)
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.planning.plan_pipelines import PlannedPipeline
from meshwright.trainers.planning.planning import CompileReport, plan

FORWARD, INPUTS, WEIGHTS = 1.0, 1.0, 1.0
"""Times of a layer's forward pass, and of the gradients of its inputs and weights."""
ROWS_A_MICROBATCH = 8


def formula(schedule: PipelineSchedule, *, deferred: bool) -> float:
    """The idle part of a schedule whose layers take `FORWARD`, `INPUTS`, `WEIGHTS`."""
    in_loops = FORWARD + INPUTS + (0.0 if deferred else WEIGHTS)
    busy = schedule.num_microbatches * schedule.num_repeats
    idle = (schedule.iterations - busy) * in_loops
    return idle / (idle + busy * (FORWARD + INPUTS + WEIGHTS))


def alive(schedule: PipelineSchedule, *, deferred: bool) -> float:
    """How many microbatches' activations a stage has for all of its layers."""
    if deferred:
        return float(schedule.slots)
    return schedule.kept_passes / schedule.num_repeats  # Bubbles' too.


def formulas_of_others(stages: int, microbatches: int) -> dict[str, tuple[float, int]]:
    """The idle parts of schedules that let devices do different things at a time.

    With it the microbatches whose activations a stage has.
    """
    backward = INPUTS + WEIGHTS
    both = FORWARD + backward
    idle = {
        "1F1B": (stages - 1) * (FORWARD + backward),
        "ZB-H1": (stages - 1) * (FORWARD + INPUTS - WEIGHTS),
        "ZBV": 0.0,  # Where the three take equally long.
        "DualPipe": (stages / 2 - 1) * (both + backward - 3 * WEIGHTS),
    }
    busy = microbatches * (FORWARD + backward)
    kept = {name: stages + (name == "DualPipe") for name in idle}
    return {
        name: (bubbles / (bubbles + busy), kept[name]) for name, bubbles in idle.items()
    }


def stack_seconds(report: CompileReport, pipeline: PlannedPipeline) -> float:
    """Time of a step in loops over a pipeline's layers, deferred gradients too."""
    if pipeline.schedule.is_one_f_one_b:  # Its loops have the loss, too.
        return pipeline.loop_seconds
    inside, around = set(), set()
    for op in report.time.all():
        names = [loop.name for loop in op.loops]
        source = report.program.sources.find(op.op_name)
        if source and f"{source.layer}.".startswith(f"{pipeline.path}."):
            inside.update(names)
        if pipeline.loops & {*names}:
            around.update(names[: names.index(*pipeline.loops & {*names})])
    return sum(
        op.exposed
        for op in report.time.all()
        if any(loop.name in inside - around for loop in op.loops)
    )


def planned(
    gin_file: str,
    topology: str,
    repeats: int,
    microbatches: int | None,
    deferred: str,
    recompute: str | None,
    parts: int,
    order: PipelineOrder = PipelineOrder.FORWARD_FIRST,
) -> CompileReport:
    """The compiled step; what is None is as the job has it."""
    params = []
    if microbatches is not None:
        params += [
            f"NUM_MICROBATCHES = {microbatches // parts}",
            f"Experiment.gradient_accumulation_steps = {parts}",
            f"GLOBAL_BATCH = {microbatches * ROWS_A_MICROBATCH}",
        ]
    params += [
        f"Pipeline.num_repeats = {repeats}",
        f"Pipeline.order = %PipelineOrder.{order.name}",
        f"Pipeline.deferred_gradients = {(deferred,) if deferred else ()}",
    ]
    if recompute is not None:
        params += [
            f"Repeat.recompute = %Recompute.{recompute}",
            "Repeat.saved_names = ()",
        ]
    experiment, _ = build_experiment([gin_file], params)
    return plan(experiment, topology=topology)


def row(report: CompileReport, deferred: str) -> str:
    """A row of the table."""
    (pipeline,) = report.pipelines
    schedule = pipeline.schedule
    parts = report.experiment.gradient_accumulation_steps
    name = "1F1B" if schedule.is_one_f_one_b else "GPipe"
    if schedule.num_repeats > 1:
        circular = f"circular x{schedule.num_repeats}"
        name = f"{circular} 1F1B" if schedule.is_one_f_one_b else circular
    name += f" / {parts}" if parts > 1 else ""
    where = f"after: {deferred}" if deferred else "in the loop"
    kept = alive(schedule, deferred=bool(deferred))
    cells = f"{name:18} {where:16} {schedule.iterations:4} {kept:6.1f}"
    if report.time is None:
        return f"{cells}  needs {report.peak_bytes / 2**30:.1f} GiB, does not fit"
    steps = report.experiment.steps_per_loop
    idle = pipeline.bubble_seconds / stack_seconds(report, pipeline)
    return (
        f"{cells} {idle:8.1%} {formula(schedule, deferred=bool(deferred)):8.1%}"
        f" {pipeline.bubble_seconds / steps:8.3f} {report.step_seconds:8.3f}"
        f" {report.peak_bytes / 2**30:6.1f}"
    )


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_string("job", "paper/table4_8x8x4.gin", "It has GLOBAL_BATCH.")
    flags.DEFINE_string("topology", "v3:8x16", "The topology.")
    flags.DEFINE_integer("microbatches", 16, "A step.", lower_bound=1)
    flags.DEFINE_bool("own_batch", False, "The job's own batch and microbatches.")
    policies = [policy.name for policy in Recompute]
    flags.DEFINE_enum("recompute", None, policies, "`Repeat.recompute`, if given.")
    flags.DEFINE_list("repeats", ["1", "2", "4"], "Rounds of the schedules.")
    flags.DEFINE_list("parts", ["1"], "Parts of a step; they divide the microbatches.")
    orders = [order.name for order in PipelineOrder]
    flags.DEFINE_list("orders", orders, "`Pipeline.order`; 1F1B defers no gradients.")
    flags.DEFINE_list("deferred", ["", ".*"], "`Pipeline.deferred_gradients`.")


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    given = flags.FLAGS
    head = "iter  alive     idle  formula  bubbles   step s    GiB"
    print(f"{'schedule':18} {'weights':16} {head}")
    cases = itertools.product(
        map(int, given.parts),
        map(int, given.repeats),
        (PipelineOrder[name] for name in given.orders),
        given.deferred or [""],
    )
    for parts, repeats, order, deferred in cases:
        if deferred and order is PipelineOrder.ONE_F_ONE_B:
            continue
        report = planned(
            given.job,
            given.topology,
            repeats,
            None if given.own_batch else given.microbatches,
            deferred,
            given.recompute,
            parts,
            order,
        )
        print(row(report, deferred), flush=True)
    last = report.pipelines[0].schedule
    others = formulas_of_others(last.num_stages, last.num_microbatches * parts)
    for name, each in others.items():
        print(f"{name:18} {'':16} {'':4} {each[1]:6.1f} {'':8} {each[0]:8.1%}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
