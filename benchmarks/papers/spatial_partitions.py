"""Memory of a device against spatial partitions, for one volume on virtual CPU devices.

    python benchmarks/papers/spatial_partitions.py [--partitions=1,2,4,8] [--size=64]
      [--partitioner=shardy]

GSPMD 5.6's promise: split one dim of the input and memory falls with the number of
partitions. The program is the trainer's step for the network of
`seg/synthetic_unet.gin` on a batch of one volume of that side; bytes are a device's
need by the compiled program: state, batch and temporaries. Nothing is run. The ideal is
the first row's memory divided by the partitions: weights and halos exceed it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from absl import app, flags

from meshwright import framework as mw
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

_PARTITIONS = flags.DEFINE_list(
    "partitions", ["1", "2", "4", "8"], "Numbers of partitions."
)
_SIZE = flags.DEFINE_integer("size", 64, "Side of the volume.", lower_bound=8)
_PARTITIONER = flags.DEFINE_enum_class(
    "partitioner", mw.Partitioner.SHARDY, mw.Partitioner, "XLA's partitioner."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Megabytes of a device.

    Args:
      partitions: number of parts of the volume.
      arguments: megabytes of state and batch.
      peak: megabytes of these and of temporaries.
    """

    partitions: int
    arguments: float
    peak: float


def memory(partitions: int, size: int, partitioner: mw.Partitioner) -> Memory:
    """Compiles a training step of one volume, split along x."""
    experiment, _ = build_experiment(
        ["seg/synthetic_unet.gin"],
        [
            "include 'plans/spatial.gin'",
            f"MESH_SHAPE = ({partitions},)",
            f"PATCH = ({size}, {size}, {size})",
            "Experiment.global_batch = 1",
            f"Experiment.partitioner = %{partitioner}",
        ],
    )
    usage = StepPrograms(experiment).main.memory()
    return Memory(
        partitions=partitions,
        arguments=usage.arguments / 1e6,
        peak=usage.peak / 1e6,
    )


HEADER = f"""\
{"":10}{"MB a device":^24}{"peak, of the ideal":>20}
{"partitions":10}{"arguments":>12}{"peak":>12}{"":>20}
{"-" * 54}"""


def table_row(row: Memory, first: Memory) -> str:
    """The row's line below `HEADER`."""
    ideal = first.peak * first.partitions / row.partitions
    shown = f"{row.partitions:10}{row.arguments:12.1f}{row.peak:12.1f}"
    return f"{shown}{row.peak / ideal:20.2f}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--partitions: {text!r} is no number of 1 or more")
    return int(text)


def main(argv: Sequence[str]) -> None:
    """Compiles for each number of partitions and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        counts = [_count(text) for text in _PARTITIONS.value]
        mw.set_platform("cpu", max(counts))
        print(HEADER)
        rows: list[Memory] = []
        for count in counts:
            rows.append(memory(count, _SIZE.value, _PARTITIONER.value))
            print(table_row(rows[-1], rows[0]), flush=True)
    except ValueError as error:
        sys.exit(f"spatial_partitions.py: {error}")


if __name__ == "__main__":
    app.run(main)
