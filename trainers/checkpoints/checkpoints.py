"""Checkpoints: a training's state, saved in the background, restored onto any mesh."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeVar

import absl.logging
import jax
import orbax.checkpoint as ocp
from etils import epath

from meshwright.framework.compiler.boundary.wide_elements import wide_elements
from meshwright.framework.compiler.xla.processes import (
    gather_from_processes,
    is_first_process,
)
from meshwright.framework.modeling.layer_order import LayerOrder
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints import checkpoint_digests as digests
from meshwright.trainers.checkpoints import checkpoint_manifest as manifests
from meshwright.trainers.checkpoints import checkpoint_orbax
from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError, brief
from meshwright.trainers.checkpoints.checkpoint_manifest import ArraySpec
from meshwright.trainers.checkpoints.checkpoint_progress import (
    Transfer,
    bytes_here,
    bytes_read,
    bytes_written,
)
from meshwright.trainers.startup.files import runs_near

log = logging.getLogger("absl")

_INPUT = "input"
T = TypeVar("T")


class Access(enum.Enum):
    """What a `Checkpoints` does with its directory."""

    READ_WRITE = "read_write"
    READ = "read"
    """Makes, writes and removes nothing, to watch a directory that others fill."""


class Checkpoints:
    """The checkpoints of one training, by step number, in one directory.

    A checkpoint is a state (nested dicts of arrays in their logical shapes), a manifest
    (dotted path -> shape and dtype), the caller's metadata as JSON, and the digests of
    all files. It is written under a temporary name and renamed when complete: a save
    that fails or is killed leaves the earlier steps as they are. Files that were
    damaged afterwards are noticed before they are read (`checkpoint_digests`).

    In a program of several processes, all make the same calls, and go by the steps that
    the first process sees. If a process cannot read a step, all raise. A save that
    fails in one process raises there alone, at its next call: the others wait, and
    their starter (`supervisor`) has to end them.

    Args:
      directory: a local path, made if it does not exist, or `gs://...`.
      max_to_keep: how many of the newest steps to keep; None keeps all.
      access: whether the directory may be written.
      orders: how leaves stack layers, by path: saved, and what is restored must agree.
      config: the operative configuration of what is restored, for messages.
      gather: collects a number from each process.

    Raises:
      CheckpointError: the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        max_to_keep: int | None = 3,
        access: Access = Access.READ_WRITE,
        orders: Mapping[str, LayerOrder] | None = None,
        config: str = "",
        gather: digests.Gather = gather_from_processes,
    ):
        absl.logging.get_absl_logger().addFilter(checkpoint_orbax.is_not_chatter)
        self._local = "://" not in os.fspath(directory)
        if self._local:
            directory = os.path.abspath(directory)
        self._directory = epath.Path(directory)
        self._access, self._orders = access, orders or {}
        self._config, self._gather = config, gather
        if access is Access.READ_WRITE:
            self._check_writable()
        options = ocp.CheckpointManagerOptions(
            create=False,
            cleanup_tmp_directories=access is Access.READ_WRITE,
            preservation_policy=ocp.checkpoint_managers.LatestN(max_to_keep),
            async_options=ocp.AsyncOptions(
                # If this fails in the background, Orbax's threads wait 20 minutes.
                create_directories_asynchronously=False,
                # It runs between the last byte and the final name: a step has its
                # digests.
                post_finalization_callback=self._write_digests,
                barrier_sync_fn=checkpoint_orbax.barrier(),
            ),
            step_name_format=checkpoint_orbax.StepNames(),
        )
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=options,
            handler_registry=digests.handler_registry(),
        )
        self._saving: int | None = None
        self._writing: Transfer | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that this process sees, ascending. Waits for a save under way."""
        self.wait()
        return self._steps_on_disk()

    def latest_step(self) -> int | None:
        """The newest step on disk, or None. Waits for a save under way."""
        return self._newest(skipped=())

    def save(
        self,
        step: int,
        state: NestedMap,
        *,
        metadata: Mapping[str, Any] | None = None,
        input_state: NestedMap | None = None,
    ) -> None:
        """Saves `state` as `step` in the background.

        Returns when the arrays have been copied off their devices, or are held by the
        runtime where host and device share memory: they may be donated at once. Waits
        first for an earlier save.

        Args:
          step: a number larger than every step saved so far.
          state: nested map of `jax.Array`, in logical shapes, sharded in any way.
          metadata: small and JSON-like; `metadata()` returns it.
          input_state: nested map of NumPy arrays, the same in all processes;
            `input_state()` returns it.

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
                f"{self._directory}: restore that step, or use another directory"
            )
        self._check_writable()
        arrays = [*state.leaves(), *(input_state or NestedMap()).leaves()]
        self.check_space(step, sum(array.nbytes for array in arrays))
        json.dumps(metadata)  # Fails here, not in the background.
        forms = manifests.to_json(manifests.forms(state, self._orders))
        items = {
            "state": ocp.args.StandardSave(checkpoint_orbax.to_dict(state)),
            "manifest": ocp.args.JsonSave(forms),
            "metadata": ocp.args.JsonSave(dict(metadata or {})),
        }
        if input_state is not None:
            items[_INPUT] = ocp.args.StandardSave(checkpoint_orbax.to_dict(input_state))
        self._saving = step
        size = bytes_here(state)
        self._writing = Transfer(f"saving step {step}", size, done=bytes_written)
        self._writing.start()
        with self._write_errors(), wide_elements():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def check_space(self, step: int, needed: int) -> None:
        """Checks that `needed` bytes are free, for a later `save` of `step`.

        Raises:
          CheckpointError: they are not free.
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
          CheckpointError: the save failed in this process; raised once.
        """
        with self._write_errors():
            self._manager.wait_until_finished()
        self._end_writing()

    def close(self) -> None:
        """Waits for the save under way and ends the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata saved with `step`, or with the newest step.

        Raises:
          CheckpointError: there is no such step, or it cannot be read.
        """
        step = self.existing(step)
        try:
            saved = manifests.read_json(self._folder(step), "metadata")
            if not isinstance(saved, dict):
                raise ValueError(f"it is a {type(saved).__name__}, no dict")
            return saved
        except Exception as error:
            raise CheckpointError(
                f"the metadata of checkpoint {self._folder(step)} cannot be read "
                f"({brief(error)})"
            ) from error

    def input_state(self, step: int) -> NestedMap | None:
        """The `input_state` that was saved with `step`, or None.

        Raises:
          CheckpointError: it cannot be read.
        """
        folder = self._folder(step) / _INPUT
        try:
            if not folder.exists():
                return None
            return NestedMap(ocp.StandardCheckpointHandler().restore(folder))
        except Exception as error:
            raise CheckpointError(
                f"the state of the input in {folder} cannot be read ({brief(error)})"
            ) from error

    def check_newest(self, abstract: NestedMap) -> None:
        """Checks that the newest step, if intact, is of this model; reads no arrays.

        Args:
          abstract: as in `restore`.

        Raises:
          CheckpointError: it does not hold the weights of `abstract`, as in `restore`.
        """
        step = self.latest_step()
        known = step is not None and manifests.is_as_saved(self._folder(step))
        if not all(self._gather(known)):
            return
        try:
            self._check_model(step, abstract)
        except CheckpointError:
            raise
        except Exception:  # `restore` tells what is wrong with it.
            log.debug("the manifest of step %s", step, exc_info=True)

    def restore(self, step: int | None, abstract: NestedMap) -> NestedMap:
        """The state saved as `step`, with the shardings of `abstract`.

        Args:
          step: None for the newest step that is not damaged. Newer steps, which are
            damaged, get names such as `12.damaged`, with a warning; with `Access.READ`
            they stay.
          abstract: nested map of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Raises:
          CheckpointError: there is no such step; it is, or all are, damaged; it cannot
            be read; or it does not hold the weights of `abstract`: the message lists
            the first differences.
          ValueError: an entry of `abstract` has no sharding.
        """
        checkpoint_orbax.check_shardings(abstract)

        def read(step: int) -> NestedMap:
            self._check_model(step, abstract)
            args = ocp.args.StandardRestore(checkpoint_orbax.to_dict(abstract))
            handler = ocp.StandardCheckpointHandler()
            return self._read_state(step, handler, args, abstract)

        return self._read_intact(step, read)

    def restore_part(
        self, step: int | None, choose: Callable[[int, dict[str, ArraySpec]], NestedMap]
    ) -> NestedMap:
        """Some leaves of the state that was saved as `step`.

        Args:
          step: as in `restore`.
          choose: takes the step that is read and the forms of all leaves, by path, and
            returns the chosen leaves as `restore` takes them: at their saved paths.

        Raises:
          CheckpointError: there is no such step; it is, or all are, damaged; or it
            cannot be read.
          ValueError: a chosen leaf has no sharding.
        """

        def read(step: int) -> NestedMap:
            saved = manifests.read(self._folder(step))
            abstract = choose(step, saved)
            self._check_orders(step, saved, abstract)
            checkpoint_orbax.check_shardings(abstract)
            item = checkpoint_orbax.to_dict(abstract)
            how = ocp.checkpoint_utils.construct_restore_args(item)
            args = ocp.args.PyTreeRestore(item, how, partial_restore=True)
            handler = ocp.PyTreeCheckpointHandler()
            return self._read_state(step, handler, args, abstract)

        return self._read_intact(step, read)

    def _read_intact(self, step: int | None, read: Callable[[int], T]) -> T:
        """The result of `read` for `step`, or for the newest step that is intact."""
        if step is not None:
            try:
                return self._verified_read(self.existing(step), read)
            except digests.DamagedError as error:
                steps = [s for s in self.steps() if s != step]
                remedy = f"take step {steps[-1]}" if steps else "there is no other"
                raise CheckpointError(f"{error}; {remedy}") from error
        damaged: dict[int, digests.DamagedError] = {}
        while (step := self._newest(skipped=damaged)) is not None:
            try:
                result = self._verified_read(step, read)
            except digests.DamagedError as error:
                damaged[step] = error
                if self._folder(step).exists():
                    log.warning("%s", error)
                else:
                    log.warning("%s was removed while it was read", self._folder(step))
            else:
                for number in damaged:
                    self._set_aside(number, instead=step)
                return result
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self._directory} are damaged:"
                + manifests.bullet_list([str(error) for error in damaged.values()])
                + "\nbring a checkpoint back from a copy, or begin in another directory"
            )
        raise self._none()

    def _none(self) -> CheckpointError:
        return CheckpointError(
            f"there is no checkpoint in {self._directory}: name the folder of a run "
            f"that has saved one, or train first{runs_near(self._directory)}"
        )

    def _verified_read(self, step: int, read: Callable[[int], T]) -> T:
        verified = digests.verify(self._folder(step), self._gather)
        result, failure = None, None
        try:
            verified.check_descriptions()
            result = read(step)
        except CheckpointError:  # It does not fit, in all processes alike.
            raise
        # Orbax and TensorStore raise KeyError, ValueError, plain Exception, ...
        except Exception as error:
            failure = error
        verified.check_still_there(self._gather)
        if any(self._gather(failure is not None)):
            raise CheckpointError(
                f"checkpoint {self._folder(step)} cannot be read, though its files are "
                f"as they were saved ({brief(failure)})"
            ) from failure
        return result

    def _set_aside(self, step: int, *, instead: int) -> None:
        """Renames a damaged step, out of the way of saves and of retention."""
        folder = self._folder(step)
        if self._access is Access.READ_WRITE and is_first_process():
            aside = self._directory / f"{step}.damaged"
            for count in itertools.count(2):
                if not aside.exists():
                    break
                aside = self._directory / f"{step}.damaged.{count}"
            # Another process's retention may have been faster.
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside)
                log.warning("kept the damaged checkpoint as %s", aside)
        log.warning("going on from step %d instead of step %d", instead, step)
        self._gather(0)  # All processes wait for the new name.

    def _folder(self, step: int) -> epath.Path:
        return self._directory / str(step)

    def existing(self, step: int | None = None) -> int:
        """`step` if on disk, or the newest step if None. Waits for a save under way.

        Raises:
          CheckpointError: there is no such step, or no step at all.
        """
        newest = self.latest_step()
        if newest is None:
            raise self._none()
        if step is None:
            return newest
        steps = self._steps_on_disk()
        if not self._gather(step in steps)[0]:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self._directory}, only of "
                + ", ".join(str(s) for s in steps)
            )
        return step

    def _newest(self, *, skipped: Container[int]) -> int | None:
        """The newest step that the first process sees, other than `skipped`."""
        newest = max((s for s in self.steps() if s not in skipped), default=-1)
        newest = self._gather(newest)[0]
        return None if newest < 0 else newest

    def _steps_on_disk(self) -> list[int]:
        # Orbax's memory is stale after a failed save, or when others write.
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def _check_model(self, step: int, abstract: NestedMap) -> None:
        saved = manifests.read(self._folder(step))
        name = f"checkpoint step {step} in {self._directory}"
        changed = functools.partial(manifests.config_changes, self._folder(step))
        manifests.check_model(name, saved, abstract, lambda: changed(self._config))
        self._check_orders(step, saved, abstract)

    def _check_orders(
        self, step: int, saved: Mapping[str, ArraySpec], abstract: NestedMap
    ) -> None:
        paths = [path for path, _ in abstract.items_by_path() if path in saved]
        wanted = {path: (saved[path], self._orders.get(path)) for path in paths}
        manifests.check_orders(f"checkpoint {self._folder(step)}", wanted)

    def _read_state(
        self,
        step: int,
        handler: ocp.CheckpointHandler,
        args: ocp.args.CheckpointArgs,
        abstract: NestedMap,
    ) -> NestedMap:
        # Not with Orbax's manager: a process that fails would never reach its barrier.
        what, size = f"restoring step {step}", bytes_here(abstract)
        with Transfer(what, size, done=bytes_read), wide_elements():
            state = NestedMap(handler.restore(self._folder(step) / "state", args=args))
        jax.block_until_ready(state.leaves())
        return state

    def _write_digests(self) -> None:
        """Runs in the background of the first process, once all files are written."""
        self._end_writing()
        # A bucket has no renaming: there, the mark of a complete step comes last.
        temporary = f"{self._saving}{ocp.utils.TMP_DIR_SUFFIX}"
        folders = [self._directory / temporary, self._folder(self._saving)]
        digests.write(next(folder for folder in folders if folder.exists()))

    def _end_writing(self) -> None:
        if self._writing is not None:
            self._writing.end()

    def _check_writable(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._local:
                tempfile.TemporaryFile(dir=self._directory).close()
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to {self._directory} ({brief(error)}): "
                "choose another directory or make it writable"
            ) from error

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        # A write can fail as OSError, or as TensorStore's ValueError, or time out.
        except Exception as error:
            self._end_writing()
            raise CheckpointError(
                f"saving checkpoint step {self._saving} in {self._directory} failed "
                f"({brief(error)}): check the disk; {self._kept()}"
            ) from error

    def _kept(self) -> str:
        steps = self._steps_on_disk()
        return f"step {steps[-1]} is kept" if steps else "no earlier step is there"
