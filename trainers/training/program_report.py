"""Leaves the program of a run in its folder, for TensorBoard."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time

from meshwright.framework.compiler.xla.processes import is_first_process
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.plan_document import document
from meshwright.trainers.planning.planning import report_of
from meshwright.trainers.planning.tensorboard import program_files
from meshwright.trainers.startup.messages import log_line
from meshwright.trainers.training.stop_signals import StopRequest

log = logging.getLogger("absl")

_POLL_SECONDS = 0.2


class _Abandoned(SystemExit):
    """Ends the thread, without a word even if it comes twice."""


class ProgramWriter:
    """Writes the plan and the page of the main program, while training goes on.

    Of several processes the first writes. What goes wrong is only a warning: no step
    needs the files.

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
            report = report_of(programs, compile_seconds=compile_seconds)
            values = document(report, config_text=self._config)
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
