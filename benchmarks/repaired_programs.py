"""What the repair pass changes in shipped experiments' programs.

    python benchmarks/repaired_programs.py [--configs=lm/stdlib_tiny.gin,...]
      [--bindings="MESH_SHAPE = (2, 4)"]

Compiles the trainer's step of each config for eight virtual CPU devices, with the
table of faults (`docs/internals/operators.md`) and with an empty one, under both
partitioners.
Where the optimized HLO has the same instructions, but for metadata, numbers and order
in the text, the time of a step is the same too. Bytes are those that a device receives
in all collectives, each counted once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import re
from collections.abc import Sequence
from unittest import mock

from absl import app, flags

from meshwright import framework as mw
from meshwright.framework.compiler.repair import check
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

CONFIGS = (
    "lm/stdlib_tiny.gin",
    "rec/synthetic_ncf.gin",
    "image/synthetic_resnet.gin",
    "seg/synthetic_unet.gin",
    "asr/espeak_conformer.gin",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """The parts of a program that are compared.

    Args:
      lines: lines of optimized HLO, without metadata and numbers, sorted.
      bytes: bytes that a device receives in collectives.
      repairs: number of repairs of each fault.
    """

    lines: list[str]
    bytes: int
    repairs: dict[str, int]


def compiled(
    config: str, bindings: Sequence[str], partitioner: mw.Partitioner, repair: bool
) -> Compiled:
    """Compiles the train step, in a process of its own."""
    mw.set_platform("cpu", 8)
    experiment, _ = build_experiment([config], bindings)
    programs = StepPrograms(dataclasses.replace(experiment, partitioner=partitioner))
    none = mock.patch.multiple(check, PRESENT=[], GUARDED=frozenset())
    with contextlib.nullcontext() if repair else none:
        program = programs.main
    text = re.sub(r", metadata=\{[^}]*\}", "", program.hlo_text())
    # Names of instructions and of parameters have numbers.
    text = re.sub(r"(%[\w.-]+?)(\.\d+)+\b", r"\1", text)
    text = re.sub(r"(\.\d+)+(?=: )", "", text)
    return Compiled(
        lines=sorted(text.splitlines()),
        bytes=sum(collective.bytes for collective in program.collectives()),
        repairs=collections.Counter(r.fault.name for r in program.repairs),
    )


HEADER = """\
config                     partitioner repairs HLO     kB received  without
---------------------------------------------------------------------------"""


def table_row(
    config: str, partitioner: mw.Partitioner, on: Compiled, off: Compiled
) -> str:
    """The line below `HEADER`, and a line for each kind of repair."""
    same = "same" if on.lines == off.lines else "differs"
    row = (
        f"{config:26} {partitioner.value:11} {sum(on.repairs.values()):7} {same:7} "
        f"{on.bytes / 1e3:11,.1f} {off.bytes / 1e3:8,.1f}"
    )
    return "\n  ".join([row, *(f"{n} {name}" for name, n in on.repairs.items())])


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    spawn = multiprocessing.get_context("spawn")
    print(HEADER)
    for config in flags.FLAGS.configs:
        for partitioner in mw.Partitioner:
            both = []
            for repair in (True, False):
                with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                    args = config, flags.FLAGS.bindings, partitioner, repair
                    both.append(pool.submit(compiled, *args).result())
            print(table_row(config, partitioner, *both), flush=True)


if __name__ == "__main__":
    flags.DEFINE_list("configs", [*CONFIGS], "Shipped configs.")
    flags.DEFINE_multi_string("bindings", [], "Gin bindings for all configs.")
    app.run(main)
