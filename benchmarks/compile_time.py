"""Compile time against the number of partitions, for TPU v3 pods, without the pods.

    python benchmarks/compile_time.py [--partitions=8,32,128,512,2048] [--rounds=2]
      [--partitioner=shardy]

GShard's promise: all partitions share one program, so that compiling for a thousand
partitions takes about as long as for a few. The program is the trainer's step for the
Transformer of `paper/dense.gin`. It grows with the mesh (X, Y), where Y is 2X: the
batch with X, model, hidden and heads with Y. So a device holds as much of a weight
matrix or an activation on all meshes.

Seconds are CPU seconds of all threads, user and system, medians over rounds: of tracing
in TF and lowering to StableHLO, and of XLA's compiling for TPU. The last line is the
longest total over the shortest. A compile takes about 20 CPU seconds and needs libtpu:
pip install 'meshwright[plan]'.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import tensorflow as tf
from absl import app, flags

from meshwright import framework as mw
from meshwright.framework.devices.topology import topology_devices
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

SIDES = {8: 2, 32: 4, 128: 8, 512: 16, 2048: 32}
"""Partitions, and the side of their square of v3 chips, with two per chip."""

_PARTITIONS = flags.DEFINE_list("partitions", [*map(str, SIDES)], "Sizes of the mesh.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Compiles per size.", lower_bound=1)
_PARTITIONER = flags.DEFINE_enum_class(
    "partitioner", mw.Partitioner.SHARDY, mw.Partitioner, "XLA's partitioner."
)
# JAX notifies listeners of this event when the module is lowered and XLA is next.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """One compile.

    Args:
      trace: CPU seconds of tracing and lowering.
      compile: CPU seconds of XLA.
      peak: bytes that the program takes on a device.
    """

    trace: float
    compile: float
    peak: int

    @property
    def total(self) -> float:
        """CPU seconds of both."""
        return self.trace + self.compile


def programs_for(
    side: int,
    *,
    partitioner: mw.Partitioner = mw.Partitioner.SHARDY,
    devices: Sequence[jax.Device] | None = None,
) -> StepPrograms:
    """The programs of the experiment for 2 * side * side partitions."""
    X, Y = side, 2 * side
    experiment, _ = build_experiment(
        ["paper/dense.gin"],
        [
            f"MESH_SHAPE = ({X}, {Y})",
            f"GLOBAL_BATCH = {8 * X}",
            f"MODEL_DIMS = {128 * Y}",
            f"HIDDEN_DIMS = {512 * Y}",
            f"NUM_HEADS = {2 * Y}",
            "HEAD_DIM = 128",
            "NUM_LAYERS = 4",
        ],
    )
    experiment = dataclasses.replace(experiment, partitioner=partitioner)
    return StepPrograms(experiment, devices=devices)


def measure(
    side: int, partitioner: mw.Partitioner, lowered: Sequence[float]
) -> Compile:
    """Compiles the train step for a square of v3 chips.

    Args:
      side: chips along each side.
      partitioner: XLA's partitioner.
      lowered: CPU times at which modules were lowered, the latest last.
    """
    devices = topology_devices(f"v3:{side}x{side}")
    programs = programs_for(side, partitioner=partitioner, devices=devices)
    start = time.process_time()
    program = programs.main
    end = time.process_time()
    return Compile(
        trace=lowered[-1] - start,
        compile=end - lowered[-1],
        peak=program.memory().peak,
    )


HEADER = f"""\
{"":19}  {"CPU seconds":^22}  MiB
{"partitions":>10}  {"mesh":7}  {"trace":>6}  {"compile":>7}  {"all":>5}  a device
{"-" * 55}"""


def table_row(partitions: int, compiles: Sequence[Compile]) -> str:
    """The line below `HEADER` for compiles of one size: medians."""
    side = SIDES[partitions]
    trace, compiling, total = (
        statistics.median(getattr(c, name) for c in compiles)
        for name in ("trace", "compile", "total")
    )
    return (
        f"{partitions:10}  {f'{side}x{2 * side}':7}  {trace:6.1f}  {compiling:7.1f}  "
        f"{total:5.1f}  {compiles[0].peak / 2**20:8.0f}"
    )


def sizes(texts: Sequence[str]) -> list[int]:
    """The numbers of partitions in `--partitions`.

    Raises:
      ValueError: a number is not among `SIDES`; the message lists them.
    """
    unknown = [text for text in texts if text not in map(str, SIDES)]
    if unknown:
        raise ValueError(f"--partitions: {unknown[0]!r} is none of {[*SIDES]}")
    return sorted({int(text) for text in texts})


def main(argv: Sequence[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        chosen = sizes(_PARTITIONS.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    mw.set_platform("cpu")  # TF traces on the CPU.
    try:
        topology_devices("v3:2x2")
    except ImportError as error:
        sys.exit(f"compile_time.py: {error}")
    lowered: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: (
            lowered.append(time.process_time()) if event == _LOWERED else None
        )
    )
    compiles = collections.defaultdict(list)
    for number in range(_ROUNDS.value):
        for partitions in chosen[::-1] if number % 2 else chosen:
            result = measure(SIDES[partitions], _PARTITIONER.value, lowered)
            compiles[partitions].append(result)
            print(f"round {number + 1}: {partitions}", file=sys.stderr, flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    print(
        f"Python {platform.python_version()}, tensorflow {tf.__version__}, "
        f"jax {versions['jax']}, libtpu {versions['libtpu']}; "
        f"{_PARTITIONER.value.value}; {_ROUNDS.value} rounds"
    )
    print(HEADER, *(table_row(n, compiles[n]) for n in chosen), sep="\n")
    totals = [statistics.median(c.total for c in compiles[n]) for n in chosen]
    print(f"longest / shortest: {max(totals) / min(totals):.2f}")


if __name__ == "__main__":
    app.run(main)
