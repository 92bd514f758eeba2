"""The cost of pipelines in a step: bubbles, and beside them recomputation.

Both are shares of the parts that make up a step's time, not parts themselves;
recomputation in a bubble counts as bubble alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.recomputed import recomputed
from meshwright.framework.compiler.hlo.step_time import StepTime
from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineSchedule
from meshwright.layers.stacks.repeat import Unroll
from meshwright.trainers.experiment.stacks import pipelines, repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedPipeline:
    """A pipeline of a task.

    Args:
      path: the dotted path of its layer.
      schedule: its schedule.
      loops: names of its loops in the compiled program, forward and backward; empty if
        there is no program for TPUs.
      loop_seconds: their time in a call of the program; None if there are none.
    """

    path: str
    schedule: PipelineSchedule
    loops: frozenset[str]
    loop_seconds: float | None

    @property
    def bubble_seconds(self) -> float | None:
        """The bubbles' share of `loop_seconds`."""
        if self.loop_seconds is None:
            return None
        return self.schedule.bubble_fraction * self.loop_seconds


def planned_pipelines(
    task: Any, times: StepTime | None, sources: Sources | None
) -> tuple[PlannedPipeline, ...]:
    """The task's pipelines, with the time of their loops in a program that has times.

    A pipeline's loops make its schedule's iterations, on nothing but its layers.
    """
    layers = {} if times is None else _layers(times, sources)
    planned = []
    for path, stack in pipelines(task).items():
        loops = frozenset(
            name
            for (name, trips), inside in layers.items()
            if trips == stack.schedule.iterations
            and inside
            and all(f"{layer}.".startswith(f"{path}.") for layer in inside)
        )
        seconds = None
        if loops:
            seconds = sum(op.exposed for op in times.all() if _is_in(op, loops))
        planned.append(
            PlannedPipeline(
                path=path, schedule=stack.schedule, loops=loops, loop_seconds=seconds
            )
        )
    return tuple(planned)


def recompute_seconds(
    task: Any,
    times: StepTime | None,
    module: HloModule | None,
    planned: Sequence[PlannedPipeline],
) -> float | None:
    """The time of recomputation in a call of a program, outside of bubbles.

    None if there is no time, or a stack is unrolled: no loop then tells it apart.
    """
    unrolled = (stack.unroll is Unroll.UNROLLED for stack in repeats(task))
    if times is None or any(unrolled):
        return None
    again = recomputed(module)
    total = 0.0
    for op in times.all():
        if op.name in again:
            around = (p.schedule for p in planned if _is_in(op, p.loops))
            bubbles = next((schedule.bubble_fraction for schedule in around), 0.0)
            total += (1 - bubbles) * op.exposed
    return total


def _layers(times: StepTime, sources: Sources) -> dict[tuple[str, int], set[str]]:
    """The layers that are computed in each loop, by the loop's name and trips."""
    by_loop: dict[tuple[str, int], set[str]] = {}
    for op in times.all():
        source = sources.find(op.op_name) if op.loops else None
        for loop in op.loops:
            layers = by_loop.setdefault((loop.name, loop.trips), set())
            if source and source.layer:
                layers.add(source.layer)
    return by_loop


def _is_in(op: Any, loops: frozenset[str]) -> bool:
    return any(loop.name in loops for loop in op.loops)
