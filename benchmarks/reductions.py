"""Bytes that a step sends, by where its program reduces partial sums.

    python benchmarks/reductions.py [--mesh=4,2] [--microbatches=8]
      [--partitioner=shardy]

A small Transformer on virtual CPU devices, data parallel and tensor parallel. The first
table is of a batch in microbatches (`Experiment.gradient_accumulation_steps`): "each"
reduces the gradients of weights in the loop over microbatches, as with annotations
alone; "once" leaves them unreduced until after the loop; "sharded" reduces them onto
shards, as weight updates are sharded. The second is of an undivided batch, with the
stream between layers replicated along tensor (`plans/data_tensor.gin`) or split by it
(`plans/sequence_tensor.gin`); "typed" leaves the gradients of layers' inputs unreduced
(`ShardingPlan.unreduced_gradient_axes`). Bytes are per device and step, as rings send
them, from the compiled program; loops count as often as they run. Temporaries are
memory of a device. Nothing is run.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags

from meshwright import framework as mw
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.report import Collective
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

_MESH = flags.DEFINE_list("mesh", ["4", "2"], "Devices along data and tensor.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Per step.", lower_bound=1)
_PARTITIONER = flags.DEFINE_enum_class(
    "partitioner", mw.Partitioner.SHARDY, mw.Partitioner, "XLA's partitioner."
)

SIZES = (
    "MODEL_DIMS = 128",
    "HIDDEN_DIMS = 512",
    "NUM_HEADS = 8",
    "HEAD_DIM = 16",
    "NUM_LAYERS = 4",
    "VOCAB_SIZE = 512",
    "SEQUENCE_LENGTH = 64",
    "Experiment.num_steps = 1",
    "Experiment.optimizer = @Adam()",
    "Adam.learning_rate = @ConstantSchedule()",
    "ConstantSchedule.value = 0.001",
)


class _EachTime(StepPrograms):
    """Programs that reduce the gradients of weights in each microbatch."""

    unreduced_gradient_axes = ()


def sent(collective: Collective) -> float:
    """Bytes that a device sends for a collective, by a ring."""
    size = len(collective.groups[0])
    share = {
        "all-reduce": 2 * (size - 1) / size,
        "all-gather": (size - 1) / size,
        "all-to-all": (size - 1) / size,
        "reduce-scatter": size - 1,
        "collective-permute": 1,
    }
    return share[collective.kind] * collective.bytes


def step_bytes(program: mw.Program) -> Mapping[tuple[str, str], float]:
    """Bytes that a device sends in a step, by mesh axes and kind of collective."""
    module = HloModule(program.hlo_text())
    total: dict[tuple[str, str], float] = collections.defaultdict(float)
    for collective in program.collectives():
        loops = module.loops_around(module.by_name[collective.name].computation)
        times = math.prod(loop.trips for loop in loops)
        total[",".join(collective.axes or ("?",)), collective.kind] += times * sent(
            collective
        )
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One column of a table.

    Args:
      name: the column's heading.
      plan: the plan's name.
      unreduced_gradient_axes: the plan's; None for the shipped value.
      updates: `Experiment.weight_update_sharding`.
      programs: the trainer's programs, or a variant.
    """

    name: str
    plan: str = "data_tensor"
    unreduced_gradient_axes: Sequence[str] | None = None
    updates: str = "off"
    programs: type[StepPrograms] = StepPrograms

    def step(
        self, mesh: Sequence[int], microbatches: int, partitioner: mw.Partitioner
    ) -> mw.Program:
        """The training step, compiled."""
        params = [
            *SIZES,
            f"MESH_SHAPE = {tuple(mesh)}",
            f"Experiment.global_batch = {2 * mesh[0] * microbatches}",
            f"Experiment.gradient_accumulation_steps = {microbatches}",
            f"Experiment.weight_update_sharding = '{self.updates}'",
            f"Experiment.partitioner = %{partitioner}",
        ]
        if self.unreduced_gradient_axes is not None:
            axes = tuple(self.unreduced_gradient_axes)
            params.append(f"ShardingPlan.unreduced_gradient_axes = {axes}")
        files = ["lm/transformer.gin", f"plans/{self.plan}.gin"]
        experiment, _ = build_experiment(files, params)
        return self.programs(experiment).main


OF_MICROBATCHES = (
    Case(name="each", programs=_EachTime),
    Case(name="once"),
    Case(name="sharded", updates="all"),
)
OF_THE_STREAM = (
    Case(name="tensor"),
    Case(name="tensor, typed", unreduced_gradient_axes=("tensor",)),
    Case(name="sequence", plan="sequence_tensor", unreduced_gradient_axes=()),
    Case(name="sequence, typed", plan="sequence_tensor"),
)


def show(title: str, programs: Mapping[str, mw.Program]) -> None:
    """Prints a table, a column for each program."""
    bytes_sent = {name: step_bytes(program) for name, program in programs.items()}
    print(f"MB a step, {title}")
    heads = "".join(f"{name:>17}" for name in bytes_sent)
    print(f"{'along':<12} {'collective':<15}{heads}")
    for key in sorted({key for column in bytes_sent.values() for key in column}):
        cells = "".join(
            f"{column.get(key, 0) / 1e6:17.3f}" for column in bytes_sent.values()
        )
        print(f"{key[0]:<12} {key[1]:<15}{cells}")
    cells = "".join(
        f"{sum(column.values()) / 1e6:17.3f}" for column in bytes_sent.values()
    )
    print(f"{'all':<28}{cells}")
    memory = (program.memory().temporaries for program in programs.values())
    print(f"{'temporaries':<28}" + "".join(f"{m / 1e6:17.3f}" for m in memory))


def main(argv: Sequence[str]) -> None:
    """Compiles the cases and prints the bytes that they send."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        mesh = [int(size) for size in _MESH.value]
        if len(mesh) != 2 or min(mesh) < 1:
            raise ValueError
    except ValueError:
        sys.exit(f"reductions.py: --mesh: {','.join(_MESH.value)!r} is no two numbers")
    mw.set_platform("cpu", math.prod(mesh))
    for cases, microbatches in (
        (OF_MICROBATCHES, _MICROBATCHES.value),
        (OF_THE_STREAM, 1),
    ):
        show(
            f"{microbatches} microbatches, data x tensor {mesh}",
            {
                case.name: case.step(mesh, microbatches, _PARTITIONER.value)
                for case in cases
            },
        )


if __name__ == "__main__":
    app.run(main)
