"""Leaves the program of a run in its folder, for TensorBoard."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import math
import os
import pathlib
import sys
import threading
import time

import jax

from meshwright.framework.compiler.xla.processes import is_first_process
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.plan_document import document
from meshwright.trainers.planning.planning import report_of
from meshwright.trainers.planning.search import plan_cache
from meshwright.trainers.planning.tensorboard import program_files
from meshwright.trainers.startup.messages import log_line
from meshwright.trainers.training.stop_signals import StopRequest

log = logging.getLogger("absl")

_PACKAGE = __name__.split(".")[0]

_POLL_SECONDS = 0.2

_OF_THE_LOOP = tuple(
    f"Experiment.{name} = "
    for name in (
        "checkpoint_interval",
        "decode_batches",
        "eval_batches",
        "eval_interval",
        "keep_checkpoints",
        "num_steps",
        "summary_interval",
    )
)


class _Abandoned(SystemExit):
    """Ends the thread, without a word even if it comes twice."""


class ProgramWriter:
    """Writes the plan and the page of the main program, while training goes on.

    Of several processes the first writes, unless an earlier start has written those of
    the same program. What goes wrong is only a warning: no step needs the files.

    Args:
      folder: of the run.
      config: the configuration in effect, as text.
      stop: whether the run is to stop, for which writing ends too.
    """

    def __init__(self, folder: str, config: str, stop: StopRequest):
        self._folder, self._config, self._stop = folder, config, stop
        self._thread: threading.Thread | None = None

    def start(self, programs: StepPrograms, compile_seconds: float) -> None:
        """Begins to write, once the main program is compiled."""
        if is_first_process():
            self._thread = threading.Thread(
                target=self._write, args=(programs, compile_seconds)
            )
            self._thread.start()

    def close(self, most_seconds: float = math.inf) -> None:
        """Waits until all is written, or abandoned as the run is to stop.

        Args:
          most_seconds: to wait; XLA, at work in the thread, cannot be interrupted.
        """
        if self._thread is None:
            return
        end = time.monotonic() + most_seconds
        while self._thread.is_alive() and time.monotonic() < end:
            if self._stop.is_asked:
                # Raised in the thread between two of Python's instructions: for a large
                # program it works for minutes, and a preemption's grace is short.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Abandoned)
                )
            self._thread.join(_POLL_SECONDS)

    def _write(self, programs: StepPrograms, compile_seconds: float) -> None:
        start = time.perf_counter()
        try:
            digest = digest_of(programs, self._config)
            traced = programs.traced_main
            kept = program_files.kept_plan(self._folder, digest, traced)
            if kept is not None:
                log_line(
                    "the program's plan and page for TensorBoard are there already"
                )
                if kept["config"] != self._config:
                    kept["config"] = self._config
                    program_files.write_plan(self._folder, kept)
                return
            report = report_of(programs, compile_seconds=compile_seconds)
            values = document(report, config_text=self._config) | {"digest": digest}
            program_files.write(self._folder, values, report.traced)
            seconds = time.perf_counter() - start
            log_line(
                "wrote the program's plan and page for TensorBoard in %.1f s", seconds
            )
        except _Abandoned:
            pass
        except Exception as error:  # Whatever it is, training goes on.
            log.warning(
                "TensorBoard will not show this program, as its plan and page could "
                "not be written: %s: %s",
                type(error).__name__,
                error,
            )


def digest_of(programs: StepPrograms, config: str) -> str:
    """Tells apart programs whose plans or pages differ.

    The page names lines of code: so the digest depends on the sources of all modules
    that are not installed, too. Those of this package are among the versions. Of the
    configuration what only the trainer's loop reads makes no difference.
    """
    config = "\n".join(
        line for line in config.splitlines() if not line.startswith(_OF_THE_LOOP)
    )
    mesh, device = programs.experiment.plan.mesh, jax.devices()[0].device_kind
    versions = json.dumps(plan_cache.versions())
    digest = hashlib.sha256(programs.traced_main.written.stable_hlo)
    digest.update("\0".join([config, str(mesh), device, versions]).encode())
    others = [m for name, m in [*sys.modules.items()] if name.split(".")[0] != _PACKAGE]
    paths = {getattr(module, "__file__", None) for module in others}
    for path in sorted(path for path in paths if path and path.endswith(".py")):
        if "site-packages" in path or path.startswith(sys.base_prefix):
            continue
        if os.path.basename(path).startswith("__autograph_generated"):  # By TF, anew.
            continue
        with contextlib.suppress(OSError):
            digest.update(path.encode() + pathlib.Path(path).read_bytes())
    return digest.hexdigest()
