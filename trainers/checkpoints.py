"""Checkpoints: a training's state, saved in the background, restored onto any mesh."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import absl.logging
import orbax.checkpoint as ocp
from etils import epath

from meshwright.framework.nested_map import NestedMap

_MAX_DIFFERENCES = 10


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or put into this model."""


class Access(enum.Enum):
    """What a `Checkpoints` does with its directory."""

    READ_WRITE = "read_write"
    READ = "read"
    """Makes, writes and removes nothing: to watch a directory that another fills."""


class Checkpoints:
    """The checkpoints of one training, by step number, in one directory.

    A checkpoint is a state (nested dicts of arrays in their logical shapes), a manifest
    (dotted path -> shape and dtype) and the caller's metadata as JSON. It is written
    under a temporary name and renamed when whole: a save that fails or is killed
    leaves the earlier steps as they are. What was damaged afterwards is noticed when
    files are missing or cut short, not when single bits of a weight are flipped.

    In a program of several processes, all make the same calls.

    Args:
      directory: a local path, made if it is not there, or `gs://...`.
      max_to_keep: how many of the newest steps to keep; None keeps all.
      access: whether anything may be written.

    Raises:
      CheckpointError: the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        max_to_keep: int | None = 3,
        access: Access = Access.READ_WRITE,
    ):
        absl.logging.get_absl_logger().addFilter(_is_not_orbax_chatter)
        self._local = "://" not in os.fspath(directory)
        if self._local:
            directory = os.path.abspath(directory)
        self._directory = epath.Path(directory)
        self._access = access
        if access is Access.READ_WRITE:
            self._check_writable()
        options = ocp.CheckpointManagerOptions(
            create=False,
            cleanup_tmp_directories=access is Access.READ_WRITE,
            preservation_policy=ocp.checkpoint_managers.LatestN(max_to_keep),
            # When it fails in the background, Orbax's other threads wait 20 minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._saving: int | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps on disk, ascending. Waits for a save under way."""
        self.wait()
        return self._steps_on_disk()

    def latest_step(self) -> int | None:
        """The newest step on disk, or None. Waits for a save under way."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: NestedMap, *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Saves `state` as `step` in the background.

        Returns when the arrays have been copied off their devices, or are held by the
        runtime where host and device share memory: they may be donated at once. Waits
        first for an earlier save.

        Args:
          step: larger than every step saved so far.
          state: nested map of `jax.Array`, in logical shapes, sharded in any way.
          metadata: small and JSON-like; `metadata()` returns it.

        Raises:
          CheckpointError: this save cannot start, or an earlier one failed.
          ValueError: the directory is only read.
        """
        if self._access is Access.READ:
            raise ValueError(f"{self._directory} was opened with Access.READ")
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise CheckpointError(
                f"step {step} is not after step {newest}, the newest checkpoint in "
                f"{self._directory}: restore that one, or use another directory"
            )
        self._check_writable()
        self.check_space(step, sum(array.nbytes for array in state.leaves()))
        json.dumps(metadata)  # What is no JSON fails here, not in the background.
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_to_dict(state)),
            manifest=ocp.args.JsonSave(_manifest(state)),
            metadata=ocp.args.JsonSave(dict(metadata or {})),
        )
        self._saving = step
        with self._write_errors():
            self._manager.save(step, args=items, force=True)

    def check_space(self, step: int, needed: int) -> None:
        """Checks that `needed` bytes are free, for a later `save` of `step`.

        Raises:
          CheckpointError: they are not.
        """
        if not self._local:
            return
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise CheckpointError(
                f"checkpoint step {step} needs {needed:,} bytes but only {free:,} are "
                f"free in {self._directory}: free some space; {self._kept()}"
            )

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
          CheckpointError: it failed; said once.
        """
        with self._write_errors():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the save under way and ends the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata saved with `step`, or with the newest; raises as `restore`."""
        return self._read_json(self._existing(step), "metadata")

    def restore(self, step: int | None, abstract: NestedMap) -> NestedMap:
        """The state saved as `step`, laid out as `abstract` says.

        Args:
          step: None for the newest.
          abstract: nested map of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Raises:
          CheckpointError: no such step; it is damaged; or it holds other weights than
            `abstract`, of which the message lists the first.
          ValueError: an entry of `abstract` has no sharding.
        """
        for path, spec in abstract.items_by_path():
            if spec.sharding is None:
                raise ValueError(f"restoring {path} needs a sharding for it")
        step = self._existing(step)
        differences = _differences(self._read_json(step, "manifest"), abstract)
        if differences:
            shown = differences[:_MAX_DIFFERENCES]
            if len(differences) > len(shown):
                shown[-1] = f"... and {len(differences) - len(shown) + 1} more"
            raise CheckpointError(
                f"checkpoint step {step} in {self._directory} is of another model:\n  "
                + "\n  ".join(shown)
                + "\nuse the configuration that it was saved with, or another directory"
            )
        item = ocp.args.StandardRestore(_to_dict(abstract))
        return NestedMap(self._read(step, "state", item))

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self._directory}")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self._directory}, only of "
                + ", ".join(str(one) for one in steps)
            )
        return steps[-1] if step is None else step

    def _steps_on_disk(self) -> list[int]:
        # What Orbax remembers is stale after a failed save, or when others write.
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def _read_json(self, step: int, item: str) -> dict[str, Any]:
        return self._read(step, item, ocp.args.JsonRestore())

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        items = ocp.args.Composite(**{item: args})
        try:
            return self._manager.restore(step, args=items)[item]
        # Missing and cut files surface as KeyError, ValueError, plain Exception, ...
        except Exception as error:
            others = [one for one in self._steps_on_disk() if one != step]
            remedy = "there is no other step"
            if others:
                remedy = f"remove it to go on from step {others[-1]}, the newest other"
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} is damaged or was removed: "
                f"its {item} cannot be read ({_brief(error)}); {remedy}"
            ) from error

    def _check_writable(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._local:
                with tempfile.TemporaryFile(dir=self._directory):
                    pass
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to {self._directory} ({error}): choose "
                "another directory or make it writable"
            ) from error

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        # A write can fail as OSError, or as TensorStore's ValueError, or time out.
        except Exception as error:
            raise CheckpointError(
                f"saving checkpoint step {self._saving} in {self._directory} failed "
                f"({_brief(error)}): check the disk; {self._kept()}"
            ) from error

    def _kept(self) -> str:
        steps = self._steps_on_disk()
        return f"step {steps[-1]} is kept" if steps else "no earlier step is there"


def _to_dict(tree: NestedMap) -> dict[str, Any]:
    return {
        key: _to_dict(value) if isinstance(value, NestedMap) else value
        for key, value in tree.items()
    }


def _manifest(state: NestedMap) -> dict[str, Any]:
    return {
        path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for path, leaf in state.items_by_path()
    }


def _differences(saved: Mapping[str, Any], abstract: NestedMap) -> list[str]:
    """One line for each leaf that is missing, extra, or of another form.

    Weights come first: what differs in their optimizer slots follows from them.
    """
    wanted = _manifest(abstract)
    lines = []
    paths = saved.keys() | wanted.keys()
    for path in sorted(paths, key=lambda p: (not p.startswith("theta."), p)):
        if path not in saved:
            lines.append(f"{path} {_form(wanted[path])} is not in the checkpoint")
        elif path not in wanted:
            lines.append(f"{path} {_form(saved[path])} is only in the checkpoint")
        elif saved[path] != wanted[path]:
            lines.append(
                f"{path} is {_form(saved[path])} in the checkpoint, "
                f"{_form(wanted[path])} in this model"
            )
    return lines


def _form(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']}{entry['shape']}"


def _brief(error: BaseException) -> str:
    """The first cause, on one line: TensorStore says what failed at the very end."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    if len(text) > 400:
        text = f"{text[:150]} ... {text[-250:]}"
    return f"{type(error).__name__}: {text}"


def _is_not_orbax_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "/orbax/" not in record.pathname
