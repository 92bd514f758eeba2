"""The time that it takes to check a program for faults of XLA's partitioner.

    python benchmarks/step_times/look_time.py [--settings=tiny,large] [--meshes=2x1,2x4]
      [--partitioner=shardy] [--rounds=3]

Compiles the trainer's step of `lm/stdlib_tiny.gin` for virtual CPU devices, in the
settings of `step_time.py`. Seconds are CPU seconds of all threads, medians over rounds,
each in a new process: from tracing to the compiled program, and of these the seconds of
propagating shardings, checking the operations that the table of faults names, and
deciding on their layouts (`docs/operators.md`). Not counted are numbering the
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
      look: of these, the seconds of checking it.
      repairs: number of repairs.
    """

    all: float
    look: float
    repairs: int


def measure(
    bindings: Sequence[str], mesh: Sequence[int], partitioner: mw.Partitioner
) -> Times:
    """Compiles the train step, in a process of its own."""
    mw.set_platform("cpu", 8)
    bindings = [*bindings, f"MESH_SHAPE = {tuple(mesh)}"]
    experiment, _ = build_experiment(["lm/stdlib_tiny.gin"], bindings)
    programs = StepPrograms(dataclasses.replace(experiment, partitioner=partitioner))
    look, decided = 0.0, check.decided

    def timed(*args):
        nonlocal look
        start = time.process_time()
        result = decided(*args)
        look += time.process_time() - start
        return result

    with mock.patch.object(check, "decided", timed):
        start = time.process_time()
        program = programs.main
        everything = time.process_time() - start
    return Times(all=everything, look=look, repairs=len(program.repairs))


HEADER = """\
setting  mesh   all s  look s  look / all  repairs
--------------------------------------------------"""


def table_row(setting: str, mesh: str, times: Sequence[Times]) -> str:
    """The line below `HEADER`: medians."""
    everything, look = (
        statistics.median(getattr(t, name) for t in times) for name in ("all", "look")
    )
    share = statistics.median(t.look / t.all for t in times)
    return (
        f"{setting:8} {mesh:5} {everything:6.2f} {look:7.2f}  {share:10.1%}  "
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
