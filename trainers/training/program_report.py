"""Leaves the program of a run in its folder, for TensorBoard."""

from __future__ import annotations

import time

from meshwright.framework.compiler.xla.processes import is_first_process
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.plan_document import document
from meshwright.trainers.planning.planning import report_of
from meshwright.trainers.planning.tensorboard import program_files
from meshwright.trainers.startup.messages import log_line


def write_program(
    programs: StepPrograms, model_dir: str, config: str, compile_seconds: float
) -> None:
    """Writes the plan and the page of the compiled main program.

    Of several processes the first writes.

    Raises:
      OSError: the files cannot be written.
    """
    if not is_first_process():
        return
    start = time.perf_counter()
    report = report_of(programs, compile_seconds=compile_seconds)
    values = document(report, config_text=config)
    program_files.write(model_dir, values, report.traced)
    seconds = time.perf_counter() - start
    log_line("wrote the program's plan and page for TensorBoard in %.1f s", seconds)
