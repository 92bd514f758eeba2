"""Leaves the program of a run in its folder, for TensorBoard."""

from __future__ import annotations

import logging
import threading
import time

from meshwright.framework.compiler.xla.processes import is_first_process
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.plan_document import document
from meshwright.trainers.planning.planning import report_of
from meshwright.trainers.planning.tensorboard import program_files
from meshwright.trainers.startup.messages import log_line

log = logging.getLogger("absl")


class ProgramWriter:
    """Writes the plan and the page of the main program, while training goes on.

    Of several processes the first writes. What goes wrong is only a warning: no step
    needs the files.

    Args:
      folder: of the run.
      config: the configuration in effect, as text.
    """

    def __init__(self, folder: str, config: str):
        self._folder, self._config = folder, config
        self._thread: threading.Thread | None = None

    def start(self, programs: StepPrograms, compile_seconds: float) -> None:
        """Begins to write, once the main program is compiled."""
        if is_first_process():
            self._thread = threading.Thread(
                target=self._write, args=(programs, compile_seconds)
            )
            self._thread.start()

    def close(self) -> None:
        """Waits until all is written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, programs: StepPrograms, compile_seconds: float) -> None:
        start = time.perf_counter()
        try:
            report = report_of(programs, compile_seconds=compile_seconds)
            values = document(report, config_text=self._config)
            program_files.write(self._folder, values, report.traced)
        except Exception as error:  # Whatever it is, training goes on.
            log.warning(
                "TensorBoard will not show this program, as its plan and page could "
                "not be written: %s: %s",
                type(error).__name__,
                error,
            )
            return
        seconds = time.perf_counter() - start
        log_line("wrote the program's plan and page for TensorBoard in %.1f s", seconds)
