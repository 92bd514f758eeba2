"""Bytes that a step sends, its gradients reduced once or for each microbatch.

    python benchmarks/reductions.py [--mesh=4,2] [--microbatches=8]
      [--partitioner=shardy]

A small Transformer, data parallel and tensor parallel on virtual CPU devices
(`plans/data_tensor.gin`), its batch in microbatches
(`Experiment.gradient_accumulation_steps`). "each" reduces the gradients of weights in
the loop over microbatches, as annotations alone have it; "once" leaves them unreduced
until after it; "sharded" reduces them onto shards, as the weights' updates are sharded.
Bytes are of a device and a step, as rings send them, from the compiled program; loops
count as often as they run. Nothing is run.
"""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags

from meshwright import framework as mw
from meshwright.framework.compiler.hlo_text import HloModule
from meshwright.framework.compiler.report import Collective
from meshwright.trainers.mains import build_experiment
from meshwright.trainers.programs import Programs

_MESH = flags.DEFINE_list("mesh", ["4", "2"], "Devices along data and tensor.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "A step's.", lower_bound=1)
_PARTITIONER = flags.DEFINE_enum_class(
    "partitioner", mw.Partitioner.SHARDY, mw.Partitioner, "XLA's partitioner."
)

MODES = {"each": "off", "once": "off", "sharded": "all"}
"""`Experiment.weight_update_sharding` of each."""
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


class _EachTime(Programs):
    """Whose weights' gradients are whole in each microbatch."""

    partial_axes = ()


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
    """Bytes that a device sends in a step by mesh axes and kind of collective."""
    module = HloModule(program.hlo_text())
    total: dict[tuple[str, str], float] = collections.defaultdict(float)
    for one in program.collectives():
        loops = module.loops_around(module.by_name[one.name].computation)
        times = math.prod(loop.trips for loop in loops)
        total[",".join(one.axes or ("?",)), one.kind] += times * sent(one)
    return total


def compiled(
    mode: str, mesh: Sequence[int], microbatches: int, partitioner: mw.Partitioner
) -> mw.Program:
    """The training step of a mode."""
    experiment, _ = build_experiment(
        ["lm/transformer.gin", "plans/data_tensor.gin"],
        [
            *SIZES,
            f"MESH_SHAPE = {tuple(mesh)}",
            f"Experiment.global_batch = {2 * mesh[0] * microbatches}",
            f"Experiment.gradient_accumulation_steps = {microbatches}",
            f"Experiment.weight_update_sharding = '{MODES[mode]}'",
            f"Experiment.partitioner = %{partitioner}",
        ],
    )
    return (_EachTime if mode == "each" else Programs)(experiment).main


def main(argv: Sequence[str]) -> None:
    """Compiles the modes and prints what they send."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        mesh = [int(size) for size in _MESH.value]
        if len(mesh) != 2 or min(mesh) < 1:
            raise ValueError
    except ValueError:
        sys.exit(f"reductions.py: --mesh: {','.join(_MESH.value)!r} is no two numbers")
    mw.set_platform("cpu", math.prod(mesh))
    found = {
        mode: step_bytes(compiled(mode, mesh, _MICROBATCHES.value, _PARTITIONER.value))
        for mode in MODES
    }
    print(f"MB a step of {_MICROBATCHES.value} microbatches, data x tensor {mesh}")
    print("along        collective          " + "".join(f"{m:>10}" for m in found))
    for key in sorted({key for one in found.values() for key in one}):
        cells = "".join(f"{one.get(key, 0) / 1e6:10.3f}" for one in found.values())
        print(f"{key[0]:<12} {key[1]:<19}{cells}")
    cells = "".join(f"{sum(one.values()) / 1e6:10.3f}" for one in found.values())
    print(f"{'all':<32}{cells}")


if __name__ == "__main__":
    app.run(main)
