"""The cost of pipelines in a step: bubbles, and beside them recomputation.

Both are shares of the parts that make up a step's time, not parts themselves;
recomputation in a bubble counts as bubble alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
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
      loop_seconds: the time of its layers in all iterations, in a call of the program;
        None if there are no loops.
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

    A pipeline's loops make its schedule's iterations, on nothing but its layers. With
    `PipelineOrder.ONE_F_ONE_B` the time is that of iterations with a forward and a
    backward pass, in proportion for the others, and without that of the loss.
    """
    planned = []
    for path, stack in pipelines(task).items():
        loops, seconds = frozenset(), None
        if times is not None:
            loops, seconds = _time(path, stack.schedule, times, sources)
        planned.append(
            PlannedPipeline(
                path=path, schedule=stack.schedule, loops=loops, loop_seconds=seconds
            )
        )
    return tuple(planned)


def _time(
    path: str, schedule: PipelineSchedule, times: StepTime, sources: Sources
) -> tuple[frozenset[str], float | None]:
    """The names of a pipeline's loops, and its layers' time in all iterations."""
    layers = _layers(times, sources)

    def is_own(layer: str) -> bool:
        return f"{layer}.".startswith(f"{path}.")

    def chosen(trips: int, which: Callable[[Iterable[bool]], bool]) -> frozenset[str]:
        """Loops of so many trips with the pipeline's layers, in which `which` are."""
        own = {loop: [*map(is_own, inside)] for loop, inside in layers.items()}
        return frozenset(
            name
            for (name, made), are_own in own.items()
            if made == trips and any(are_own) and which(are_own)
        )

    if not schedule.is_one_f_one_b:
        loops = chosen(schedule.iterations, all)
        inside = (op for op in times.all() if _is_in(op, loops))
        return loops, sum(op.exposed for op in inside) if loops else None
    trips = schedule.iterations - schedule.backward_start
    around = chosen(trips, lambda are_own: not all(are_own))
    # Another loop around it may make as many trips.
    nests = ([x.name for x in op.loops if x.name in around] for op in times.all())
    deepest = max(nests, key=len, default=[])[-1:]
    if not deepest:
        return frozenset(), None
    seconds = 0.0
    for op in times.all():
        source = sources.find(op.op_name)
        if _is_in(op, frozenset(deepest)) and (
            source is None or not source.layer or is_own(source.layer)
        ):
            seconds += op.exposed
    loops = {*deepest, *chosen(schedule.backward_start, all)}
    return frozenset(loops), seconds * schedule.iterations / trips


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
