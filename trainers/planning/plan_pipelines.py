"""What pipelines cost a step: bubbles, and with them what of it is recomputation.

Both are shares of the parts that a step's time is made of, not parts themselves; what
is recomputed in a bubble counts as bubble alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.recomputed import recomputed
from meshwright.framework.compiler.hlo.step_time import StepTime
from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.layers.stacks.pipeline_schedule import PipelineSchedule
from meshwright.layers.stacks.repeat import Unroll
from meshwright.trainers.experiment.stacks import pipelines, repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedPipeline:
    """A pipeline of a task.

    Args:
      path: of its layer, dotted.
      schedule: its schedule.
      loops: names of its loops in the compiled program, forward and backward; empty if
        there is no program for TPUs.
      loop_seconds: what they take of a call of the program; None if there are none.
    """

    path: str
    schedule: PipelineSchedule
    loops: frozenset[str]
    loop_seconds: float | None

    @property
    def bubble_seconds(self) -> float | None:
        """The bubbles' share of that."""
        if self.loop_seconds is None:
            return None
        return self.schedule.bubble_fraction * self.loop_seconds


def planned_pipelines(
    task: Any, times: StepTime | None, sources: Sources | None
) -> tuple[PlannedPipeline, ...]:
    """The task's pipelines, with their loops' share of a program's time if it has one.

    A pipeline's loops make its schedule's iterations, on nothing but its layers.
    """
    layers = {} if times is None else _layers(times, sources)
    found = []
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
            seconds = sum(one.exposed for one in times.all() if _is_in(one, loops))
        found.append(
            PlannedPipeline(
                path=path, schedule=stack.schedule, loops=loops, loop_seconds=seconds
            )
        )
    return tuple(found)


def recompute_seconds(
    task: Any,
    times: StepTime | None,
    module: HloModule | None,
    planned: Sequence[PlannedPipeline],
) -> float | None:
    """What a call of a program computes again, outside of bubbles.

    None if there is no time, or a stack is unrolled: then no loop tells it apart.
    """
    unrolled = (one.unroll is Unroll.UNROLLED for one in repeats(task))
    if times is None or any(unrolled):
        return None
    again = recomputed(module)
    total = 0.0
    for one in times.all():
        if one.name in again:
            around = (p.schedule for p in planned if _is_in(one, p.loops))
            bubbles = next((schedule.bubble_fraction for schedule in around), 0.0)
            total += (1 - bubbles) * one.exposed
    return total


def _layers(times: StepTime, sources: Sources) -> dict[tuple[str, int], set[str]]:
    """By name and trips of each loop the layers that are computed in it."""
    found: dict[tuple[str, int], set[str]] = {}
    for one in times.all():
        source = sources.find(one.op_name) if one.loops else None
        for loop in one.loops:
            layers = found.setdefault((loop.name, loop.trips), set())
            if source and source.layer:
                layers.add(source.layer)
    return found


def _is_in(one: Any, loops: frozenset[str]) -> bool:
    return any(loop.name in loops for loop in one.loops)
