"""The time that it takes to check a program for faults of XLA's partitioner.

    python benchmarks/step_times/inspection_time.py [--settings=tiny,large]
      [--meshes=2x1,2x4] [--partitioner=shardy] [--rounds=3]

Compiles the trainer's step of `lm/stdlib_tiny.gin` for virtual CPU devices, in the
settings of `step_time.py`. Seconds are CPU seconds of all threads, medians over rounds,
each in a new process: from tracing to the compiled program, and of these the seconds of
propagating shardings, checking the operations that the table of faults names, and
deciding on their layouts (`docs/internals/operators.md`). Not counted are numbering the
operations and writing the decisions, which take a tenth of that, nor XLA's time for the
constraints so added.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from unittest import mock

from absl import app, flags
from step_time import SETTINGS

from meshwright import framework as mw
from meshwright.framework.compiler.repair import check
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

_PARTITIONER = flags.DEFINE_enum_class(
    "partitioner", mw.Partitioner.SHARDY, mw.Partitioner, "XLA's partitioner."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """CPU seconds of one compile.

    Args:
      all: seconds from tracing to the compiled program.
      inspection: of these, the seconds of checking it.
      repairs: number of repairs.
    """

    all: float
    inspection: float
    repairs: int


def measure(
    bindings: Sequence[str], mesh: Sequence[int], partitioner: mw.Partitioner
) -> Times:
    """Compiles the train step, in a process of its own."""
    mw.set_platform("cpu", 8)
    bindings = [*bindings, f"MESH_SHAPE = {tuple(mesh)}"]
    experiment, _ = build_experiment(["lm/stdlib_tiny.gin"], bindings)
    programs = StepPrograms(dataclasses.replace(experiment, partitioner=partitioner))
    inspection, decided = 0.0, check.decided

    def timed(*args):
        nonlocal inspection
        start = time.process_time()
        result = decided(*args)
        inspection += time.process_time() - start
        return result

    with mock.patch.object(check, "decided", timed):
        start = time.process_time()
        program = programs.main
        everything = time.process_time() - start
    return Times(all=everything, inspection=inspection, repairs=len(program.repairs))


HEADER = """\
setting  mesh   all s  inspection s    of all  repairs
------------------------------------------------------"""


def table_row(setting: str, mesh: str, times: Sequence[Times]) -> str:
    """The line below `HEADER`: medians."""
    everything = statistics.median(t.all for t in times)
    inspection = statistics.median(t.inspection for t in times)
    share = statistics.median(t.inspection / t.all for t in times)
    return (
        f"{setting:8} {mesh:5} {everything:6.2f} {inspection:13.2f}  {share:8.1%}  "
        f"{times[0].repairs:7}"
    )


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    spawn = multiprocessing.get_context("spawn")
    print(HEADER)
    for setting in flags.FLAGS.settings:
        for mesh in flags.FLAGS.meshes:
            shape = [int(n) for n in mesh.split("x")]
            args = SETTINGS[setting].bindings, shape, _PARTITIONER.value
            times = []
            for _ in range(flags.FLAGS.rounds):
                with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                    times.append(pool.submit(measure, *args).result())
            print(table_row(setting, mesh, times), flush=True)


if __name__ == "__main__":
    flags.FLAGS.set_default("meshes", ["2x1", "2x4"])
    flags.FLAGS.set_default("rounds", 3)
    app.run(main)
