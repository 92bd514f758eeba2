"""Changes to Orbax's defaults, and what it takes."""

from __future__ import annotations

import datetime
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from meshwright.framework.compiler.xla.processes import arrive
from meshwright.framework.nested_map import NestedMap


def barrier() -> ocp.multihost.BarrierSyncFn:
    """Orbax's barrier for its threads, but without waiting after a failure.

    Orbax's threads meet the other processes even when they fail. As the others wait
    elsewhere by then, the failure would show only after 20 minutes.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def wait_unless_failed(*, key: str, timeout_ms: int) -> None:
        # The saving thread may be handling an error unrelated to the save.
        is_background = threading.current_thread() is not threading.main_thread()
        if is_background and (failure := sys.exception()) is not None:
            raise failure
        arrive()
        wait(key=key, timeout_ms=timeout_ms)

    return wait_unless_failed


def to_dict(tree: NestedMap) -> dict[str, Any]:
    """Nested dicts, which Orbax knows."""
    return {
        key: to_dict(value) if isinstance(value, NestedMap) else value
        for key, value in tree.items()
    }


def check_shardings(abstract: NestedMap) -> None:
    """Checks that each leaf of what is to be restored has a sharding.

    Raises:
      ValueError: one has none.
    """
    for path, spec in abstract.items_by_path():
        if spec.sharding is None:
            raise ValueError(f"restoring {path} needs a sharding for it")


class _Step(ocp.path.step.Metadata):
    @property
    def commit_timestamp(self) -> datetime.datetime:
        return datetime.datetime.min


class StepNames(ocp.path.step.NameFormat[_Step]):
    """Orbax's names, which are numbers, without a look at the contents.

    By default Orbax reads when each step was saved, from a file without a digest, and
    raises all sorts of errors if that file is damaged or the clock was wrong. Steps are
    ordered by their numbers, never by time.
    """

    _names = ocp.path.step.standard_name_format()

    def build_name(self, step: int) -> str:
        return self._names.build_name(step)

    def find_all(self, base_path: epath.PathLike) -> Iterator[_Step]:
        for step in self._names.find_all(base_path):
            yield _Step(step=step.step, path=step.path)

    def find_step(self, base_path: epath.PathLike, step: int) -> _Step:
        metadata = self._names.find_step(base_path, step)
        return _Step(step=metadata.step, path=metadata.path)


def is_not_chatter(record: logging.LogRecord) -> bool:
    """A filter: whether a record is of more interest than messages at INFO of savers.

    Those are Orbax's, and TF's of how long it took to save the input's state.
    """
    savers = ("/orbax/", "/tensorflow/python/checkpoint/")
    chatter = any(saver in record.pathname for saver in savers)
    return record.levelno >= logging.WARNING or not chatter
