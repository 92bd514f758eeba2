"""What Orbax is told to do in other ways than its own."""

from __future__ import annotations

import datetime
import logging
import sys
import threading
from collections.abc import Iterator

import orbax.checkpoint as ocp
from etils import epath

from meshwright.framework.compiler.xla.processes import arrive


def barrier() -> ocp.multihost.BarrierSyncFn:
    """Orbax's, for its threads, but none to wait at after a failure.

    Those threads meet the other processes even on the way out of a failure. As the
    others wait elsewhere by then, the failure would come out after 20 minutes.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def wait_unless_failed(*, key: str, timeout_ms: int) -> None:
        # Whoever saves may be handling an error that has nothing to do with it.
        is_background = threading.current_thread() is not threading.main_thread()
        if is_background and (failure := sys.exception()) is not None:
            raise failure
        arrive()
        wait(key=key, timeout_ms=timeout_ms)

    return wait_unless_failed


class _Step(ocp.path.step.Metadata):
    @property
    def commit_timestamp(self) -> datetime.datetime:
        return datetime.datetime.min


class StepNames(ocp.path.step.NameFormat[_Step]):
    """Orbax's names, which are numbers; what they hold is not looked at.

    By default it reads when each step was saved, from a file that has no digest, and
    raises all sorts of errors if that is damaged or the clock was wrong. Steps are
    ordered by their numbers, never by time.
    """

    _names = ocp.path.step.standard_name_format()

    def build_name(self, step: int) -> str:
        return self._names.build_name(step)

    def find_all(self, base_path: epath.PathLike) -> Iterator[_Step]:
        for found in self._names.find_all(base_path):
            yield _Step(step=found.step, path=found.path)

    def find_step(self, base_path: epath.PathLike, step: int) -> _Step:
        found = self._names.find_step(base_path, step)
        return _Step(step=found.step, path=found.path)


def is_not_chatter(record: logging.LogRecord) -> bool:
    """Whether a record is of more interest than what Orbax says at INFO; a filter."""
    return record.levelno >= logging.WARNING or "/orbax/" not in record.pathname
