"""Traces of some training steps, for xprof to open."""

from __future__ import annotations

import contextlib
import logging

import jax

from meshwright.trainers.startup.messages import log_line

log = logging.getLogger("absl")


class StepProfile:
    """Traces the calls of the main program that make the requested steps.

    A trace covers full calls: with several steps in a compiled loop it may begin some
    steps early and end some steps late. A call shows as the step that it begins with.

    Args:
      folder: the trace goes to its `plugins/profile`, where TensorBoard looks.
      steps: (first, last) step, from 1, or None for no trace.
    """

    def __init__(self, folder: str, steps: tuple[int, int] | None):
        self._folder = folder
        self._steps = steps
        self._tracing = False

    def warn_unless_within(self, first: int, last: int) -> None:
        """Warns if a run of steps `first` to `last` has none to trace."""
        if self._steps and (self._steps[1] < first or last < self._steps[0]):
            log.warning(
                "nothing to profile: steps %d to %d are requested, but this run makes "
                "steps %d to %d",
                *self._steps,
                first,
                last,
            )

    def starts_in(self, first: int, last: int) -> bool:
        """Whether to `start` before a call that makes steps `first` to `last`."""
        steps = self._steps
        return (
            steps is not None
            and not self._tracing
            and (first <= steps[1] and steps[0] <= last)
        )

    def start(self) -> None:
        """Starts to trace; calls made before should have ended."""
        jax.profiler.start_trace(self._folder)
        self._tracing = True

    def call(self, first: int) -> contextlib.AbstractContextManager:
        """The context of a call whose first step is `first`, its name in the trace."""
        if not self._tracing:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=first)

    def ends_by(self, last: int) -> bool:
        """Whether to `close` when all calls up to step `last` have ended."""
        return self._tracing and self._steps[1] <= last

    def close(self) -> None:
        """Ends the trace, if there is one, and writes it."""
        if self._tracing:
            self._tracing, self._steps = False, None
            jax.profiler.stop_trace()
            log_line("profile: xprof --logdir %s", self._folder)
